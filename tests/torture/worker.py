"""A process that works on a topic and notes what it starts and what was acknowledged.

    python -m torture.worker WORKSPACE ROUND FOLLOWER

FOLLOWER is the process that follows the topic, which power loss ends too.

Every note is one line of JSON on standard output. Puts of several producers run concurrently; all
other steps are sequential, with an observation of everything in between.
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

import lance  # loaded before the topic is opened
import msgspec

from persisting import fs
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.topic_files import TopicFolder
from torture import scenario
from torture.injector import Control
from torture.power_loss import PowerLossFileSystem, random_loss
from torture.records import Record, as_arrow, plain, record
from torture.scenario import Round
from torture.workspace import Workspace

TOPIC, GROUP = "t", "g"
TRIES = 30
FLUSHED_LAST = 60
"""Enough records to give every bucket something to flush."""
RETENTION_PATIENCE = 60.0
Notes = dict[str, Any]


def note(**words: Any) -> None:
    os.write(1, (json.dumps({**words, "at": time.time()}) + "\n").encode())


def print_stacks() -> None:
    """Print the stacks of all tasks; the parent asks for it if this process seems to hang."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


def spans(tag: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Return the offsets that a tag holds, by bucket."""
    return {
        int(bucket): (part["start_offset"], part["end_offset"])
        for bucket, part in tag["buckets"].items()
    }


class StillFailing(Exception):
    """A call still fails although faults are no longer injected."""


class Worker:
    """Runs the steps of a round."""

    def __init__(self, disk: Path, round_: Round) -> None:
        self.disk, self.round = disk, round_
        self._control = Control.of_this_process()
        self._faults = round_.rng("faults")
        self._shape = round_.number
        self._puts = self._backups = 0
        self._numbers: dict[int, int] = {}
        self._writers: list[Any] = []
        self._readers: list[Any] = []
        self._known: list[str] = []

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print_stacks)
        await self._retry("open", self._open)
        await self._observe()
        for step in scenario.steps(self.round):
            self._arm_faults()
            await getattr(self, f"_{step.pop('do')}")(**step)
        self._heal()
        await self._check_retention_by_rows()
        await self._retry("close", self._close)
        note(end=True)

    # Faults

    def _arm_faults(self) -> None:
        """Before a step: inject a fault with some probability."""
        rng, control, fault = self._faults, self._control, self.round.fault
        if control is None:
            return
        if fault in ("eio", "enospc", "emfile") and rng.random() < 0.4:
            reach = rng.choice((2, 10, 60))
            control.inject(fault, rng.randrange(reach), lasting=rng.random() < 0.5)
        elif fault == "slow" and rng.random() < 0.3:
            control.slow(rng.choice((0.0, 0.001, 0.01)))
        elif fault == "clock" and rng.random() < 0.4:
            control.shift_clock(rng.choice((-3600, 3600, 86400 * 400, -86400 * 400, 0, 5, -5)))
            note(clock_shifted=True)

    def _heal(self) -> None:
        if self._control is not None:
            self._control.heal()

    async def _retry(self, what: str, call: Any, **words: Any) -> Any:
        """Repeat a call until it succeeds. The fault is removed soon after the first failure."""
        for attempt in range(TRIES):
            note(begin=what, **words)
            try:
                done = await call()
            except Exception as exc:
                note(failed=what, error=str(exc), **words)
                latest = exc
                self._require_injected_fault(exc)
                if attempt >= 1 or self._faults.random() < 0.7:
                    self._heal()
                await asyncio.sleep(0.05 * attempt)
            else:
                return done
        raise StillFailing(what) from latest

    async def _attempt(self, what: str, call: Any, **words: Any) -> Any:
        """Make one call. If it fails, remove the fault and observe what became of it."""
        note(begin=what, **words)
        try:
            done = await call()
        except Exception as exc:
            note(failed=what, error=str(exc), **words)
            self._require_injected_fault(exc)
            self._heal()
            await self._observe()
            return None
        note(done=what, result=done, **words)
        return done

    def _require_injected_fault(self, exc: Exception) -> None:
        if not isinstance(exc, StorageError):
            note(leaked=repr(exc), trace=traceback.format_exc())
        if "larger keep_versions" in str(exc) and self.round.options["keep_versions"] < 1:
            return  # version cleanup was faster than the backup
        if self._control is None or not self._control.fired:
            raise AssertionError(f"a call failed although no fault was injected: {exc}") from exc

    # Open and close

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
                for producer in range(scenario.PRODUCERS)
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
        await self._retry("close", self._close)
        await self._retry("open", self._open)
        await self._observe()

    @property
    def _writer(self) -> Any:
        return self._writers[0]

    @property
    def _group(self) -> Any:
        return self._readers[0]

    # Puts

    async def _together(self, puts: list[list[dict[str, Any]]], concurrent: list[str]) -> None:
        calls = [self._produce(producer, script) for producer, script in enumerate(puts)]
        calls += [getattr(self, f"_{name}_concurrently")() for name in concurrent]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._observe()

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
        """Put with a producer sequence: repeat until it is acknowledged, or try only once."""
        if kind == "arrow":
            records = list(map(plain, records))
        data: Any = {"one": records[0], "arrow": as_arrow(records)}.get(kind, records)
        writer = self._writers[producer]
        call = writer.put_arrow if kind == "arrow" else writer.put
        words = {"put": sequence, "producer": producer}
        note(records=records, **words)
        if sequence % 2:
            await self._retry("put", lambda: call(data, sequence=sequence), **words)
            note(done="put", **words)
        else:
            await self._attempt_concurrently("put", lambda: call(data, sequence=sequence), **words)

    async def _evolve(self, pick: int) -> None:
        self._shape += 1

    # Observations

    async def _observe(self) -> None:
        async def look() -> dict[str, Any]:
            buckets = {
                bucket: await self._read_bucket(bucket, reader)
                for bucket, reader in enumerate(self._readers[1:])
            }
            return {"buckets": buckets, "tags": await self._tags()}

        seen = await self._retry("observation", look)
        self._known = [name for bucket in seen["buckets"].values() for name in bucket["ids"]]
        note(observation=seen)

    async def _read_bucket(self, bucket: int, reader: Any) -> dict[str, Any]:
        """Return all ids, and the offsets before and after the read: retention may run in
        between."""
        before = await self._span(bucket)
        await reader.reset()
        ids = [row["id"] for row in await reader.get(None)]
        stats = await self._stats(bucket)
        after = stats["start_offset"], stats["end_offset"]
        end = reader.offsets()[bucket] if ids else after[1]
        look = {"ids": ids, "end": end, "before": before, "after": after}
        return {**look, "epoch": stats["epoch"]}

    async def _span(self, bucket: int) -> tuple[int, int]:
        stats = await self._stats(bucket)
        return stats["start_offset"], stats["end_offset"]

    async def _stats(self, bucket: int) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._writer.stats())["buckets"][bucket]
        return stats

    async def _tags(self) -> dict[str, Any]:
        return {tag["name"]: spans(tag) for tag in await self._writer.tags()}

    async def _query(self, pick: int = 1) -> None:
        async def query() -> list[str]:
            if not self._known:
                return []
            rows = await self._writer.query(f"n % 5 = {pick % 5}", columns=["id"])
            return [row["id"] for row in rows]

        found = await self._retry("query", query)
        note(asked="query", residue=pick % 5, ids=found)

    async def _lookup(self, pick: int) -> None:
        if not self._known:
            return
        name = self._known[pick % len(self._known)]
        rows = await self._retry("lookup", lambda: self._writer.lookup("id", name))
        note(asked="lookup", name=name, ids=[row["id"] for row in rows])

    async def _search(self, pick: int) -> None:
        if not self._known:
            return
        word = f"word{pick % 5}"
        rows = await self._retry(
            "search", lambda: self._writer.search(text=word, column="text", k=5000)
        )
        note(asked="search", residue=pick % 5, ids=[row["id"] for row in rows])
        await self._retry("search", lambda: self._writer.search(vector=[1.0, 2.0, 1.0, 0.5], k=3))

    async def _verify(self, pick: int) -> None:
        self._heal()  # verify reports an unreadable file as damaged
        note(verified=await self._retry("verify", self._writer.verify))

    # Maintenance

    async def _flush(self, pick: int = 0) -> None:
        await self._attempt("flush", self._writer.flush)

    async def _compact(self, pick: int = 0) -> None:
        await self._attempt("compact", self._writer.compact)

    async def _retain(self, rows: int) -> None:
        await self._attempt("retain", lambda: self._writer.retain(rows=rows), rows=rows)

    async def _check_retention_by_rows(self) -> None:
        """Check that rows beyond the limit are dropped soon after a flush."""
        limit = self.round.limits.get("retention_rows")
        if limit is None or self.round.options["retention_waits_for"]:
            return
        await self._together([[{"kind": "batch", "count": FLUSHED_LAST}]], [])
        await self._flush()
        deadline = time.monotonic() + RETENTION_PATIENCE
        while late := [b for b in range(self.round.num_buckets) if self._exceeds_limit(b, limit)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"retention keeps more than {limit} rows in buckets {late}")
            await asyncio.sleep(0.05)
        await self._observe()

    def _exceeds_limit(self, bucket: int, limit: int) -> bool:
        """Return whether the oldest fragment could be dropped and enough rows would remain."""
        try:
            table = lance.dataset(str(self.disk / TOPIC / f"bucket_{bucket}" / "data.lance"))
            rows = [fragment.count_rows() for fragment in table.get_fragments()]
        except (OSError, ValueError):
            return True  # being cleaned up, or not created yet
        return sum(rows[1:]) >= limit

    async def _create_index(self, column: str = "n") -> None:
        if self._known:
            await self._attempt("create_index", lambda: self._writer.create_index(column))

    async def _drop_index(self, column: str) -> None:
        await self._attempt("drop_index", lambda: self._writer.drop_index(column))

    async def _tag(self, name: str) -> None:
        async def tag() -> dict[str, Any]:
            return spans(await self._writer.tag(name))

        await self._attempt("tag", tag, name=name)

    async def _delete_tag(self, name: str) -> None:
        if name in await self._retry("tags", self._tags):
            await self._attempt("delete_tag", lambda: self._writer.delete_tag(name), name=name)

    async def _restore(self, name: str) -> None:
        async def restore() -> None:
            await self._writer.restore(name)

        if name in await self._retry("tags", self._tags):
            await self._attempt("restore", restore, name=name)
            await self._observe()

    # Groups

    async def _consume(self, pick: int = 7) -> None:
        async def take() -> dict[str, Any]:
            before = self._group.offsets()
            try:
                rows = await self._group.get(1 + pick % 40)
            except OffsetOutOfRange:
                starts = {b: (await self._span(b))[0] for b in range(self.round.num_buckets)}
                note(out_of_range=self._group.offsets(), starts=starts)
                await self._group.reset()
                return await take()
            return {
                "got": [row["id"] for row in rows],
                "from": before,
                "to": self._group.offsets(),
            }

        note(**await self._retry("take", take))
        if pick % 3:
            await self._retry("commit", self._commit)

    async def _commit(self) -> None:
        note(commit=self._group.offsets())
        note(committed=await self._group.commit())

    # Backups

    async def _backup(self, pick: int = 0) -> None:
        self._backups += 1
        target = self.disk / f"backup-{self.round.number}-{self._backups}"

        def create() -> None:
            backup.create(TopicFolder.open(self.disk / TOPIC), target)

        await self._attempt_concurrently(
            "backup", lambda: asyncio.to_thread(create), name=target.name
        )

    async def _attempt_concurrently(self, what: str, call: Any, **words: Any) -> None:
        """Make one call concurrently with others, without an observation after a failure."""
        note(begin=what, **words)
        try:
            await call()
        except Exception as exc:
            note(failed=what, error=str(exc), **words)
            self._require_injected_fault(exc)
            self._heal()
        else:
            note(done=what, **words)

    async def _flush_concurrently(self) -> None:
        await self._attempt_concurrently("flush", self._writer.flush)

    async def _compact_concurrently(self) -> None:
        await self._attempt_concurrently("compact", self._writer.compact)

    async def _create_index_concurrently(self) -> None:
        if self._known:
            await self._attempt_concurrently("create_index", lambda: self._writer.create_index("n"))

    async def _query_concurrently(self) -> None:
        if self._known:
            await self._attempt_concurrently("query", lambda: self._writer.query("n % 5 = 1"))

    async def _search_concurrently(self) -> None:
        if self._known:
            await self._attempt_concurrently(
                "search", lambda: self._writer.search(text="word1", column="text", k=9)
            )

    async def _tag_concurrently(self) -> None:
        await self._attempt_concurrently(
            "tag concurrent", lambda: self._writer.tag("concurrent"), name="concurrent"
        )

    async def _consume_concurrently(self) -> None:
        for pick in range(5, 9):
            await self._consume(pick)

    async def _backup_concurrently(self) -> None:
        await self._backup()


def power_loss_file_system(workspace: Workspace, round_: Round) -> PowerLossFileSystem:
    rng = round_.rng("power")
    return PowerLossFileSystem(
        workspace.disk,
        workspace.lost,
        rng.randrange(rng.choice((60, 300, 1200))),
        random_loss(rng),
    )


def main() -> None:
    workspace = Workspace(Path(sys.argv[1]))
    round_ = msgspec.json.decode(sys.argv[2], type=Round)
    faulthandler.register(signal.SIGUSR1, chain=False)
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    power = power_loss_file_system(workspace, round_) if round_.fault == "power" else None
    if power is not None:
        follower = int(sys.argv[3])

        def lose_power(label: str) -> None:
            os.kill(follower, signal.SIGKILL)  # first: it must not read what a dead owner left
            note(power=label, loss=str(power._loss))

        power.before_kill = lose_power
    with fs.use(power) if power is not None else nullcontext():
        try:
            asyncio.run(Worker(workspace.queues, round_).run())
        except BaseException as exc:
            note(crashed=repr(exc), trace=traceback.format_exc())
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
