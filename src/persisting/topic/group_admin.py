"""Inspect, reset and delete consumer groups from outside the group. Blocking."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from persisting.bucket.group_offsets import (
    WORK_FOLDER,
    Committed,
    groups_in,
    is_work_group,
    read_committed,
)
from persisting.errors import BucketLocked, InvalidArgument, StorageError
from persisting.fs import FileSystem
from persisting.lock import LOCK_FILE, is_locked
from persisting.suggestions import choices
from persisting.topic.groups import (
    FOLDER,
    MEMBER,
    check_offset_mode,
    group_folder,
    try_lock,
    write_committed,
)
from persisting.topic.work_status import WorkStatus, read_status


class BucketProgress(msgspec.Struct):
    """A group's committed offset and lag in one bucket."""

    bucket: int
    committed: int
    end_offset: int
    lag: int


class GroupProgress(msgspec.Struct):
    """A group's committed offsets and lag."""

    group: str
    members: int
    """Number of live readers of the group."""
    lag: int
    """Records that are not committed, or in a work group not acknowledged."""
    buckets: list[BucketProgress]
    work: WorkStatus | None = None
    """The numbers of a work group, as its keeper noted them last."""


class Span(msgspec.Struct):
    """The offsets of a bucket, and its end after each restore."""

    start: int
    end: int
    restores: list[int]


ReadSpans = Callable[[], dict[int, Span]]
"""Reads the offsets of the buckets. It is called after the groups' offsets were read: ends only
grow, so a group that reads meanwhile never seems to be past the end."""


def groups(
    folder: Path, buckets: Iterable[int], read_spans: ReadSpans, fs: FileSystem
) -> list[GroupProgress]:
    """Return every group of a topic."""
    names = [group.name for group in groups_in(folder / FOLDER, fs)]
    if not names:
        return []
    buckets = list(buckets)
    committed = {name: _committed(group_folder(folder, name), buckets, fs) for name in names}
    spans = read_spans()
    return [_progress(folder, name, committed[name], {}, spans, fs) for name in names]


def progress(
    folder: Path, group: str, buckets: Iterable[int], read_spans: ReadSpans, fs: FileSystem
) -> GroupProgress:
    """Return one group, or raise if it does not exist."""
    _existing_folder(folder, group)
    return after_reset(folder, group, {}, buckets, read_spans, fs)


def after_reset(
    folder: Path,
    group: str,
    offsets: dict[int, int],
    buckets: Iterable[int],
    read_spans: ReadSpans,
    fs: FileSystem,
) -> GroupProgress:
    """Return what :func:`progress` would return after :func:`reset`."""
    committed = _committed(group_folder(folder, group), buckets, fs)
    return _progress(folder, group, committed, offsets, read_spans(), fs)


def _committed(place: Path, buckets: Iterable[int], fs: FileSystem) -> dict[int, Committed]:
    return {bucket: read_committed(place, bucket, fs) for bucket in buckets}


def _progress(
    folder: Path,
    group: str,
    stored: dict[int, Committed],
    offsets: dict[int, int],
    spans: dict[int, Span],
    fs: FileSystem,
) -> GroupProgress:
    place = group_folder(folder, group)
    buckets = []
    for bucket, span in spans.items():
        committed = offsets.get(bucket, stored[bucket].now(span.restores))
        lag = max(0, span.end - max(committed, span.start))
        buckets.append(BucketProgress(bucket, committed, span.end, lag))
    lag = sum(bucket.lag for bucket in buckets)
    if is_work_group(place):
        status = read_status(place, fs)
        return GroupProgress(group, status.members if status.kept else 0, lag, buckets, status)
    members = _members(place, fs) if place.is_dir() else 0
    return GroupProgress(group, members, lag, buckets)


def reset(
    folder: Path, group: str, offsets: dict[int, int], spans: dict[int, Span], fs: FileSystem
) -> None:
    """Set the committed offsets of a group, by bucket; it must have no live member.

    A group that does not exist yet is created.
    """
    check_offset_mode(folder, group)
    place = group_folder(folder, group)
    try:
        fs.make_folder(place)
    except OSError as exc:
        raise StorageError(f"cannot create {place}: {exc.strerror or exc}") from exc
    with _locked(place, group, list(offsets)):
        for bucket, offset in offsets.items():
            last = read_committed(place, bucket, fs)
            epoch = len(spans[bucket].restores)
            write_committed(place, bucket, Committed(offset, last.generation + 1, epoch), fs)


def delete(folder: Path, group: str, buckets: list[int], fs: FileSystem) -> None:
    """Delete a group that has no live member."""
    place = _existing_folder(folder, group)
    with _locked(place, group, buckets):
        # Renamed first: a group that is half deleted would read some buckets from the beginning.
        trash = place.with_name(f".{place.name}.deleted")
        shutil.rmtree(trash, ignore_errors=True)
        fs.rename(place, trash)
        fs.sync_folder(place.parent)
        shutil.rmtree(trash, ignore_errors=True)


def _existing_folder(folder: Path, group: str) -> Path:
    place = group_folder(folder, group)
    if not place.is_dir():
        names = [existing.name for existing in groups_in(folder / FOLDER, FileSystem())]
        raise InvalidArgument(f"there is no group {group!r}; {choices(group, names)}")
    return place


def _members(place: Path, fs: FileSystem) -> int:
    """Count the live members, without removing the files of dead ones."""
    return sum(is_locked(place / name) for name in fs.list(place) if name.startswith(MEMBER))


def _locked(place: Path, group: str, buckets: list[int]) -> ExitStack:
    """Lock the group's buckets, so that no member can take or commit one."""
    stack = ExitStack()
    if is_work_group(place):
        kept = try_lock(place / WORK_FOLDER / LOCK_FILE)
        if kept is None:
            raise BucketLocked(
                f"work group {group!r} is being read: close its readers first, and on a cluster "
                "stop the owner of the topic's bucket 0"
            )
        stack.callback(kept.free)
    if members := _members(place, FileSystem()):  # a member may have no bucket
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
