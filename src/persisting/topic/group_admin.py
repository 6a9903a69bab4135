"""How far consumer groups have come, seen and set from outside the group. Blocking."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import msgspec

from persisting.bucket.group_offsets import Committed, groups_in, read_committed
from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.fs import FileSystem
from persisting.lock import LockedFile
from persisting.topic.groups import FOLDER, MEMBER, group_folder, try_lock, write_committed


class BucketProgress(msgspec.Struct):
    """How far a group has come in a bucket."""

    bucket: int
    committed: int
    end_offset: int
    lag: int


class GroupProgress(msgspec.Struct):
    """How far a group has come."""

    group: str
    members: int
    """Living readers of the group."""
    lag: int
    buckets: list[BucketProgress]


class Span(msgspec.Struct):
    """The offsets of a bucket, and the ends that its restores have left."""

    start: int
    end: int
    restores: list[int]


def groups(folder: Path, spans: dict[int, Span], fs: FileSystem) -> list[GroupProgress]:
    """Every group of a topic."""
    return [progress(folder, one.name, spans, fs) for one in groups_in(folder / FOLDER, fs)]


def progress(folder: Path, group: str, spans: dict[int, Span], fs: FileSystem) -> GroupProgress:
    """One group, or raise if there is none of that name."""
    _known(folder, group)
    return after_reset(folder, group, {}, spans, fs)


def after_reset(
    folder: Path, group: str, offsets: dict[int, int], spans: dict[int, Span], fs: FileSystem
) -> GroupProgress:
    """How far a group would have come after :func:`reset`."""
    place = group_folder(folder, group)
    buckets = []
    for bucket, span in spans.items():
        known = read_committed(place, bucket, fs).now(span.restores)
        committed = offsets.get(bucket, known)
        lag = max(0, span.end - max(committed, span.start))
        buckets.append(BucketProgress(bucket, committed, span.end, lag))
    members = _members(place, fs) if place.is_dir() else 0
    return GroupProgress(group, members, sum(one.lag for one in buckets), buckets)


def reset(
    folder: Path, group: str, offsets: dict[int, int], spans: dict[int, Span], fs: FileSystem
) -> None:
    """Have a group go on at ``offsets``, by bucket. It must have no living member.

    A group that does not exist yet is made.
    """
    place = group_folder(folder, group)
    try:
        fs.make_folder(place)
    except OSError as exc:
        raise StorageError(f"cannot make {place}: {exc.strerror or exc}") from exc
    with _held(place, group, list(offsets)):
        for bucket, offset in offsets.items():
            known = read_committed(place, bucket, fs)
            epoch = len(spans[bucket].restores)
            write_committed(place, bucket, Committed(offset, known.generation + 1, epoch), fs)


def delete(folder: Path, group: str, buckets: list[int], fs: FileSystem) -> None:
    """Forget a group that has no living member."""
    place = _known(folder, group)
    with _held(place, group, buckets):
        # Under another name first: half a group would read some buckets anew.
        gone = place.with_name(f".{place.name}.deleted")
        shutil.rmtree(gone, ignore_errors=True)
        fs.rename(place, gone)
        fs.sync_folder(place.parent)
        shutil.rmtree(gone, ignore_errors=True)


def _known(folder: Path, group: str) -> Path:
    place = group_folder(folder, group)
    if not place.is_dir():
        there = [one.name for one in groups_in(folder / FOLDER, FileSystem())]
        raise InvalidArgument(
            f"there is no group {group!r}; there are: {', '.join(map(repr, there)) or 'none'}"
        )
    return place


def _members(place: Path, fs: FileSystem) -> int:
    """How many members live; looking removes nothing."""
    return sum(_is_locked(place / name) for name in fs.list(place) if name.startswith(MEMBER))


def _is_locked(path: Path) -> bool:
    try:
        file = LockedFile(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        file.lock(fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        file.free()
    return False


def _held(place: Path, group: str, buckets: list[int]) -> ExitStack:
    """Hold the group's buckets, so that no member can take or commit one."""
    stack = ExitStack()
    if members := _members(place, FileSystem()):  # one may wait without a bucket
        raise BucketLocked(
            f"group {group!r} is being read ({members} living members): close its readers first"
        )
    for bucket in buckets:
        file = try_lock(place / f"bucket_{bucket}.lock")
        if file is None:
            stack.close()
            raise BucketLocked(
                f"group {group!r} is being read (bucket {bucket} has a living member): close its "
                "readers first"
            )
        stack.callback(file.free)
    return stack
