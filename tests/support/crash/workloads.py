"""Small histories of a bucket, told to a recorder as they happen."""

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
from support.crash.checking import BUCKET, Content, Handle, Open, Record, State, Story
from support.crash.recording import RecordingFileSystem


def wal(**options: Any) -> Open:
    """Opens a bucket whose acknowledgements survive power loss."""
    given = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None, **options}
    return lambda folder: PersistingBackend(0, str(folder), **given)


def no_log(**options: Any) -> Open:
    given = {"flush_interval": None, **options}
    return lambda folder: PersistingBackend(0, str(folder), **given)


def lance(**options: Any) -> Open:
    return lambda folder: LanceBackend(0, str(folder), **options)


class Durable(Enum):
    """When a record is promised to survive power loss."""

    ACKNOWLEDGED = "when the put returned"
    SYNCED = "when the log was synced, or the flush returned"
    FLUSHED = "when the flush returned"


class Scribe:
    """Puts records into a bucket on a recorded disk and notes what is promised when."""

    def __init__(self, root: Path, open_bucket: Open, durable: Durable) -> None:
        self.recorder = RecordingFileSystem(root)
        self.story = Story()
        self.log = root / BUCKET / FOLDER
        self.durable = durable
        self.acknowledged: list[str] = []
        self._numbers = iter(range(1_000_000))
        if durable is Durable.SYNCED:
            self.recorder.on_moment = self._note_what_is_synced
        with fs.use(self.recorder):
            self.handle = Handle(root / BUCKET, open_bucket)

    @property
    def backend(self) -> Any:
        return self.handle.backend

    def record(self, **fields: Any) -> Record:
        number = next(self._numbers)
        return {"id": f"r{number}", "n": number, **fields}

    async def put(self, **fields: Any) -> None:
        record = self.record(**fields)
        self.story.tell(record)
        await self.backend.put(record)
        self._acknowledged(record)

    async def batch(self, count: int, **fields: Any) -> None:
        records = [self.record(**fields) for _ in range(count)]
        self.story.tell(*records)
        await self.backend.put_batch(records)
        self._acknowledged(*records)

    async def together(self, count: int, **fields: Any) -> None:
        """Puts that are on their way at the same time; the backend decides on their order."""
        records = [self.record(**fields) for _ in range(count)]
        before = len(self.story.records)

        async def one(record: Record) -> None:
            await self.backend.put(record)
            self._acknowledged(record)

        await asyncio.gather(*map(one, records))
        order = {r["id"]: r for r in records}
        for found in await self.backend.get(before, count):
            self.story.tell(order[found["id"]])

    async def flush(self) -> None:
        ids = [r["id"] for r in self.story.records]
        await self.backend.flush()
        self.recorder.promise(*ids[-1:])

    async def close(self) -> None:
        ids = [r["id"] for r in self.story.records]
        await self.backend.close()
        self.recorder.promise(*ids[-1:])

    async def reopen(self, *, cleanly: bool, open_bucket: Open | None = None) -> None:
        """As after a close, or after a kill, which without a log takes what was not flushed."""
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
        """Return when the log, left alone, has been synced."""
        for _ in range(1000):
            self._note_what_is_synced()
            if self.acknowledged[-1] in self.recorder.recording.promises:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("what was acknowledged is never synced")

    def _note_what_is_synced(self) -> None:
        with self.recorder.guard:
            last = self.acknowledged[-1:]
            if last and last[0] not in self.recorder.recording.promises:
                if self.recorder.disk.is_durable(self.log):
                    self.recorder.promise(*last)


Workload = Callable[[Scribe], Awaitable[None]]


async def singles_and_batches(scribe: Scribe) -> None:
    await scribe.put()
    await scribe.put()
    await scribe.flush()
    await scribe.batch(3)
    await scribe.put()
    await scribe.flush()
    await scribe.put()
    await scribe.close()


async def concurrent_puts(scribe: Scribe) -> None:
    await scribe.put()
    await scribe.together(5)
    await scribe.flush()
    await scribe.together(4)
    await scribe.close()


async def puts_beside_a_flush(scribe: Scribe) -> None:
    await scribe.put()
    await scribe.put()
    flushing = asyncio.ensure_future(scribe.backend.flush())
    for _ in range(4):
        await scribe.put()
    await flushing
    await scribe.put()
    await scribe.close()


async def evolution(scribe: Scribe) -> None:
    await scribe.put(v=1)
    await scribe.flush()
    await scribe.put(v=2, name="new field")
    await scribe.put(v=2.5)
    await scribe.flush()
    await scribe.batch(2, v=3, nested={"a": 1})
    await scribe.put(v=4, nested={"a": 1, "b": "deeper"})
    await scribe.close()


async def kills_and_recoveries(scribe: Scribe) -> None:
    await scribe.put()
    await scribe.reopen(cleanly=False)
    await scribe.put()
    await scribe.reopen(cleanly=False)
    await scribe.batch(2)
    await scribe.flush()
    await scribe.put()
    await scribe.reopen(cleanly=True)
    await scribe.put()
    await scribe.reopen(cleanly=False)
    await scribe.close()


async def flushes_without_a_log(scribe: Scribe) -> None:
    await scribe.put()
    await scribe.flush()
    await scribe.batch(3)
    await scribe.put()
    await scribe.flush()
    await scribe.put()
    await scribe.reopen(cleanly=True)
    await scribe.put()
    await scribe.close()


async def many_small_flushes(scribe: Scribe) -> None:
    """For a bucket that flushes by itself all the time."""
    for _ in range(2):
        await scribe.put(text="x" * 100)
        await scribe.together(3, text="x" * 100)
        await scribe.batch(2, text="x" * 100)
    await scribe.close()


async def a_field_with_a_default(scribe: Scribe) -> None:
    scribe.story.defaults = {"age": 7}
    await scribe.put()
    await scribe.put()
    await scribe.flush()
    await scribe.put(age=30)
    await scribe.put()
    await scribe.flush()
    await scribe.put(age=31.5)
    await scribe.close()


def other_options(*openers: Open) -> Workload:
    """A bucket that is opened in another way each time, after a kill and after a close."""

    async def run(scribe: Scribe) -> None:
        await scribe.put(text="some text " * 20)
        await scribe.flush()
        for number, opener in enumerate(openers):
            await scribe.put(text="some text " * 20)
            await scribe.reopen(cleanly=number % 2 == 1, open_bucket=opener)
        await scribe.put(text="some text " * 20)
        await scribe.close()

    return run


def anything(seed: int, steps: int) -> Workload:
    """A random history."""

    async def run(scribe: Scribe) -> None:
        rng = random.Random(seed)
        fields: dict[str, Any] = {"v": 1}
        for step in range(steps):
            choice = rng.randrange(12)
            if choice < 3:
                await scribe.put(**fields)
            elif choice < 5:
                await scribe.batch(rng.randint(1, 5), **fields)
            elif choice < 7:
                await scribe.together(rng.randint(2, 6), **fields)
            elif choice < 9:
                await scribe.flush()
            elif choice == 9:
                fields[f"f{step}"] = rng.choice([1, "x" * 200, [1.5, 2.5], {"a": 1}, None])
                if rng.random() < 0.3:
                    fields["v"] = 1.5
            else:
                await scribe.reopen(cleanly=choice == 10)
        await scribe.close()

    return run


# The bucket as a table


class Keeper:
    """Does upkeep to a bucket on a recorded disk and notes the state that each step promises.

    Without a log, what is put is promised by the next step that flushes.
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
        """``state`` is what the bucket holds already; ``first`` numbers the first new record."""
        self.recorder = recorder or RecordingFileSystem(root)
        self.states = [state or State()]
        self.versions: dict[int, Content] = {}
        self._logged = logged
        self._numbers = iter(range(first, 1_000_000))
        with fs.use(self.recorder):
            self.handle = Handle(root / BUCKET, open_bucket)

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
        """So many fragments."""
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
        known: Any = self.state.tags if isinstance(version, str) else self.versions
        content = known[version]
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
        """As after a close, or after a kill, which without a log takes what was not flushed."""
        if not self._logged:
            await self.flush()
        await (self.backend.close() if cleanly else self.handle.drop())
        with fs.use(self.recorder):
            self.handle.open(open_bucket)
        self._promise()

    async def close(self) -> None:
        await self.backend.close()
        self._promise()

    @property
    def version(self) -> int:
        """The newest version, which holds everything: nothing is buffered."""
        return max(self.versions)

    async def _done(self) -> None:
        self._promise()
        self.versions[(await self.backend.stats())["version"]] = self.state.now

    def _promise(self) -> None:
        self.recorder.promise(len(self.states) - 1)


History = Callable[[Keeper], Awaitable[None]]


async def kept(root: Path, open_bucket: Open, history: History, *, logged: bool = True) -> Keeper:
    """The keeper of a history that has ended."""
    root.mkdir()
    keeper = Keeper(root, open_bucket, logged=logged)
    await history(keeper)
    return keeper


async def compactions(keeper: Keeper) -> None:
    await keeper.flushes(4)
    assert (await keeper.compact())["fragments_after"] == 1
    await keeper.flushes(2)
    await keeper.put(2)
    await keeper.compact()
    await keeper.put()
    await keeper.close()


async def retentions(keeper: Keeper) -> None:
    await keeper.flushes(5)
    await keeper.retain(rows=3)
    await keeper.put()
    await keeper.retain(rows=1)
    await keeper.flushes(2)
    await keeper.compact()
    await keeper.reopen(cleanly=False)
    await keeper.retain(rows=0)
    assert keeper.state.now == Content(8)
    await keeper.put()
    await keeper.close()


async def tagging(keeper: Keeper) -> None:
    await keeper.flushes(2)
    await keeper.tag("first")
    await keeper.put()
    await keeper.tag("second")
    await keeper.flushes(1)
    await keeper.tag("first")
    await keeper.delete_tag("second")
    await keeper.put()
    await keeper.reopen(cleanly=False)
    await keeper.delete_tag("first")
    await keeper.tag("second")
    await keeper.close()


async def restores(keeper: Keeper) -> None:
    await keeper.flushes(3)
    three = keeper.version
    await keeper.put()
    await keeper.restore(three)
    await keeper.put(2)
    await keeper.retain(rows=2)
    await keeper.put()
    await keeper.restore(three)
    await keeper.reopen(cleanly=False)
    await keeper.put()
    await keeper.tag("end")
    await keeper.restore("end")
    await keeper.close()


async def indexing(keeper: Keeper) -> None:
    await keeper.flushes(2, text="two words")
    await keeper.index("n", "scalar")
    await keeper.index("text")
    await keeper.flushes(2, text="other words")
    await keeper.tag("indexed")
    await keeper.compact()
    await keeper.put(text="more words")
    await keeper.index("n", "scalar")
    await keeper.retain(rows=2)
    await keeper.drop_index("text")
    await keeper.restore("indexed")
    await keeper.put(text="last words")
    await keeper.close()


async def cleaning(keeper: Keeper) -> None:
    """For a bucket that keeps no old versions."""
    await keeper.flushes(3)
    await keeper.tag("kept")
    await keeper.flushes(2)
    await keeper.compact()
    assert 1 not in [version["version"] for version in await keeper.backend.versions()]
    await keeper.retain(rows=0)
    await keeper.put(2)
    await keeper.compact()
    await keeper.restore("kept")
    await keeper.put()
    await keeper.delete_tag("kept")
    await keeper.compact()
    await keeper.put()
    await keeper.close()


async def filled_fields(keeper: Keeper) -> None:
    """For a bucket with a default for ``age``, which is written for the rows before it."""
    keeper.states = [State(defaults={"age": 7})]
    await keeper.flushes(2)
    await keeper.tag("ageless")
    await keeper.put(age=30)
    await keeper.compact()
    await keeper.put()
    await keeper.flush()
    await keeper.restore("ageless")
    await keeper.put(age=31)
    await keeper.close()


async def evolving(keeper: Keeper) -> None:
    await keeper.flushes(2, v=1)
    await keeper.tag("narrow")
    await keeper.put(v=2.5, new="field")
    await keeper.compact()
    await keeper.tag("wide")
    await keeper.put(v=3, new="field", nested={"a": 1})
    await keeper.flush()
    await keeper.retain(rows=2)
    await keeper.put(v=4, nested={"a": 1, "b": "deeper"})
    await keeper.compact()
    await keeper.restore("narrow")
    await keeper.put(v=0.5)
    await keeper.flush()
    await keeper.restore("wide")
    await keeper.put(v=5)
    await keeper.close()


async def every_kind(keeper: Keeper) -> None:
    """For a bucket with a default for ``age``."""
    keeper.states = [State(defaults={"age": 7})]
    await keeper.flushes(2, text="some words", v=1)
    await keeper.index("n", "scalar")
    await keeper.tag("old")
    await keeper.put(text="some words", v=1.5, age=30)
    await keeper.compact()
    await keeper.tag("old")
    await keeper.retain(rows=1)
    await keeper.restore("old")
    await keeper.close()


AGED = wal(schema_defaults={"age": 7})


def any_upkeep(seed: int, steps: int) -> History:
    """A random history of a table."""

    async def run(keeper: Keeper) -> None:
        rng = random.Random(seed)
        fields: dict[str, Any] = {"v": 1, "text": "some words"}
        await keeper.flushes(1, **fields)
        for step in range(steps):
            choice = rng.randrange(20)
            if choice < 6:
                await keeper.put(rng.randint(1, 3), **fields)
            elif choice < 10:
                await keeper.flush()
            elif choice < 12:
                await keeper.compact()
            elif choice == 12:
                await keeper.retain(rng.randint(0, 8))
            elif choice == 13:
                await keeper.tag(f"t{rng.randrange(3)}")
            elif choice == 14 and keeper.state.tags:
                await keeper.delete_tag(rng.choice(sorted(keeper.state.tags)))
            elif choice == 15 and keeper.state.tags:
                await keeper.restore(rng.choice(sorted(keeper.state.tags)))
            elif choice == 16:
                await keeper.index(*rng.choice([("n", "scalar"), ("text", None)]))
            elif choice == 17:
                fields[f"f{step}"] = rng.choice([1, "x" * 200, {"a": 1}, None])
                fields["v"] = rng.choice([1, 1.5])
            elif choice > 17:
                await keeper.reopen(cleanly=choice == 18)
        await keeper.close()

    return run
