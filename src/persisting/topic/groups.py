"""Consumer groups: members share a topic's buckets and store the offsets they have committed.

Everything is a file in ``<topic>/groups/<group>/``, so members share only the storage:

- ``member-<id>`` is locked by its member until it ends; an unlocked one belongs to a dead member;
- ``bucket_<i>.lock`` is locked by the one member that reads the bucket;
- ``bucket_<i>.json`` holds the committed offset and the generation, which rises whenever the bucket
  gets another member. Only the holder of the lock writes it, so a late commit is impossible.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import NamedTuple

import msgspec

from persisting.bucket.group_offsets import Committed, is_work_group, read_committed
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import LockedFile
from persisting.topic.topic_names import check_name

FOLDER = "groups"
MEMBER = "member-"
_PAUSE_SECONDS = 0.001


class Assignment(NamedTuple):
    """A bucket assigned to a member: the generation, and the offset (of an epoch) to start at."""

    generation: int
    start: int
    epoch: int = 0


def group_folder(topic_folder: Path, group: str) -> Path:
    return topic_folder / FOLDER / check_name("group", group)


def check_offset_mode(topic_folder: Path, group: str) -> None:
    """Raise if a group is a work group, which has no offsets to commit. Blocking."""
    if is_work_group(group_folder(topic_folder, group)):
        raise work_group_error(group)


def work_group_error(group: str) -> InvalidArgument:
    return InvalidArgument(
        f"group {group!r} is a work group: read it with mode='work', or use another group"
    )


class Membership:
    """One member of a group; it joins with the first :meth:`rebalance`.

    Blocking and thread-safe: a reader whose call was cancelled may call again while the cancelled
    call still runs. A member that is garbage-collected releases all its locks.
    """

    def __init__(self, topic_folder: Path, group: str, buckets: list[int], fs: FileSystem) -> None:
        self.group = group
        self.member = uuid.uuid4().hex
        self.folder = group_folder(topic_folder, group)
        self._buckets, self._fs = buckets, fs
        self._guard = threading.Lock()
        self._held: dict[int, Assignment] = {}
        self._files: dict[str, LockedFile] = {}
        self._left = False
        weakref.finalize(self, _close_all, self._files)

    @property
    def held(self) -> dict[int, Assignment]:
        """The buckets assigned to this member now."""
        return dict(self._held)

    def rebalance(self) -> None:
        """Take and release buckets, so that the live members share them evenly.

        A bucket is taken only after its former member has released it.
        """
        with self._guard:
            if self._left:
                return
            self._join()
            members = self._living()
            share = {b for b in self._buckets if members[b % len(members)] == self.member}
            for bucket in [b for b in self._held if b not in share]:
                self._release(bucket)
            for bucket in sorted(share - set(self._held)):
                self._try_take(bucket)

    def commit(self, offsets: dict[int, tuple[int, int, int]]) -> dict[int, int]:
        """Make offsets durable; ``offsets`` has generation, offset and epoch by bucket.

        Buckets that are no longer assigned to this member are skipped. Returns what was committed.
        """
        with self._guard:
            committed = {}
            for bucket, (generation, offset, epoch) in offsets.items():
                held = self._held.get(bucket)
                if held is not None and held.generation == generation:
                    write_committed(
                        self.folder, bucket, Committed(offset, generation, epoch), self._fs
                    )
                    committed[bucket] = offset
            return committed

    def committed(self) -> dict[int, Committed]:
        """Return the committed offset of every bucket."""
        return {b: read_committed(self.folder, b, self._fs) for b in self._buckets}

    def leave(self) -> None:
        """Release all buckets immediately, and never take one again."""
        with self._guard:
            self._left = True
            for bucket in list(self._held):
                self._release(bucket)
            name = MEMBER + self.member
            if name in self._files:
                self._fs.remove(self.folder / name)
                self._files.pop(name).free()

    def _join(self) -> None:
        name = MEMBER + self.member
        if name not in self._files:
            with os_errors_as("create", self.folder):
                self._fs.make_folder(self.folder)
            while (file := try_lock(self.folder / name)) is None:
                time.sleep(_PAUSE_SECONDS)  # another member is checking whether this one is alive
            self._files[name] = file

    def _living(self) -> list[str]:
        """Return the members whose file is locked, in a fixed order; clean up after dead ones."""
        living = []
        with os_errors_as("list", self.folder):
            names = self._fs.list(self.folder)
        for name in names:
            if name.startswith(MEMBER):
                member = name.removeprefix(MEMBER)
                if member == self.member or self._is_alive(name):
                    living.append(member)
        return living if self.member in living else sorted([*living, self.member])

    def _is_alive(self, name: str) -> bool:
        try:
            file = try_lock(self.folder / name, create=False)
        except FileNotFoundError:
            return False
        if file is None:
            return True
        self._fs.remove(self.folder / name)
        file.free()
        return False

    def _try_take(self, bucket: int) -> None:
        name = f"bucket_{bucket}.lock"
        file = try_lock(self.folder / name)
        if file is None:
            return
        try:
            with os_errors_as("clean up", self.folder):
                self._fs.remove_drafts(self.folder, of=f"bucket_{bucket}.json")
            last = read_committed(self.folder, bucket, self._fs)
            taken = Committed(last.offset, last.generation + 1, last.epoch)
            write_committed(self.folder, bucket, taken, self._fs)
        except BaseException:
            file.free()
            raise
        self._files[name] = file
        self._held[bucket] = Assignment(taken.generation, taken.offset, taken.epoch)

    def _release(self, bucket: int) -> None:
        del self._held[bucket]
        self._files.pop(f"bucket_{bucket}.lock").free()


def write_committed(folder: Path, bucket: int, committed: Committed, fs: FileSystem) -> None:
    """Make an offset durable; the caller holds the group's lock on the bucket."""
    path = folder / f"bucket_{bucket}.json"
    try:
        fs.write_file(path, msgspec.json.encode(committed))
    except OSError as exc:
        raise StorageError(f"cannot commit to {path}: {exc.strerror or exc}") from exc


def try_lock(path: Path, *, create: bool = True) -> LockedFile | None:
    """Return a locked file, None if another process holds it or it was removed meanwhile."""
    try:
        file = LockedFile(path, os.O_RDWR | (os.O_CREAT if create else 0))
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StorageError(
            f"cannot open the group's file {path}: {exc.strerror}; fix the cause and retry"
        ) from exc
    try:
        file.lock()
        if os.path.samestat(os.fstat(file.fd), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as exc:
        file.free()
        raise StorageError(
            f"cannot lock the group's file {path}: {exc.strerror}; fix the cause and retry"
        ) from exc
    file.free()
    return None


def _close_all(files: dict[str, LockedFile]) -> None:
    for file in files.values():
        file.free()
    files.clear()
