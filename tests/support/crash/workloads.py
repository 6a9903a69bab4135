"""Small workloads of a bucket on a recorded disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from persisting import fs
from persisting.queue import LanceBackend, PersistingBackend
from persisting.wal import FOLDER
from support.crash.checks import (
    BUCKET,
    Content,
    CrashableBucket,
    ExpectedRecords,
    Open,
    Record,
    State,
)
from support.crash.recording import RecordingFileSystem


def wal(**options: Any) -> Open:
    """Return a function that opens a bucket with a log that is synced at every put."""
    given = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None, **options}
    return lambda folder: PersistingBackend(0, str(folder), **given)


def no_log(**options: Any) -> Open:
    given = {"flush_interval": None, **options}
    return lambda folder: PersistingBackend(0, str(folder), **given)


def lance(**options: Any) -> Open:
    return lambda folder: LanceBackend(0, str(folder), **options)


class Durable(Enum):
    """The event after which a record must survive power loss."""

    ACKNOWLEDGED = "when the put returned"
    SYNCED = "when the log was synced, or the flush returned"
    FLUSHED = "when the flush returned"


class RecordedWriter:
    """Puts records into a bucket on a recorded disk and records what is promised when."""

    def __init__(self, root: Path, open_bucket: Open, durable: Durable) -> None:
        self.recorder = RecordingFileSystem(root)
        self.expected = ExpectedRecords()
        self.log = root / BUCKET / FOLDER
        self.durable = durable
        self.acknowledged: list[str] = []
        self._numbers = iter(range(1_000_000))
        if durable is Durable.SYNCED:
            self.recorder.on_crash_point = self._promise_what_is_synced
        with fs.use(self.recorder):
            self.handle = CrashableBucket(root / BUCKET, open_bucket)

    @property
    def backend(self) -> Any:
        return self.handle.backend

    def record(self, **fields: Any) -> Record:
        number = next(self._numbers)
        return {"id": f"r{number}", "n": number, **fields}

    async def put(self, **fields: Any) -> None:
        record = self.record(**fields)
        self.expected.add(record)
        await self.backend.put(record)
        self._acknowledged(record)

    async def batch(self, count: int, **fields: Any) -> None:
        records = [self.record(**fields) for _ in range(count)]
        self.expected.add(*records)
        await self.backend.put_batch(records)
        self._acknowledged(*records)

    async def together(self, count: int, **fields: Any) -> None:
        """Put records concurrently; the backend decides on their order."""
        records = [self.record(**fields) for _ in range(count)]
        before = len(self.expected.records)

        async def put(record: Record) -> None:
            await self.backend.put(record)
            self._acknowledged(record)

        await asyncio.gather(*map(put, records))
        by_id = {r["id"]: r for r in records}
        for found in await self.backend.get(before, count):
            self.expected.add(by_id[found["id"]])

    async def flush(self) -> None:
        ids = [r["id"] for r in self.expected.records]
        await self.backend.flush()
        self.recorder.promise(*ids[-1:])

    async def close(self) -> None:
        ids = [r["id"] for r in self.expected.records]
        await self.backend.close()
        self.recorder.promise(*ids[-1:])

    async def reopen(self, *, cleanly: bool, open_bucket: Open | None = None) -> None:
        """Open again after a close or a kill. Without a log everything is flushed before, since a
        kill would lose the rest."""
        if self.durable is Durable.FLUSHED:
            await self.flush()
        await (self.close() if cleanly else self.handle.drop())
        with fs.use(self.recorder):
            self.handle.open(open_bucket)

    def _acknowledged(self, *records: Record) -> None:
        ids = [r["id"] for r in records]
        self.acknowledged += ids
        if self.durable is Durable.ACKNOWLEDGED:
            self.recorder.promise(*ids)

    async def synced(self) -> None:
        """Wait until the log has been synced in the background."""
        for _ in range(6000):
            self._promise_what_is_synced()
            if self.acknowledged[-1] in self.recorder.recording.promises:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("acknowledged records are never synced")

    def _promise_what_is_synced(self) -> None:
        with self.recorder.guard:
            last = self.acknowledged[-1:]
            if last and last[0] not in self.recorder.recording.promises:
                if self.recorder.disk.is_durable(self.log):
                    self.recorder.promise(*last)


async def leave_table_and_log(folder: Path) -> ExpectedRecords:
    """Create a bucket with two records in its table and two in its log; drop it as a kill does."""
    expected = ExpectedRecords()
    handle = CrashableBucket(folder, wal())
    for number in range(4):
        expected.add({"id": f"r{number}", "n": number})
        await handle.backend.put(expected.records[-1])
        if number == 1:
            await handle.backend.flush()
    await handle.drop()
    return expected


Workload = Callable[[RecordedWriter], Awaitable[None]]


async def _put_around_two_flushes(writer: RecordedWriter) -> None:
    await writer.put()
    await writer.flush()
    await writer.batch(3)
    await writer.put()
    await writer.flush()
    await writer.put()


async def singles_and_batches(writer: RecordedWriter) -> None:
    await writer.put()
    await _put_around_two_flushes(writer)
    await writer.close()


async def concurrent_puts(writer: RecordedWriter) -> None:
    await writer.put()
    await writer.together(5)
    await writer.flush()
    await writer.together(4)
    await writer.close()


async def puts_during_a_flush(writer: RecordedWriter) -> None:
    await writer.put()
    await writer.put()
    flushing = asyncio.ensure_future(writer.backend.flush())
    for _ in range(4):
        await writer.put()
    await flushing
    await writer.put()
    await writer.close()


async def evolution(writer: RecordedWriter) -> None:
    await writer.put(v=1)
    await writer.flush()
    await writer.put(v=2, name="new field")
    await writer.put(v=2.5)
    await writer.flush()
    await writer.batch(2, v=3, nested={"a": 1})
    await writer.put(v=4, nested={"a": 1, "b": "deeper"})
    await writer.close()


async def kills_and_recoveries(writer: RecordedWriter) -> None:
    await writer.put()
    await writer.reopen(cleanly=False)
    await writer.put()
    await writer.reopen(cleanly=False)
    await writer.batch(2)
    await writer.flush()
    await writer.put()
    await writer.reopen(cleanly=True)
    await writer.put()
    await writer.reopen(cleanly=False)
    await writer.close()


async def flushes_without_a_log(writer: RecordedWriter) -> None:
    await _put_around_two_flushes(writer)
    await writer.reopen(cleanly=True)
    await writer.put()
    await writer.close()


async def many_small_flushes(writer: RecordedWriter) -> None:
    """A workload for a bucket that flushes by its limits all the time."""
    for _ in range(2):
        await writer.put(text="x" * 100)
        await writer.together(3, text="x" * 100)
        await writer.batch(2, text="x" * 100)
    await writer.close()


async def a_field_with_a_default(writer: RecordedWriter) -> None:
    writer.expected.defaults = {"age": 7}
    await writer.put()
    await writer.put()
    await writer.flush()
    await writer.put(age=30)
    await writer.put()
    await writer.flush()
    await writer.put(age=31.5)
    await writer.close()


def other_options(*openers: Open) -> Workload:
    """Open the bucket with other options each time, after a kill and after a close."""

    async def run(writer: RecordedWriter) -> None:
        await writer.put(text="some text " * 20)
        await writer.flush()
        for number, opener in enumerate(openers):
            await writer.put(text="some text " * 20)
            await writer.reopen(cleanly=number % 2 == 1, open_bucket=opener)
        await writer.put(text="some text " * 20)
        await writer.close()

    return run


def random_workload(seed: int, steps: int) -> Workload:
    """Return a random workload."""

    async def run(writer: RecordedWriter) -> None:
        rng = random.Random(seed)
        fields: dict[str, Any] = {"v": 1}
        for step in range(steps):
            choice = rng.randrange(12)
            if choice < 3:
                await writer.put(**fields)
            elif choice < 5:
                await writer.batch(rng.randint(1, 5), **fields)
            elif choice < 7:
                await writer.together(rng.randint(2, 6), **fields)
            elif choice < 9:
                await writer.flush()
            elif choice == 9:
                fields[f"f{step}"] = rng.choice([1, "x" * 200, [1.5, 2.5], {"a": 1}, None])
                if rng.random() < 0.3:
                    fields["v"] = 1.5
            else:
                await writer.reopen(cleanly=choice == 10)
        await writer.close()

    return run


# Tables


class RecordedTable:
    """Runs maintenance on a bucket on a recorded disk and records the state that each step
    promises.

    Without a log, records are promised by the next step that flushes.
    """

    def __init__(
        self,
        root: Path,
        open_bucket: Open,
        *,
        logged: bool = True,
        state: State | None = None,
        recorder: RecordingFileSystem | None = None,
        first: int = 0,
    ) -> None:
        """``state`` is what the bucket holds already; ``first`` is the number of the first new
        record."""
        self.recorder = recorder or RecordingFileSystem(root)
        self.states = [state or State()]
        self.versions: dict[int, Content] = {}
        self._logged = logged
        self._numbers = iter(range(first, 1_000_000))
        with fs.use(self.recorder):
            self.handle = CrashableBucket(root / BUCKET, open_bucket)

    @property
    def backend(self) -> Any:
        return self.handle.backend

    @property
    def state(self) -> State:
        return self.states[-1]

    async def put(self, count: int = 1, **fields: Any) -> None:
        records = []
        for _ in range(count):
            number = next(self._numbers)
            records.append({"id": f"r{number}", "n": number, **fields})
        self.states.append(replace(self.state, now=self.state.now.with_more(*records)))
        await self.backend.put_batch(records)
        if self._logged:
            self._promise()

    async def flush(self) -> None:
        await self.backend.flush()
        await self._done()

    async def flushes(self, count: int, **fields: Any) -> None:
        """Write ``count`` fragments."""
        for _ in range(count):
            await self.put(**fields)
            await self.flush()

    async def compact(self) -> dict[str, int]:
        done: dict[str, int] = await self.backend.compact()
        await self._done()
        return done

    async def retain(self, rows: int) -> None:
        before = self.state
        done = await self.backend.retain(rows=rows)
        kept = before.now.from_offset(done["start_offset"])
        assert len(kept.rows) >= min(rows, len(before.now.rows))
        self.states.append(replace(before, now=kept))
        await self._done()

    async def tag(self, name: str) -> None:
        self.states.append(
            replace(self.state, tags={**self.state.tags, name: self.state.now}),
        )
        await self.backend.tag(name)
        await self._done()

    async def delete_tag(self, name: str) -> None:
        rest = {k: v for k, v in self.state.tags.items() if k != name}
        self.states.append(replace(self.state, tags=rest))
        assert await self.backend.delete_tag(name)
        await self._done()

    async def restore(self, version: int | str) -> None:
        contents: Any = self.state.tags if isinstance(version, str) else self.versions
        content = contents[version]
        self.states.append(replace(self.state, now=content, epoch=self.state.epoch + 1))
        await self.backend.restore(version)
        await self._done()

    async def index(self, column: str, kind: str | None = None) -> None:
        await self.backend.create_index(column, kind)
        await self._done()

    async def drop_index(self, column: str) -> None:
        assert await self.backend.drop_index(column)
        await self._done()

    async def reopen(self, *, cleanly: bool, open_bucket: Open | None = None) -> None:
        """Open again after a close or a kill. Without a log everything is flushed before, since a
        kill would lose the rest."""
        if not self._logged:
            await self.flush()
        if cleanly:
            await self.backend.close()
        else:
            if not self._logged:
                self.states.append(self.state.in_next_epoch())
            assert await self.handle.drop() == self._logged
        with fs.use(self.recorder):
            self.handle.open(open_bucket)
        self._promise()

    async def close(self) -> None:
        await self.backend.close()
        self._promise()

    @property
    def version(self) -> int:
        """The newest version. It holds everything: nothing is buffered."""
        return max(self.versions)

    async def _done(self) -> None:
        self._promise()
        self.versions[(await self.backend.stats())["version"]] = self.state.now

    def _promise(self) -> None:
        self.recorder.promise(len(self.states) - 1)


History = Callable[[RecordedTable], Awaitable[None]]


async def run_history(
    root: Path, open_bucket: Open, history: History, *, logged: bool = True
) -> RecordedTable:
    """Run a history to its end and return its table."""
    root.mkdir()
    table = RecordedTable(root, open_bucket, logged=logged)
    await history(table)
    return table


async def compactions(table: RecordedTable) -> None:
    await table.flushes(4)
    assert (await table.compact())["fragments_after"] == 1
    await table.flushes(2)
    await table.put(2)
    await table.compact()
    await table.put()
    await table.close()


async def retentions(table: RecordedTable) -> None:
    await table.flushes(5)
    await table.retain(rows=3)
    await table.put()
    await table.retain(rows=1)
    await table.flushes(2)
    await table.compact()
    await table.reopen(cleanly=False)
    await table.retain(rows=0)
    assert table.state.now == Content(8)
    await table.put()
    await table.close()


async def tagging(table: RecordedTable) -> None:
    await table.flushes(2)
    await table.tag("first")
    await table.put()
    await table.tag("second")
    await table.flushes(1)
    await table.tag("first")
    await table.delete_tag("second")
    await table.put()
    await table.reopen(cleanly=False)
    await table.delete_tag("first")
    await table.tag("second")
    await table.close()


async def restores(table: RecordedTable) -> None:
    await table.flushes(3)
    three = table.version
    await table.put()
    await table.restore(three)
    await table.put(2)
    await table.retain(rows=2)
    await table.put()
    await table.restore(three)
    await table.reopen(cleanly=False)
    await table.put()
    await table.tag("end")
    await table.restore("end")
    await table.close()


async def indexing(table: RecordedTable) -> None:
    await table.flushes(2, text="two words")
    await table.index("n", "scalar")
    await table.index("text")
    await table.flushes(2, text="other words")
    await table.tag("indexed")
    await table.compact()
    await table.put(text="more words")
    await table.index("n", "scalar")
    await table.retain(rows=1)
    await table.drop_index("text")
    await table.restore("indexed")
    await table.put(text="last words")
    await table.close()


async def cleaning(table: RecordedTable) -> None:
    """A history for a bucket that keeps no old versions."""
    await table.flushes(3)
    await table.tag("kept")
    await table.flushes(2)
    await table.compact()
    assert 1 not in [version["version"] for version in await table.backend.versions()]
    await table.retain(rows=0)
    await table.put(2)
    await table.compact()
    await table.restore("kept")
    await table.put()
    await table.delete_tag("kept")
    await table.compact()
    await table.put()
    await table.close()


async def filled_fields(table: RecordedTable) -> None:
    """A history for a bucket with a default for ``age``, which is filled in for earlier rows."""
    table.states = [State(defaults={"age": 7})]
    await table.flushes(2)
    await table.tag("ageless")
    await table.put(age=30)
    await table.compact()
    await table.put()
    await table.flush()
    await table.restore("ageless")
    await table.put(age=31)
    await table.close()


async def evolving(table: RecordedTable) -> None:
    await table.flushes(2, v=1)
    await table.tag("narrow")
    await table.put(v=2.5, new="field")
    await table.compact()
    await table.tag("wide")
    await table.put(v=3, new="field", nested={"a": 1})
    await table.flush()
    await table.retain(rows=1)
    await table.put(v=4, nested={"a": 1, "b": "deeper"})
    await table.compact()
    await table.restore("narrow")
    await table.put(v=0.5)
    await table.flush()
    await table.restore("wide")
    await table.put(v=5)
    await table.close()


async def every_operation(table: RecordedTable) -> None:
    """A history for a bucket with a default for ``age``."""
    table.states = [State(defaults={"age": 7})]
    await table.flushes(2, text="some words", v=1)
    await table.index("n", "scalar")
    await table.tag("old")
    await table.put(text="some words", v=1.5, age=30)
    await table.compact()
    await table.tag("old")
    await table.retain(rows=1)
    await table.restore("old")
    await table.close()


WITH_DEFAULT_AGE = wal(schema_defaults={"age": 7})


def random_maintenance(seed: int, steps: int) -> History:
    """Return a random history of maintenance."""

    async def run(table: RecordedTable) -> None:
        rng = random.Random(seed)
        fields: dict[str, Any] = {"v": 1, "text": "some words"}
        await table.flushes(1, **fields)
        for step in range(steps):
            choice = rng.randrange(20)
            if choice < 6:
                await table.put(rng.randint(1, 3), **fields)
            elif choice < 10:
                await table.flush()
            elif choice < 12:
                await table.compact()
            elif choice == 12:
                await table.retain(rng.randint(0, 8))
            elif choice == 13:
                await table.tag(f"t{rng.randrange(3)}")
            elif choice == 14 and table.state.tags:
                await table.delete_tag(rng.choice(sorted(table.state.tags)))
            elif choice == 15 and table.state.tags:
                await table.restore(rng.choice(sorted(table.state.tags)))
            elif choice == 16:
                await table.index(*rng.choice([("n", "scalar"), ("text", None)]))
            elif choice == 17:
                fields[f"f{step}"] = rng.choice([1, "x" * 200, {"a": 1}, None])
                fields["v"] = rng.choice([1, 1.5])
            elif choice > 17:
                await table.reopen(cleanly=choice == 18)
        await table.close()

    return run
