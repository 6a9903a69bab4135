"""A process that works on a topic and notes what it begins and what was acknowledged.

    python -m torture.worker HOME ROUND

Every note is one line of JSON on standard output. Puts of several producers run at the same time;
all else comes one after the other, with a look at everything in between.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lance  # loaded now, so that opening is nothing but opening
import msgspec

from persisting import fs
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.topic_files import TopicFolder
from torture import plan
from torture.home import Home
from torture.injector import Control
from torture.losing import LosingFileSystem, any_loss
from torture.plan import Round
from torture.records import Record, as_arrow, plain, record

TOPIC, GROUP = "t", "g"
TRIES = 30
FLUSHED_LAST = 60
"""So many that every bucket has something to flush."""
RETENTION_PATIENCE = 20.0
Notes = dict[str, Any]


def note(**words: Any) -> None:
    os.write(1, (json.dumps({**words, "at": time.time()}) + "\n").encode())


def print_stacks() -> None:
    """Where everything stands, for the parent that believes it hangs."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


def spans(tag: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """What a tag holds, by bucket."""
    return {
        int(bucket): (one["start_offset"], one["end_offset"])
        for bucket, one in tag["buckets"].items()
    }


class GivenUp(Exception):
    """What failed still fails though nothing is struck any more."""


class Worker:
    """Does the steps of a round."""

    def __init__(self, disk: Path, round_: Round) -> None:
        self.disk, self.round = disk, round_
        self._control = Control.of_this_process()
        self._faults = round_.dice("faults")
        self._shape = round_.number
        self._puts = self._backups = 0
        self._numbers: dict[int, int] = {}
        self._writers: list[Any] = []
        self._readers: list[Any] = []
        self._known: list[str] = []

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print_stacks)
        await self._surely("open", self._open)
        await self._look()
        for step in plan.steps(self.round):
            self._tempt_fate()
            await getattr(self, f"_{step.pop('do')}")(**step)
        self._heal()
        await self._see_retention_at_work()
        await self._surely("close", self._close)
        note(end=True)

    # Faults

    def _tempt_fate(self) -> None:
        """Before a step: perhaps something will go wrong in it."""
        dice, control, fault = self._faults, self._control, self.round.fault
        if control is None:
            return
        if fault in ("eio", "enospc", "emfile") and dice.random() < 0.4:
            reach = dice.choice((2, 10, 60))
            control.strike(fault, dice.randrange(reach), lasting=dice.random() < 0.5)
        elif fault == "slow" and dice.random() < 0.3:
            control.slow(dice.choice((0.0, 0.001, 0.01)))
        elif fault == "clock" and dice.random() < 0.4:
            control.shift_clock(dice.choice((-3600, 3600, 86400 * 400, -86400 * 400, 0, 5, -5)))
            note(another_time=True)

    def _heal(self) -> None:
        if self._control is not None:
            self._control.heal()

    async def _surely(self, what: str, call: Any, **words: Any) -> Any:
        """Note, do, and do again until it succeeds: soon after a failure the fault is over."""
        for attempt in range(TRIES):
            note(begin=what, **words)
            try:
                done = await call()
            except Exception as exc:
                note(failed=what, error=str(exc), **words)
                latest = exc
                self._must_be_struck(exc)
                if attempt >= 1 or self._faults.random() < 0.7:
                    self._heal()
                await asyncio.sleep(0.05 * attempt)
            else:
                return done
        raise GivenUp(what) from latest

    async def _once(self, what: str, call: Any, **words: Any) -> Any:
        """Note and do; after a failure nothing is struck, and a look tells what became of it."""
        note(begin=what, **words)
        try:
            done = await call()
        except Exception as exc:
            note(failed=what, error=str(exc), **words)
            self._must_be_struck(exc)
            self._heal()
            await self._look()
            return None
        note(done=what, result=done, **words)
        return done

    def _must_be_struck(self, exc: Exception) -> None:
        if not isinstance(exc, StorageError):
            note(leaked=repr(exc), trace=traceback.format_exc())
        if "larger keep_versions" in str(exc) and self.round.options["keep_versions"] < 1:
            return  # a backup that its owner's cleaning outran
        if self._control is None or not self._control.fired:
            raise AssertionError(f"it failed though nothing was struck: {exc}") from exc

    # Opening and closing

    async def _open(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._writers = [
                await write_queue(
                    topic=TOPIC,
                    storage_path=str(self.disk),
                    num_buckets=self.round.num_buckets,
                    backend=self.round.backend,
                    backend_options=self.round.options,
                    writer_id=f"w{self.round.number}.{producer}",
                )
                for producer in range(plan.PRODUCERS)
            ]
        where: dict[str, Any] = {"topic": TOPIC, "storage_path": str(self.disk)}
        self._readers = [await read_queue(**where, group=GROUP)]
        for bucket in range(self.round.num_buckets):
            self._readers.append(await read_queue(**where, bucket_id=bucket))

    async def _close(self) -> None:
        for handles in (self._readers, self._writers):
            while handles:
                await handles[-1].close()
                handles.pop()
        note(done="close")

    async def _reopen(self, pick: int) -> None:
        await self._surely("close", self._close)
        await self._surely("open", self._open)
        await self._look()

    @property
    def _writer(self) -> Any:
        return self._writers[0]

    @property
    def _group(self) -> Any:
        return self._readers[0]

    # Puts

    async def _together(self, puts: list[list[dict[str, Any]]], beside: list[str]) -> None:
        calls = [self._produce(producer, script) for producer, script in enumerate(puts)]
        calls += [getattr(self, f"_{name}_beside")() for name in beside]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._look()

    async def _produce(self, producer: int, script: list[dict[str, Any]]) -> None:
        for put in script:
            records = [self._record(producer) for _ in range(put["count"])]
            self._puts += 1
            await self._put(put["kind"], records, producer, self._puts)

    def _record(self, producer: int) -> Record:
        number = self._numbers.get(producer, 0)
        self._numbers[producer] = number + 1
        made = record(f"{self.round.number}.{producer}", number, self._shape)
        return plain(made) if self.round.strict else made

    async def _put(self, kind: str, records: list[Record], producer: int, sequence: int) -> None:
        """Repeat it until it is acknowledged, or give it up at once; the writer knows repeats."""
        if kind == "arrow":
            records = list(map(plain, records))
        data: Any = {"one": records[0], "arrow": as_arrow(records)}.get(kind, records)
        writer = self._writers[producer]
        call = writer.put_arrow if kind == "arrow" else writer.put
        words = {"put": sequence, "producer": producer}
        note(records=records, **words)
        if sequence % 2:
            await self._surely("put", lambda: call(data, sequence=sequence), **words)
            note(done="put", **words)
        else:
            await self._once_beside("put", lambda: call(data, sequence=sequence), **words)

    async def _evolve(self, pick: int) -> None:
        self._shape += 1

    # Looks

    async def _look(self) -> None:
        async def look() -> dict[str, Any]:
            buckets = {
                bucket: await self._look_at(bucket, reader)
                for bucket, reader in enumerate(self._readers[1:])
            }
            return {"buckets": buckets, "tags": await self._tags()}

        seen = await self._surely("look", look)
        self._known = [name for bucket in seen["buckets"].values() for name in bucket["ids"]]
        note(look=seen)

    async def _look_at(self, bucket: int, reader: Any) -> dict[str, Any]:
        """All ids; where they begin and end, before and after: retention may come in between."""
        before = await self._span(bucket)
        await reader.reset()
        ids = [row["id"] for row in await reader.get(None)]
        after = await self._span(bucket)
        end = reader.offsets()[bucket] if ids else after[1]
        return {"ids": ids, "end": end, "before": before, "after": after}

    async def _span(self, bucket: int) -> tuple[int, int]:
        stats = (await self._writer.stats())["buckets"][bucket]
        return stats["start_offset"], stats["end_offset"]

    async def _tags(self) -> dict[str, Any]:
        return {tag["name"]: spans(tag) for tag in await self._writer.tags()}

    async def _query(self, pick: int = 1) -> None:
        async def query() -> list[str]:
            if not self._known:
                return []
            rows = await self._writer.query(f"n % 5 = {pick % 5}", columns=["id"])
            return [row["id"] for row in rows]

        found = await self._surely("query", query)
        note(asked="query", residue=pick % 5, ids=found)

    async def _lookup(self, pick: int) -> None:
        if not self._known:
            return
        name = self._known[pick % len(self._known)]
        rows = await self._surely("lookup", lambda: self._writer.lookup("id", name))
        note(asked="lookup", name=name, ids=[row["id"] for row in rows])

    async def _search(self, pick: int) -> None:
        if not self._known:
            return
        word = f"word{pick % 5}"
        rows = await self._surely(
            "search", lambda: self._writer.search(text=word, column="text", k=5000)
        )
        note(asked="search", residue=pick % 5, ids=[row["id"] for row in rows])
        await self._surely("search", lambda: self._writer.search(vector=[1.0, 2.0, 1.0, 0.5], k=3))

    async def _verify(self, pick: int) -> None:
        self._heal()  # a file that cannot be read is rightly called damaged
        note(verified=await self._surely("verify", self._writer.verify))

    # Upkeep

    async def _flush(self, pick: int = 0) -> None:
        await self._once("flush", self._writer.flush)

    async def _compact(self, pick: int = 0) -> None:
        await self._once("compact", self._writer.compact)

    async def _retain(self, rows: int) -> None:
        await self._once("retain", lambda: self._writer.retain(rows=rows), rows=rows)

    async def _see_retention_at_work(self) -> None:
        """After a flush, what lies beyond the limit of rows goes soon."""
        limit = self.round.limits.get("retention_rows")
        if limit is None or self.round.options["retention_waits_for"]:
            return
        await self._together([[{"kind": "batch", "count": FLUSHED_LAST}]], [])
        await self._flush()
        deadline = time.monotonic() + RETENTION_PATIENCE
        while late := [b for b in range(self.round.num_buckets) if self._is_beyond(b, limit)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"retention leaves more than {limit} rows in {late}")
            await asyncio.sleep(0.05)
        await self._look()

    def _is_beyond(self, bucket: int, limit: int) -> bool:
        """Whether a fragment could go, and enough would be left."""
        try:
            table = lance.dataset(str(self.disk / TOPIC / f"bucket_{bucket}" / "data.lance"))
            rows = [fragment.count_rows() for fragment in table.get_fragments()]
        except (OSError, ValueError):
            return True  # it is being cleaned up, or was never made
        return sum(rows[1:]) >= limit

    async def _create_index(self, column: str = "n") -> None:
        if self._known:
            await self._once("create_index", lambda: self._writer.create_index(column))

    async def _drop_index(self, column: str) -> None:
        await self._once("drop_index", lambda: self._writer.drop_index(column))

    async def _tag(self, name: str) -> None:
        async def tag() -> dict[str, Any]:
            return spans(await self._writer.tag(name))

        await self._once("tag", tag, name=name)

    async def _delete_tag(self, name: str) -> None:
        if name in await self._surely("tags", self._tags):
            await self._once("delete_tag", lambda: self._writer.delete_tag(name), name=name)

    async def _restore(self, name: str) -> None:
        async def restore() -> None:
            await self._writer.restore(name)

        if name in await self._surely("tags", self._tags):
            await self._once("restore", restore, name=name)
            await self._look()

    # Groups

    async def _consume(self, pick: int = 7) -> None:
        async def take() -> dict[str, Any]:
            before = self._group.offsets()
            try:
                rows = await self._group.get(1 + pick % 40)
            except OffsetOutOfRange:
                starts = {b: (await self._span(b))[0] for b in range(self.round.num_buckets)}
                note(told=self._group.offsets(), starts=starts)
                await self._group.reset()
                return await take()
            return {
                "got": [row["id"] for row in rows],
                "from": before,
                "to": self._group.offsets(),
            }

        note(**await self._surely("take", take))
        if pick % 3:
            await self._surely("commit", self._commit)

    async def _commit(self) -> None:
        note(commit=self._group.offsets())
        note(committed=await self._group.commit())

    # Backups

    async def _backup(self, pick: int = 0) -> None:
        self._backups += 1
        target = self.disk / f"backup-{self.round.number}-{self._backups}"

        def create() -> None:
            backup.create(TopicFolder.open(self.disk / TOPIC), target)

        await self._once_beside("backup", lambda: asyncio.to_thread(create), name=target.name)

    async def _once_beside(self, what: str, call: Any, **words: Any) -> None:
        """As :meth:`_once`, where others are at work: the look is theirs."""
        note(begin=what, **words)
        try:
            await call()
        except Exception as exc:
            note(failed=what, error=str(exc), **words)
            self._must_be_struck(exc)
            self._heal()
        else:
            note(done=what, **words)

    async def _flush_beside(self) -> None:
        await self._once_beside("flush", self._writer.flush)

    async def _compact_beside(self) -> None:
        await self._once_beside("compact", self._writer.compact)

    async def _create_index_beside(self) -> None:
        if self._known:
            await self._once_beside("create_index", lambda: self._writer.create_index("n"))

    async def _query_beside(self) -> None:
        if self._known:
            await self._once_beside("query", lambda: self._writer.query("n % 5 = 1"))

    async def _search_beside(self) -> None:
        if self._known:
            await self._once_beside(
                "search", lambda: self._writer.search(text="word1", column="text", k=9)
            )

    async def _tag_beside(self) -> None:
        await self._once_beside("tag beside", lambda: self._writer.tag("beside"), name="beside")

    async def _consume_beside(self) -> None:
        for pick in range(5, 9):
            await self._consume(pick)

    async def _backup_beside(self) -> None:
        await self._backup()


def losing(home: Home, round_: Round) -> LosingFileSystem:
    dice = round_.dice("power")
    return LosingFileSystem(
        home.disk,
        home.lost,
        dice.randrange(dice.choice((60, 300, 1200))),
        any_loss(dice),
    )


def main() -> None:
    home = Home(Path(sys.argv[1]))
    round_ = msgspec.json.decode(sys.argv[2], type=Round)
    faulthandler.register(signal.SIGUSR1, chain=False)
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    power = losing(home, round_) if round_.fault == "power" else None
    if power is not None:
        power.before_the_end = lambda label: note(power=label, loss=str(power._loss))
    with fs.use(power) if power is not None else nullcontext():
        try:
            asyncio.run(Worker(home.queues, round_).run())
        except BaseException as exc:
            note(crashed=repr(exc), trace=traceback.format_exc())
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
