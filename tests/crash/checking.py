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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from crash.disk import FIXED, Loss, Tree, after_power_loss, lay_out, sampled
from crash.recording import Moment, QuickFileSystem, Recording, promised_by
from persisting import fs
from persisting.lock import LOCK_FILE

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
