"""Consumer groups: members share a topic's buckets and remember how far they have come.

Everything is a file in ``<topic>/groups/<group>/``, so members need to share the storage and
nothing else:

- ``member-<id>`` is locked by its member while it lives; a free one belongs to a dead member;
- ``bucket_<i>.lock`` is locked by the one member that reads the bucket;
- ``bucket_<i>.json`` holds the committed offset and the generation, which rises with every change
  of hands. Only the holder of the lock writes it, so a commit can never come late.
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

from persisting.bucket.group_offsets import Committed, read_committed
from persisting.errors import StorageError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import LockedFile
from persisting.topic.topic_names import check_name

FOLDER = "groups"
MEMBER = "member-"
_PAUSE = 0.001


class Assignment(NamedTuple):
    """A bucket that is a member's: since which generation, and where (in which epoch) it began."""

    generation: int
    start: int
    epoch: int = 0


def group_folder(topic_folder: Path, group: str) -> Path:
    return topic_folder / FOLDER / check_name("group", group)


class Membership:
    """One member of a group, which it joins with the first :meth:`rebalance`.

    Blocking, and safe between threads: a reader whose call was cancelled may call again while the
    cancelled one still runs. A member that is dropped lets go of everything.
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
        """The buckets that are this member's now."""
        return dict(self._held)

    def rebalance(self) -> None:
        """Take and leave buckets as the living members demand.

        A bucket is taken only when its former member has let go of it.
        """
        with self._guard:
            if self._left:
                return
            self._join()
            members = self._living()
            share = {b for b in self._buckets if members[b % len(members)] == self.member}
            for bucket in [b for b in self._held if b not in share]:
                self._let_go(bucket)
            for bucket in sorted(share - set(self._held)):
                self._try_to_take(bucket)

    def commit(self, offsets: dict[int, tuple[int, int, int]]) -> dict[int, int]:
        """Make offsets durable: by bucket, its generation, offset and epoch.

        Those of buckets that are no longer this member's are left out.
        """
        with self._guard:
            done = {}
            for bucket, (generation, offset, epoch) in offsets.items():
                held = self._held.get(bucket)
                if held is not None and held.generation == generation:
                    write_committed(
                        self.folder, bucket, Committed(offset, generation, epoch), self._fs
                    )
                    done[bucket] = offset
            return done

    def committed(self) -> dict[int, Committed]:
        """How far the group has come in all its buckets."""
        return {b: read_committed(self.folder, b, self._fs) for b in self._buckets}

    def leave(self) -> None:
        """Give every bucket back, at once."""
        with self._guard:
            self._left = True
            for bucket in list(self._held):
                self._let_go(bucket)
            name = MEMBER + self.member
            if name in self._files:
                self._fs.remove(self.folder / name)
                self._files.pop(name).free()

    def _join(self) -> None:
        name = MEMBER + self.member
        if name not in self._files:
            with os_errors_as("make", self.folder):
                self._fs.make_folder(self.folder)
            while (file := try_lock(self.folder / name)) is None:
                time.sleep(_PAUSE)  # another member was just looking whether it is alive
            self._files[name] = file

    def _living(self) -> list[str]:
        """The members whose file is locked, in a fixed order; files of dead ones are removed."""
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

    def _try_to_take(self, bucket: int) -> None:
        name = f"bucket_{bucket}.lock"
        file = try_lock(self.folder / name)
        if file is None:
            return
        try:
            known = read_committed(self.folder, bucket, self._fs)
            after = Committed(known.offset, known.generation + 1, known.epoch)
            write_committed(self.folder, bucket, after, self._fs)
        except BaseException:
            file.free()
            raise
        self._files[name] = file
        self._held[bucket] = Assignment(known.generation + 1, known.offset, known.epoch)

    def _let_go(self, bucket: int) -> None:
        del self._held[bucket]
        self._files.pop(f"bucket_{bucket}.lock").free()


def write_committed(folder: Path, bucket: int, committed: Committed, fs: FileSystem) -> None:
    """Make an offset durable; the caller holds the group's lock of the bucket."""
    path = folder / f"bucket_{bucket}.json"
    try:
        fs.write_file(path, msgspec.json.encode(committed))
    except OSError as exc:
        raise StorageError(f"cannot commit to {path}: {exc.strerror or exc}") from exc


def try_lock(path: Path, *, create: bool = True) -> LockedFile | None:
    """A locked file, None if somebody else holds it or it was removed meanwhile."""
    try:
        file = LockedFile(path, os.O_RDWR | (os.O_CREAT if create else 0))
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StorageError(
            f"cannot open the group's file {path}: {exc.strerror}; free the cause and try again"
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
            f"cannot lock the group's file {path}: {exc.strerror}; free the cause and try again"
        ) from exc
    file.free()
    return None


def _close_all(files: dict[str, LockedFile]) -> None:
    for file in files.values():
        file.free()
    files.clear()
