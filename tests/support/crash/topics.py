"""Topics whose buckets share a log: crash them, and check what they hold afterwards."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from persisting import fs
from persisting.bucket import log_note
from persisting.queue import PersistingBackend
from persisting.topic.address import TopicAddress
from persisting.topic.local import LocalTopic
from persisting.topic.local_handle import agreed_config
from persisting.topic.open_local import topic_spec
from support.crash.checks import PromiseBroken, Record, _lock_is_free, disk_after, same_value
from support.crash.disk_model import FIXED_LOSSES, Loss, Tree, after_power_loss, sampled
from support.crash.recording import CrashPoint, QuickFileSystem, Recording, RecordingFileSystem
from support.crash.workloads import Durable

NAME = "topic"
QUEUES = Path("queues")
TOPIC = QUEUES / NAME
"""Path of the topic below the root of the recorded disk."""

BUCKETS = 4
SYNCED: dict[str, Any] = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
INTERVAL: dict[str, Any] = {**SYNCED, "wal_sync_interval": 60.0}

Parts = dict[int, list[Record]]


class CrashableTopic:
    """A topic of this process that can be dropped without a close, as by a kill."""

    def __init__(self, root: Path, buckets: int = BUCKETS, **options: Any) -> None:
        spec, _ = topic_spec(
            NAME, num_buckets=buckets, backend="persisting", backend_options={**SYNCED, **options}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about options that changed
            folder, config, _ = agreed_config(spec, root / QUEUES)
        assert folder is not None
        self.folder, self.buckets = folder, buckets
        self.topic = LocalTopic(TopicAddress.in_folder(folder), config, PersistingBackend)

    async def put(self, parts: Parts, sequence: tuple[str, int] | None = None) -> None:
        await self.topic.put_parts(sorted(parts.items()), sequence)

    async def backend(self, bucket: int) -> Any:
        return await self.topic.backend(bucket)

    async def read(self) -> Parts:
        """Return all records of all buckets; raise if counts and offsets contradict them."""
        found = {}
        for bucket in range(self.buckets):
            backend = await self.backend(bucket)
            rows = found[bucket] = await backend.get(0, None)
            if (backend.total_count(), backend.end_offset()) != (len(rows), len(rows)):
                raise PromiseBroken(f"bucket {bucket} counts {backend.total_count()}: {rows}")
        return found

    async def close(self) -> None:
        await self.topic.close()

    async def drop(self) -> None:
        """Drop the topic without closing it; return when all its locks are free."""
        opened = [backend.bucket for backend in self.topic._backends.values()]
        buckets = [weakref.ref(bucket) for bucket in opened]
        locked = [bucket.options.storage_path for bucket in opened]
        if self.topic._log is not None:
            locked.append(self.topic._log.folder)
        del opened, self.topic
        for attempt in range(30_000):
            if all(bucket() is None for bucket in buckets) and all(map(_lock_is_free, locked)):
                return
            if attempt % 50 == 49:
                gc.collect()
            await asyncio.sleep(0.001)
        raise AssertionError("a dropped topic is still referenced or locked")


@dataclass
class ExpectedTopic:
    """What was put: the records of each bucket in order, and which of them form one put."""

    buckets: int = BUCKETS
    rows: Parts = field(default_factory=dict)
    puts: dict[str, Parts] = field(default_factory=dict)

    def add(self, name: str, parts: Parts) -> None:
        self.puts[name] = parts
        for bucket, rows in parts.items():
            self.rows.setdefault(bucket, []).extend(rows)

    def holding(self, found: Parts) -> ExpectedTopic:
        """Return what is expected once exactly these records are known to be stored."""
        stored = {row["id"] for rows in found.values() for row in rows}
        kept = ExpectedTopic(self.buckets)
        for bucket, rows in self.rows.items():
            kept.rows[bucket] = [row for row in rows if row["id"] in stored]
        for name, parts in self.puts.items():
            if any(row["id"] in stored for rows in parts.values() for row in rows):
                kept.puts[name] = parts
        return kept

    def check(self, found: Parts, required: Iterable[str], *, atomic: bool = True) -> None:
        """Raise unless each bucket holds a prefix of what was put into it, each put is whole or
        absent, and the required puts are there."""
        for bucket, got in found.items():
            put = self.rows.get(bucket, [])
            ids, all_ids = [row["id"] for row in got], [row["id"] for row in put]
            if len(set(ids)) != len(ids):
                raise PromiseBroken(f"bucket {bucket} stores records twice: {ids}")
            if ids != all_ids[: len(ids)]:
                raise PromiseBroken(f"bucket {bucket}: found {ids}, put {all_ids}")
            for before, after in zip(put, got, strict=False):
                if not same_value(before, after):
                    raise PromiseBroken(f"{before} came back as {after}")
        stored = {row["id"] for rows in found.values() for row in rows}
        for name, parts in self.puts.items():
            ids = [row["id"] for rows in parts.values() for row in rows]
            missing = [i for i in ids if i not in stored]
            if missing and name in set(required):
                raise PromiseBroken(f"put {name} was acknowledged, but {missing} are lost")
            if atomic and missing and len(missing) < len(ids):
                raise PromiseBroken(f"put {name} is torn: of {ids} only {missing} are missing")


class Unrecorded(QuickFileSystem):
    """Stands in for the recorder of a topic that is only killed."""

    def promise(self, *what: str) -> None: ...


class RecordedTopic:
    """Puts lists into a topic on a recorded disk, and records what is promised when."""

    def __init__(
        self,
        root: Path,
        durable: Durable = Durable.ACKNOWLEDGED,
        buckets: int = BUCKETS,
        recorder: RecordingFileSystem | Unrecorded | None = None,
        **options: Any,
    ) -> None:
        self.root, self.durable, self.options = root, durable, options
        self.recorder: Any = recorder or RecordingFileSystem(root)
        self.expected = ExpectedTopic(buckets)
        self.numbers: dict[str, tuple[str, int]] = {}
        """The producer sequences of numbered puts."""
        self._numbers = iter(range(1_000_000))
        self._names = iter(range(1_000_000))
        with fs.use(self.recorder):
            self.topic = CrashableTopic(root, buckets, **options)

    def parts(self, counts: dict[int, int], **fields: Any) -> Parts:
        return {
            bucket: [self._record(bucket, **fields) for _ in range(count)]
            for bucket, count in counts.items()
        }

    def _record(self, bucket: int, **fields: Any) -> Record:
        number = next(self._numbers)
        return {"id": f"b{bucket}.{number}", "n": number, **fields}

    async def put(
        self,
        *buckets: int,
        rows: int = 1,
        sequence: tuple[str, int] | None = None,
        **fields: Any,
    ) -> None:
        """Put one list with ``rows`` records for each of the buckets, all of them by default."""
        chosen = buckets or range(self.expected.buckets)
        parts = self.parts(dict.fromkeys(chosen, rows), **fields)
        name = f"put-{next(self._names)}"
        self.expected.add(name, parts)
        if sequence is not None:
            self.numbers[name] = sequence
        await self.topic.put(parts, sequence)
        self._acknowledged(name)

    async def repeat(self, name: str, sequence: tuple[str, int]) -> None:
        """Put a numbered list again: nothing must be stored twice."""
        await self.topic.put(self.expected.puts[name], sequence)

    async def single(self, bucket: int, **fields: Any) -> None:
        """Put one record as a plain row."""
        record, name = self._record(bucket, **fields), f"put-{next(self._names)}"
        self.expected.add(name, {bucket: [record]})
        await (await self.topic.backend(bucket)).put(record)
        self._acknowledged(name)

    async def together(self, count: int, **fields: Any) -> None:
        """Put lists and rows concurrently; the log decides on their order."""
        before = {b: len(rows) for b, rows in self.expected.rows.items()}
        puts = {}
        for number in range(count):
            chosen = [(number + step) % self.expected.buckets for step in range(1 + number % 3)]
            puts[f"put-{next(self._names)}"] = self.parts(dict.fromkeys(chosen, 1), **fields)

        async def put(name: str, parts: Parts) -> None:
            await self.topic.put(parts)
            self._acknowledged(name)

        await asyncio.gather(*(put(name, parts) for name, parts in puts.items()))
        by_id = {r["id"]: r for parts in puts.values() for rows in parts.values() for r in rows}
        found = await self.topic.read()
        for bucket, rows in found.items():
            new = [by_id[row["id"]] for row in rows[before.get(bucket, 0) :]]
            self.expected.rows.setdefault(bucket, []).extend(new)
        self.expected.puts |= puts

    async def flush(self, *buckets: int) -> None:
        """Flush these buckets. Their puts are durable then, in all buckets that they went to."""
        names = [n for n, parts in self.expected.puts.items() if set(parts) & set(buckets)]
        for bucket in buckets:
            await (await self.topic.backend(bucket)).flush()
        self.recorder.promise(*names)

    async def close_bucket(self, bucket: int) -> None:
        names = [n for n, parts in self.expected.puts.items() if bucket in parts]
        await self.topic.topic.close_bucket(bucket)
        self.recorder.promise(*names)

    async def close(self) -> None:
        await self.topic.close()
        self.recorder.promise(*self.expected.puts)

    async def reopen(self, *, cleanly: bool, **options: Any) -> None:
        await (self.close() if cleanly else self.topic.drop())
        self.options |= options
        self.topic = CrashableTopic(self.root, self.expected.buckets, **self.options)

    def _acknowledged(self, name: str) -> None:
        if self.durable is Durable.ACKNOWLEDGED:
            self.recorder.promise(name)


Story = Callable[[RecordedTopic], Awaitable[None]]


def random_story(seed: int, steps: int) -> Story:
    """Return a random workload of a topic."""

    async def run(topic: RecordedTopic) -> None:
        rng = random.Random(seed)
        fields: dict[str, Any] = {"v": 1}
        buckets = list(range(topic.expected.buckets))
        number = 0
        for step in range(steps):
            choice = rng.randrange(16)
            some = rng.sample(buckets, k=rng.randint(1, len(buckets)))
            if choice < 4:
                await topic.put(*some, rows=rng.randint(1, 4), **fields)
            elif choice < 6:
                await topic.put(*some, sequence=("writer", number), **fields)
                number += 1
            elif choice < 7:
                await topic.single(some[0], **fields)
            elif choice < 9:
                await topic.together(rng.randint(2, 6), **fields)
            elif choice < 12:
                await topic.flush(*some[:2])
            elif choice == 12:
                fields[f"f{step}"] = rng.choice([1, "x" * 200, [1.5, 2.5], {"a": 1}, None])
                if rng.random() < 0.3:
                    fields["v"] = 1.5
            elif choice == 13:
                await topic.close_bucket(some[0])
            else:
                await topic.reopen(cleanly=choice == 14)
        await topic.close()

    return run


async def check_topic(
    root: Path,
    expected: ExpectedTopic,
    required: Iterable[str],
    *,
    after_close: bool = True,
    atomic: bool = True,
    numbers: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    **options: Any,
) -> Parts:
    """Open and check, put more, drop, open and check; then close, open and check.

    Numbered puts are repeated: those that were stored must not be stored again.
    """
    with fs.use(QuickFileSystem()):
        topic = await _opened(root, expected.buckets, options)
        found = await topic.read()
        expected.check(found, required, atomic=atomic)
        after = expected.holding(found)
        for name, sequence in numbers.items():
            await topic.put(expected.puts[name], sequence)
            if name not in after.puts:
                after.add(name, expected.puts[name])
        more = {b: [{"id": f"more-{b}", "n": b}] for b in range(expected.buckets)}
        after.add("more", more)
        await topic.put(more)
        await topic.drop()
        topic = await _opened(root, expected.buckets, options)
        after.check(await topic.read(), after.puts, atomic=atomic)
        await topic.close()
        _check_nothing_left(topic.folder)
        if after_close:
            topic = await _opened(root, expected.buckets, options)
            after.check(await topic.read(), after.puts, atomic=atomic)
            await topic.close()
    return found


def _check_nothing_left(folder: Path) -> None:
    """Raise if a closed topic has logs or notes."""
    logs = folder / log_note.LOGS_FOLDER
    left = list(logs.iterdir()) if logs.is_dir() else []
    left += list(folder.glob(f"bucket_*/{log_note.FILE}"))
    left += list(folder.glob("bucket_*/wal/*.wal"))
    if left:
        raise PromiseBroken(f"a clean close left {[str(p.relative_to(folder)) for p in left]}")


async def _opened(root: Path, buckets: int, options: dict[str, Any]) -> CrashableTopic:
    topic = CrashableTopic(root, buckets, **options)
    try:
        for bucket in range(buckets):
            await topic.backend(bucket)
    except Exception as exc:
        raise PromiseBroken(f"opening failed: {type(exc).__name__}: {exc}") from exc
    return topic


@dataclass
class TopicExplorer:
    """Replays a recording of a topic: at every crash point, every given kind of power loss."""

    recording: Recording
    expected: ExpectedTopic
    workspace: Path
    options: dict[str, Any] = field(default_factory=dict)
    losses: Iterable[Loss] = FIXED_LOSSES
    samples: int = 1
    checked: int = 0
    numbers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    already_promised: frozenset[str] = frozenset()
    """Puts that were promised before the recording started."""
    _checked_states: dict[int, int] = field(default_factory=dict)

    async def explore(self, every: int = 1, first: int = 0) -> None:
        for index in range(first, len(self.recording.crash_points), every):
            point = self.recording.crash_points[index]
            for loss in (*self.losses, *(sampled(f"{index}-{n}") for n in range(self.samples))):
                await self.check(after_power_loss(point.disk, loss), point, loss)

    def required(self, point: CrashPoint) -> set[str]:
        """Return the puts that must survive power loss at this point."""
        return {*self.already_promised, *map(str, self.recording.promises[: point.promised])}

    async def check(self, tree: Tree, point: CrashPoint, loss: Loss) -> None:
        required = self.required(point)
        key = hash(frozenset(item for item in tree.items() if item[0].name != "positions"))
        if self._checked_states.get(key, -1) >= len(required):
            return
        self._checked_states[key] = len(required)
        root = self.workspace / f"state-{self.checked}"
        self.checked += 1
        with disk_after(tree, root, self.recording, point, loss):
            await check_topic(
                root,
                self.expected,
                required,
                after_close=self.checked % 4 == 0,
                numbers=self.numbers,
                **self.options,
            )
