"""Reopening what a crash left, and what must be found there."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from persisting import fs
from persisting.errors import OffsetOutOfRange
from persisting.lock import LOCK_FILE
from support.crash.disk import FIXED, Loss, Tree, after_power_loss, lay_out, sampled
from support.crash.recording import Moment, QuickFileSystem, Recording, promised_by

BUCKET = Path("queues", "topic", "bucket_0")
"""Where a bucket lies under the root of the recorded disk: its parents are made by the backend."""

Record = dict[str, Any]
Open = Callable[[Path], Any]


@dataclass
class Story:
    """What was put, in the order in which it was acknowledged."""

    records: list[Record] = field(default_factory=list)
    ends: set[int] = field(default_factory=lambda: {0})
    """Where a put ends: nothing may break off inside a batch."""
    defaults: Record = field(default_factory=dict)
    """What a field that a record lacks may come back as, instead of None."""

    def tell(self, *records: Record) -> None:
        self.records += records
        self.ends.add(len(self.records))

    def position(self, key: Hashable) -> int:
        """How many records there are up to and with this one."""
        return next(i for i, r in enumerate(self.records, 1) if r["id"] == key)


def same(put: Any, got: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Equal, where a field that came later has its default and a whole number may be a float."""
    if isinstance(put, dict) and isinstance(got, dict):
        return all(
            same(put.get(name), got.get(name))
            or (name not in put and got.get(name) == defaults.get(name))
            for name in {**put, **got}
        )
    return bool(put == got)


class Broken(AssertionError):
    """A promise was not kept."""


def check_story(got: list[Record], story: Story, least: int) -> None:
    """``got`` is the beginning of the story, no shorter than was promised."""
    ids = [r["id"] for r in got]
    told = [r["id"] for r in story.records]
    if len(set(ids)) != len(ids):
        raise Broken(f"doubled: {sorted(i for i in set(ids) if ids.count(i) > 1)} in {ids}")
    if set(ids) - set(told):
        raise Broken(f"never put: {set(ids) - set(told)}")
    if ids != told[: len(ids)]:
        raise Broken(f"a hole or another order: {ids}, put were {told}")
    if len(ids) < least:
        raise Broken(f"lost: {told[len(ids) : least]}, found were {ids}")
    if len(ids) not in story.ends:
        raise Broken(f"a batch was torn: {ids}")
    for put, found in zip(story.records, got, strict=False):
        if not same(put, found, story.defaults):
            raise Broken(f"{put} came back as {found}")


async def read_checked(backend: Any) -> list[Record]:
    """Everything, and the counts agree."""
    got = await backend.get(0, None)
    if backend.total_count() != len(got):
        raise Broken(f"total_count() is {backend.total_count()}, {len(got)} can be read")
    stats = await backend.stats()
    if (stats["start_offset"], stats["end_offset"]) != (0, len(got)):
        raise Broken(f"offsets {stats['start_offset']} to {stats['end_offset']} of {len(got)}")
    if len(got) > 1:
        middle = len(got) // 2
        if await backend.get(middle, 1) != [got[middle]]:
            raise Broken(f"offset {middle} is another record than in the whole")
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


class Handle:
    """A bucket that is opened, dropped as a killed process drops it, and opened again."""

    def __init__(self, folder: Path, open_bucket: Open) -> None:
        self._folder, self._open = folder, open_bucket
        self.backend = open_bucket(folder)

    def open(self, open_bucket: Open | None = None) -> Any:
        """Open again, from now on in another way if one is given."""
        self._open = open_bucket or self._open
        self.backend = self._open(self._folder)
        return self.backend

    async def drop(self) -> None:
        """Let go without closing; returns when the lock is free."""
        bucket = weakref.ref(self.backend._bucket)
        self.backend = None
        for attempt in range(2000):
            if bucket() is None and _lock_is_free(self._folder):
                return
            if attempt % 50 == 49:  # a thread may still be at it; only then look for cycles
                gc.collect()
            await asyncio.sleep(0.001)
        raise AssertionError("something keeps a dropped backend alive")


async def check_folder(
    folder: Path, open_bucket: Open, story: Story, least: int, *, after_close: bool = True
) -> int:
    """Open, check, put more, crash, open, check; then close, open, check. How many were found."""
    with fs.use(QuickFileSystem()):
        handle = _opened(folder, open_bucket)
        got = await read_checked(handle.backend)
        check_story(got, story, least)
        for record in MORE:
            await handle.backend.put(record)
        if not await keeps_without_flush(handle.backend):
            await handle.backend.flush()
        await handle.drop()
        after = Story([*got, *MORE], {len(got) + len(MORE)}, story.defaults)
        for _ in range(1 + after_close):
            handle = _opened(folder, open_bucket)
            check_story(await read_checked(handle.backend), after, len(after.records))
            await handle.backend.close()
    return len(got)


def _opened(folder: Path, open_bucket: Open) -> Handle:
    try:
        return Handle(folder, open_bucket)
    except Exception as exc:
        raise Broken(f"does not open: {type(exc).__name__}: {exc}") from exc


async def keeps_without_flush(backend: Any) -> bool:
    return bool((await backend.stats()).get("wal_enabled"))


@dataclass
class Explorer:
    """Replays a recording: every moment, in every given way for the power to go."""

    recording: Recording
    story: Story
    open_bucket: Open
    workspace: Path
    losses: Iterable[Loss] = FIXED
    samples: int = 2
    minimum: int = 0
    """How many records had been promised before the recording began."""
    checked: int = 0
    _known: dict[int, int] = field(default_factory=dict)

    async def explore(self, moments: Iterable[Moment] | None = None) -> None:
        """Raise at the first state in which a promise is broken."""
        for index, moment in enumerate(moments or self.recording.moments):
            least = self.least(moment)
            tosses = [sampled(f"{index}-{n}") for n in range(self.samples)]
            for loss in (*self.losses, *tosses):
                await self.check(after_power_loss(moment.disk, loss), moment, loss, least)

    def least(self, moment: Moment) -> int:
        """How many records must be found after power loss at this moment."""
        promised = promised_by(self.recording, moment)
        return max(map(self.story.position, promised), default=self.minimum)

    async def check(self, tree: Tree, moment: Moment, loss: Loss, least: int) -> None:
        key = hash(frozenset(tree.items()))
        if self._known.get(key, -1) >= least:
            return
        self._known[key] = least
        root = self.workspace / f"state-{self.checked}"
        self.checked += 1
        lay_out(tree, root)
        try:
            # The clean close behind it is the same everywhere: a part of the states will do.
            after_close = self.checked % 4 == 0
            bucket = root / BUCKET
            await check_folder(bucket, self.open_bucket, self.story, least, after_close=after_close)
        except Exception as exc:
            index = self.recording.moments.index(moment)
            kept = Path(tempfile.mkdtemp(prefix="persisting-crash-")) / "disk"
            lay_out(tree, kept)
            raise Broken(
                f"{exc}\npower lost at moment {index} ({moment.label}), {loss}; kept in {kept}"
            ) from exc
        shutil.rmtree(root)


# The bucket as a table


@dataclass(frozen=True)
class Content:
    """Rows, and the offset of the first."""

    start: int = 0
    rows: tuple[Record, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def with_more(self, *records: Record) -> Content:
        return Content(self.start, (*self.rows, *records))

    def from_offset(self, start: int) -> Content:
        """What retention leaves of it."""
        return Content(start, self.rows[start - self.start :])

    def __str__(self) -> str:
        return f"{self.start}..{self.end} {[row['id'] for row in self.rows]}"


@dataclass(frozen=True)
class State:
    """What a bucket holds at one moment."""

    now: Content = field(default_factory=Content)
    tags: Mapping[str, Content] = field(default_factory=dict)
    epoch: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a field that a record lacks may come back as, instead of None."""

    def difference(self, found: State) -> str | None:
        """In words, None if there is none."""
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
                if not same(put, got, self.defaults):
                    return f"{name}: {put} came back as {got}"
        return None


def check_state(found: State, allowed: Iterable[State]) -> State:
    """The state of those allowed that was found."""
    differences = []
    for state in allowed:
        difference = state.difference(found)
        if difference is None:
            return state
        differences.append(difference)
    raise Broken("none of the states that may be: " + "; or ".join(differences))


async def read_state(backend: Any) -> State:
    """All a bucket holds; counts, offsets and random access agree with it."""
    rows, stats = await backend.get(0, None), await backend.stats()
    content = Content(stats["start_offset"], tuple(rows))
    if (stats["end_offset"], backend.total_count()) != (content.end, len(rows)):
        raise Broken(f"{stats}, and {len(rows)} rows can be read")
    for offset in {content.start, (content.start + content.end) // 2}:
        if await backend.get(offset, 1) != rows[offset - content.start :][:1]:
            raise Broken(f"offset {offset} is another record than in the whole")
    backwards = list(range(content.start, content.end))[::-1]
    if await backend.take(backwards) != rows[::-1]:
        raise Broken("taking every offset gives other records than reading them")
    if content.start > 1:
        try:
            await backend.get(content.start - 1, 1)
        except OffsetOutOfRange:
            pass
        else:
            raise Broken(f"offset {content.start - 1} lies before the start and can be read")
    tags = {}
    for tag in await backend.tags():
        got = await backend.get(0, None, version=tag["name"])
        tags[tag["name"]] = Content(backend._bucket.at(tag["name"]).start, tuple(got))
    return State(content, tags, stats["epoch"])


async def check_health(backend: Any, rows: Iterable[Record]) -> None:
    """Every file is whole, versions that are listed can be read, every index finds its rows."""
    report = await backend.verify()
    if not report["ok"]:
        raise Broken(f"verify: {report}")
    listed = await backend.versions()
    for version in listed[:: len(listed) // 4 + 1]:
        got = await backend.get(0, None, version=version["version"])
        if len(got) != version["rows"]:
            raise Broken(f"version {version} has {len(got)} rows")
    for index in await backend.indexes():
        await check_index(backend, index, list(rows))
    if report["unchecked"]:
        raise Broken(f"verify: {report}")


async def check_index(backend: Any, index: Mapping[str, Any], rows: list[Record]) -> None:
    column = index["column"]
    valued = [row for row in rows if row.get(column) is not None]
    if index["family"] == "scalar":
        for value in {row[column] for row in valued[:2] + valued[-2:]}:
            found = await backend.lookup(column, value)
            wanted = [row["id"] for row in valued if row[column] == value]
            if [row["id"] for row in found] != wanted:
                raise Broken(f"the index of {column} finds {found} for {value!r}")
    elif index["family"] == "text":
        for word in {row[column].split()[0] for row in valued[:2] + valued[-2:]}:
            hits = await backend.search(text=word, column=column, k=len(rows))
            wanted = [row["id"] for row in valued if word in row[column].split()]
            if sorted(hit["id"] for hit in hits) != sorted(wanted):
                raise Broken(f"the index of {column} finds {hits} for {word!r}")
    elif valued:
        given = {"vector": valued[-1][column], "column": column, "k": 3}
        near, exact = await backend.search(**given), await backend.search(**given, exact=True)
        if [hit["id"] for hit in near] != [hit["id"] for hit in exact]:
            raise Broken(f"the index of {column} finds {near}, exactly it is {exact}")


async def check_table(
    folder: Path,
    open_bucket: Open,
    allowed: Iterable[State],
    more: Iterable[Record] = MORE,
    *,
    go_on: bool = True,
) -> State:
    """Open and check; then work on, crash, open and check again. The state that was found."""
    with fs.use(QuickFileSystem()):
        handle = _opened(folder, open_bucket)
        found = await read_state(handle.backend)
        state = check_state(found, allowed)
        await check_health(handle.backend, found.now.rows)
        if not go_on:
            await handle.backend.close()
            return state
        known = replace(found, defaults=state.defaults)
        after = await worked_on(handle.backend, known, list(more))
        await handle.drop()
        handle = _opened(folder, open_bucket)
        check_state(await read_state(handle.backend), [after])
        await check_health(handle.backend, after.now.rows)
        await handle.backend.close()
    return state


async def worked_on(backend: Any, state: State, more: list[Record]) -> State:
    """Put, tag, compact and drop; what the bucket holds then."""
    await backend.put_batch(more)
    tagged = state.now.with_more(*more)
    await backend.tag("worked-on")
    await backend.compact()
    start = (await backend.retain(rows=1))["start_offset"]
    error = (await backend.stats())["upkeep_error"]
    if error is not None:
        raise Broken(f"upkeep failed: {error}")
    return replace(state, now=tagged.from_offset(start), tags={**state.tags, "worked-on": tagged})


@dataclass
class Replay:
    """Replays the recording of a table's history, as :class:`Explorer` does that of a queue's."""

    recording: Recording = field(repr=False)
    states: list[State] = field(repr=False)
    """By number: what the promises of the recording name."""
    open_bucket: Open
    workspace: Path
    more: Iterable[Record] = MORE
    going_on: int = 1
    """Work goes on in every so many-th of the states."""
    checked: int = 0
    found: set[int] = field(default_factory=set)
    """The numbers of the states that were found."""
    _known: set[int] = field(default_factory=set)

    def allowed(self, moment: Moment) -> list[State]:
        """The state that was promised last, and what the step after it made of it."""
        promised = [int(str(n)) for n in self.recording.promises]
        first = promised[moment.promised - 1] if moment.promised else 0
        last = [*promised, len(self.states) - 1][moment.promised]
        return self.states[first : last + 1]

    async def check(self, moment: Moment, loss: Loss) -> None:
        tree, allowed = after_power_loss(moment.disk, loss), self.allowed(moment)
        key = hash((frozenset(tree.items()), self.states.index(allowed[0])))
        if key in self._known:
            return
        self._known.add(key)
        root = self.workspace / f"state-{self.checked}"
        self.checked += 1
        lay_out(tree, root)
        try:
            go_on = self.checked % self.going_on == 0
            state = await check_table(
                root / BUCKET, self.open_bucket, allowed, self.more, go_on=go_on
            )
        except Exception as exc:
            kept = Path(tempfile.mkdtemp(prefix="persisting-crash-")) / "disk"
            lay_out(tree, kept)
            raise Broken(
                f"{type(exc).__name__}: {exc}\npower lost at moment "
                f"{self.recording.moments.index(moment)} ({moment.label}), {loss}; kept in {kept}"
            ) from exc
        self.found.add(self.states.index(state))
        shutil.rmtree(root)
