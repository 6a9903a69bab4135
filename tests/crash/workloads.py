"""Small histories of a bucket, told to a recorder as they happen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import Any

from crash.checking import BUCKET, Handle, Open, Record, Story
from crash.recording import RecordingFileSystem
from persisting import fs
from persisting.queue import LanceBackend, PersistingBackend
from persisting.wal import FOLDER


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
