"""Reopen a bucket after a crash and check what it holds."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from persisting import fs
from persisting.errors import InvalidArgument, OffsetOutOfRange
from persisting.lock import LOCK_FILE
from support.crash.disk_model import FIXED_LOSSES, Loss, Tree, after_power_loss, sampled, write_tree
from support.crash.recording import CrashPoint, QuickFileSystem, Recording, promises_before

BUCKET = Path("queues", "topic", "bucket_0")
"""Path of the bucket below the root of the recorded disk. The backend creates its parents."""

PATIENCE = 60.0
"""Seconds to wait for work in the background, long enough for a busy machine."""

Record = dict[str, Any]
Open = Callable[[Path], Any]


@dataclass
class ExpectedRecords:
    """The records that were put, in the order in which they were acknowledged."""

    records: list[Record] = field(default_factory=list)
    ends: set[int] = field(default_factory=lambda: {0})
    """Number of records after each put: a bucket must not end inside a batch."""
    defaults: Record = field(default_factory=dict)
    """Values that missing fields may be read back as, instead of None."""

    def add(self, *records: Record) -> None:
        self.records += records
        self.ends.add(len(self.records))

    def position(self, key: Hashable) -> int:
        """Return the number of records up to and including this one."""
        return next(i for i, r in enumerate(self.records, 1) if r["id"] == key)


def same_value(put: Any, got: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a record was read back as it was put. A field that was added later may have
    its default, and an integer may be a float."""
    if isinstance(put, dict) and isinstance(got, dict):
        return all(
            same_value(put.get(name), got.get(name))
            or (name not in put and got.get(name) == defaults.get(name))
            for name in {**put, **got}
        )
    return bool(put == got)


class PromiseBroken(AssertionError):
    """Something that was acknowledged is missing, or something else is wrong with it."""


def check_records(got: list[Record], expected: ExpectedRecords, required: int) -> None:
    """Raise unless ``got`` is a prefix of ``expected`` with at least ``required`` records."""
    ids = [r["id"] for r in got]
    put_ids = [r["id"] for r in expected.records]
    if len(set(ids)) != len(ids):
        raise PromiseBroken(
            f"stored twice: {sorted(i for i in set(ids) if ids.count(i) > 1)} in {ids}"
        )
    if set(ids) - set(put_ids):
        raise PromiseBroken(f"never put: {set(ids) - set(put_ids)}")
    if ids != put_ids[: len(ids)]:
        raise PromiseBroken(f"missing or reordered: found {ids}, put {put_ids}")
    if len(ids) < required:
        raise PromiseBroken(f"lost: {put_ids[len(ids) : required]}, found {ids}")
    if len(ids) not in expected.ends:
        raise PromiseBroken(f"part of a batch is missing: {ids}")
    for put, found in zip(expected.records, got, strict=False):
        if not same_value(put, found, expected.defaults):
            raise PromiseBroken(f"{put} came back as {found}")


async def read_checked(backend: Any) -> list[Record]:
    """Return all records; raise if counts or offsets contradict them."""
    got = await backend.get(0, None)
    if backend.total_count() != len(got):
        raise PromiseBroken(
            f"total_count() is {backend.total_count()}, but {len(got)} records can be read"
        )
    stats = await backend.stats()
    if (stats["start_offset"], stats["end_offset"]) != (0, len(got)):
        raise PromiseBroken(
            f"offsets {stats['start_offset']} to {stats['end_offset']} of {len(got)}"
        )
    if len(got) > 1:
        middle = len(got) // 2
        if await backend.get(middle, 1) != [got[middle]]:
            raise PromiseBroken(f"get() at offset {middle} returns another record than a full read")
    return got


MORE = ({"id": "more-1", "n": 1}, {"id": "more-2", "n": 2})


def _lock_is_free(folder: Path) -> bool:
    fd = os.open(folder / LOCK_FILE, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


class CrashableBucket:
    """A bucket that can be dropped without a close, as by a killed process, and opened again."""

    def __init__(self, folder: Path, open_bucket: Open) -> None:
        self._folder, self._open = folder, open_bucket
        self.backend = open_bucket(folder)

    def open(self, open_bucket: Open | None = None) -> Any:
        """Open the bucket again, with ``open_bucket`` from now on if it is given."""
        self._open = open_bucket or self._open
        self.backend = self._open(self._folder)
        return self.backend

    async def drop(self) -> bool:
        """Drop the bucket without closing it; return when its lock is free. The result says whether
        its records were logged: if not, the next owner begins a new epoch."""
        logged: bool = self.backend.bucket.options.is_logged
        bucket = weakref.ref(self.backend._bucket)
        self.backend = None
        for attempt in range(30_000):
            if bucket() is None and _lock_is_free(self._folder):
                return logged
            # A thread may still use the bucket; collecting is slow, so do it rarely.
            if attempt % 50 == 49:
                gc.collect()
            await asyncio.sleep(0.001)
        raise AssertionError("a dropped backend is still referenced or locked")


async def check_folder(
    folder: Path,
    open_bucket: Open,
    expected: ExpectedRecords,
    required: int,
    *,
    after_close: bool = True,
) -> int:
    """Open and check, put more, crash, open and check; then close, open and check. Return how many
    records were found at first."""
    with fs.use(QuickFileSystem()):
        handle = _opened(folder, open_bucket)
        got = await read_checked(handle.backend)
        check_records(got, expected, required)
        for record in MORE:
            await handle.backend.put(record)
        if not await has_log(handle.backend):
            await handle.backend.flush()
        await handle.drop()
        after = ExpectedRecords([*got, *MORE], {len(got) + len(MORE)}, expected.defaults)
        for _ in range(1 + after_close):
            handle = _opened(folder, open_bucket)
            check_records(await read_checked(handle.backend), after, len(after.records))
            await handle.backend.close()
    return len(got)


def _opened(folder: Path, open_bucket: Open) -> CrashableBucket:
    try:
        return CrashableBucket(folder, open_bucket)
    except Exception as exc:
        raise PromiseBroken(f"opening failed: {type(exc).__name__}: {exc}") from exc


async def stats_when(backend: Any, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the stats of a bucket satisfy a condition, and return them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        stats: dict[str, Any] = await backend.stats()
        if condition(stats):
            return stats
        assert time.monotonic() < deadline, f"the stats are still {stats}"
        await asyncio.sleep(0.01)


async def has_log(backend: Any) -> bool:
    return bool((await backend.stats()).get("wal_enabled"))


@contextmanager
def disk_after(
    tree: Tree, root: Path, recording: Recording, point: CrashPoint, loss: Loss
) -> Iterator[None]:
    """Write the files that a power loss leaves to ``root`` for the block that checks them; if it
    fails, keep a copy and name it."""
    write_tree(tree, root)
    try:
        yield
    except Exception as exc:
        index = recording.crash_points.index(point)
        kept = Path(tempfile.mkdtemp(prefix="persisting-crash-")) / "disk"
        write_tree(tree, kept)
        raise PromiseBroken(
            f"{type(exc).__name__}: {exc}\npower loss at crash point {index} ({point.label}), "
            f"{loss}; disk kept in {kept}"
        ) from exc
    shutil.rmtree(root)


@dataclass
class CrashExplorer:
    """Replays a recording: at every crash point, every given kind of power loss."""

    recording: Recording
    expected: ExpectedRecords
    open_bucket: Open
    workspace: Path
    losses: Iterable[Loss] = FIXED_LOSSES
    samples: int = 2
    minimum: int = 0
    """Number of records that were promised before the recording started."""
    checked: int = 0
    _checked_states: dict[int, int] = field(default_factory=dict)

    async def explore(self, crash_points: Iterable[CrashPoint] | None = None) -> None:
        """Check every state; raise at the first in which a promise is broken."""
        for index, point in enumerate(crash_points or self.recording.crash_points):
            required = self.required(point)
            random_losses = [sampled(f"{index}-{n}") for n in range(self.samples)]
            for loss in (*self.losses, *random_losses):
                await self.check(after_power_loss(point.disk, loss), point, loss, required)

    def required(self, point: CrashPoint) -> int:
        """Return how many records must be found after power loss at this point."""
        promised = promises_before(self.recording, point)
        return max(map(self.expected.position, promised), default=self.minimum)

    async def check(self, tree: Tree, point: CrashPoint, loss: Loss, required: int) -> None:
        key = hash(frozenset(tree.items()))
        if self._checked_states.get(key, -1) >= required:
            return
        self._checked_states[key] = required
        root = self.workspace / f"state-{self.checked}"
        self.checked += 1
        with disk_after(tree, root, self.recording, point, loss):
            # The clean close that follows is the same in every state: check it in some of them.
            after_close = self.checked % 4 == 0
            bucket = root / BUCKET
            await check_folder(
                bucket, self.open_bucket, self.expected, required, after_close=after_close
            )


# Tables


@dataclass(frozen=True)
class Content:
    """Rows, and the offset of the first row."""

    start: int = 0
    rows: tuple[Record, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def with_more(self, *records: Record) -> Content:
        return Content(self.start, (*self.rows, *records))

    def from_offset(self, start: int) -> Content:
        """Return what retention leaves when the first offset is ``start``."""
        return Content(start, self.rows[start - self.start :])

    def __str__(self) -> str:
        return f"{self.start}..{self.end} {[row['id'] for row in self.rows]}"


@dataclass(frozen=True)
class State:
    """What a bucket holds at one point in time."""

    now: Content = field(default_factory=Content)
    tags: Mapping[str, Content] = field(default_factory=dict)
    epoch: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that missing fields may be read back as, instead of None."""

    def in_next_epoch(self) -> State:
        """Return what the next owner finds if the owner was killed and had no log."""
        return replace(self, epoch=self.epoch + 1)

    def difference(self, found: State) -> str | None:
        """Describe the first difference; return None if there is none."""
        if self.epoch != found.epoch:
            return f"epoch {found.epoch} instead of {self.epoch}"
        if set(self.tags) != set(found.tags):
            return f"tags {sorted(found.tags)} instead of {sorted(self.tags)}"
        for name, content in {"now": self.now, **self.tags}.items():
            other = found.now if name == "now" else found.tags[name]
            ids = [row["id"] for row in content.rows], [row["id"] for row in other.rows]
            if content.start != other.start or ids[0] != ids[1]:
                return f"{name}: {other} instead of {content}"
            for put, got in zip(content.rows, other.rows, strict=True):
                if not same_value(put, got, self.defaults):
                    return f"{name}: {put} came back as {got}"
        return None


def check_state(found: State, allowed: Iterable[State]) -> State:
    """Return the allowed state that equals ``found``; raise if none does."""
    differences = []
    for state in allowed:
        difference = state.difference(found)
        if difference is None:
            return state
        differences.append(difference)
    raise PromiseBroken("not an allowed state: " + "; or ".join(differences))


async def read_state(backend: Any) -> State:
    """Return everything that a bucket holds; raise if counts, offsets or random access contradict
    it."""
    rows, stats = await backend.get(0, None), await backend.stats()
    content = Content(stats["start_offset"], tuple(rows))
    if (stats["end_offset"], backend.total_count()) != (content.end, len(rows)):
        raise PromiseBroken(f"stats are {stats}, but {len(rows)} rows can be read")
    for offset in {content.start, (content.start + content.end) // 2}:
        if await backend.get(offset, 1) != rows[offset - content.start :][:1]:
            raise PromiseBroken(f"get() at offset {offset} returns another record than a full read")
    backwards = list(range(content.start, content.end))[::-1]
    if await backend.take(backwards) != rows[::-1]:
        raise PromiseBroken("take() of all offsets returns other records than get()")
    if content.start > 1:
        try:
            await backend.get(content.start - 1, 1)
        except OffsetOutOfRange:
            pass
        else:
            raise PromiseBroken(f"offset {content.start - 1}, before the start, can be read")
    tags = {}
    for tag in await backend.tags():
        got = await backend.get(0, None, version=tag["name"])
        tags[tag["name"]] = Content(backend._bucket.at(tag["name"]).start, tuple(got))
    return State(content, tags, stats["epoch"])


async def check_health(backend: Any, rows: Iterable[Record]) -> None:
    """Raise unless every file is intact, listed versions can be read, and every index finds its
    rows."""
    report = await backend.verify()
    if not report["ok"]:
        raise PromiseBroken(f"verify: {report}")
    listed = await backend.versions()
    for version in listed[:: len(listed) // 4 + 1]:
        try:
            got = await backend.get(0, None, version=version["version"])
        except InvalidArgument:
            left = [kept["version"] for kept in await backend.versions()]
            if version["version"] in left:
                raise
            continue  # removed in the background since it was listed
        if len(got) != version["rows"]:
            raise PromiseBroken(f"version {version} has {len(got)} rows")
    for index in await backend.indexes():
        await check_index(backend, index, list(rows))
    if report["unchecked"]:
        raise PromiseBroken(f"verify: {report}")


async def check_index(backend: Any, index: Mapping[str, Any], rows: list[Record]) -> None:
    column = index["column"]
    valued = [row for row in rows if row.get(column) is not None]
    if index["family"] == "scalar":
        for value in {row[column] for row in valued[:2] + valued[-2:]}:
            found = await backend.lookup(column, value)
            matching = [row["id"] for row in valued if row[column] == value]
            if [row["id"] for row in found] != matching:
                raise PromiseBroken(f"the index of {column} finds {found} for {value!r}")
    elif index["family"] == "text":
        for word in {row[column].split()[0] for row in valued[:2] + valued[-2:]}:
            hits = await backend.search(text=word, column=column, k=len(rows))
            matching = [row["id"] for row in valued if word in row[column].split()]
            if sorted(hit["id"] for hit in hits) != sorted(matching):
                raise PromiseBroken(f"the index of {column} finds {hits} for {word!r}")
    elif valued:
        given = {"vector": valued[-1][column], "column": column, "k": 3}
        near, exact = await backend.search(**given), await backend.search(**given, exact=True)
        if [hit["id"] for hit in near] != [hit["id"] for hit in exact]:
            raise PromiseBroken(f"the index of {column} finds {near}, an exact search {exact}")


async def check_table(
    folder: Path,
    open_bucket: Open,
    allowed: Iterable[State],
    more: Iterable[Record] = MORE,
    *,
    continue_afterwards: bool = True,
    logged: bool = True,
) -> State:
    """Open and check; then continue work, crash, open and check again. Return the state that was
    found at first. ``logged``: whether the records of the former owner were logged."""
    allowed = list(allowed)
    with fs.use(QuickFileSystem()):
        handle = _opened(folder, open_bucket)
        found = await read_state(handle.backend)
        # Power loss may take the note that says that records may be lost, if none was accepted.
        possible = allowed if logged else [*allowed, *(s.in_next_epoch() for s in allowed)]
        state = allowed[possible.index(check_state(found, possible)) % len(allowed)]
        await check_health(handle.backend, found.now.rows)
        if not continue_afterwards:
            await handle.backend.close()
            return state
        known = replace(found, defaults=state.defaults)
        after = await continue_work(handle.backend, known, list(more))
        if not await handle.drop():
            after = after.in_next_epoch()
        handle = _opened(folder, open_bucket)
        check_state(await read_state(handle.backend), [after])
        await check_health(handle.backend, after.now.rows)
        await handle.backend.close()
    return state


async def continue_work(backend: Any, state: State, more: list[Record]) -> State:
    """Put, tag, compact and retain; return what the bucket holds then."""
    await backend.put_batch(more)
    tagged = state.now.with_more(*more)
    await backend.tag("worked-on")
    await backend.compact()
    start = (await backend.retain(rows=1))["start_offset"]
    error = (await backend.stats())["upkeep_error"]
    if error is not None:
        raise PromiseBroken(f"maintenance failed: {error}")
    return replace(state, now=tagged.from_offset(start), tags={**state.tags, "worked-on": tagged})


@dataclass
class TableCrashExplorer:
    """Replays the recording of table maintenance. :class:`CrashExplorer` does the same for puts."""

    recording: Recording = field(repr=False)
    states: list[State] = field(repr=False)
    """States by number: the promises of the recording are indexes into this list."""
    open_bucket: Open
    workspace: Path
    more: Iterable[Record] = MORE
    logged: bool = True
    continue_every: int = 1
    """Continue work in every n-th state."""
    checked: int = 0
    found: set[int] = field(default_factory=set)
    """Numbers of the states that were found."""
    _checked_states: set[int] = field(default_factory=set)

    def allowed(self, point: CrashPoint) -> list[State]:
        """Return the last promised state and those that the next step leads to."""
        promised = [int(str(n)) for n in self.recording.promises]
        first = promised[point.promised - 1] if point.promised else 0
        last = [*promised, len(self.states) - 1][point.promised]
        return self.states[first : last + 1]

    async def check(self, point: CrashPoint, loss: Loss) -> None:
        tree, allowed = after_power_loss(point.disk, loss), self.allowed(point)
        key = hash((frozenset(tree.items()), self.states.index(allowed[0])))
        if key in self._checked_states:
            return
        self._checked_states.add(key)
        root = self.workspace / f"state-{self.checked}"
        self.checked += 1
        with disk_after(tree, root, self.recording, point, loss):
            continue_afterwards = self.checked % self.continue_every == 0
            state = await check_table(
                root / BUCKET,
                self.open_bucket,
                allowed,
                self.more,
                continue_afterwards=continue_afterwards,
                logged=self.logged,
            )
        self.found.add(self.states.index(state))
