"""Consumer groups: members share a topic's buckets and remember how far they have come.

Everything is a file in ``<topic>/groups/<group>/``, so members need to share the storage and
nothing else:

- ``member-<id>`` is locked by its member while it lives; a free one belongs to a dead member;
- ``bucket_<i>.lock`` is locked by the one member that reads the bucket;
- ``bucket_<i>.json`` holds the committed offset and the generation, which rises with every change
  of hands. Only the holder of the lock writes it, so a commit can never come late.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

import msgspec

from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.topic.names import check_name

FOLDER = "groups"
_MEMBER = "member-"


class Committed(msgspec.Struct, frozen=True):
    """How far a group has come in a bucket."""

    offset: int = 0
    generation: int = 0


def group_folder(topic_folder: Path, group: str) -> Path:
    return topic_folder / FOLDER / check_name("group", group)


def read_committed(folder: Path, bucket: int, fs: FileSystem) -> Committed:
    """The committed offset of a bucket; 0 before the first commit."""
    path = folder / f"bucket_{bucket}.json"
    try:
        return msgspec.json.decode(fs.read(path), type=Committed)
    except FileNotFoundError:
        return Committed()
    except msgspec.DecodeError as exc:
        raise StorageError(
            f"the group's offset file {path} is damaged ({exc}); set it with set_offset and commit"
        ) from exc


class Membership:
    """One member of a group. Blocking; the reader calls it in a thread."""

    def __init__(self, topic_folder: Path, group: str, buckets: list[int], fs: FileSystem) -> None:
        self.group = group
        self.member = uuid.uuid4().hex
        self.folder = group_folder(topic_folder, group)
        self._buckets, self._fs = buckets, fs
        fs.make_folder(self.folder)
        self._own = _try_lock(self.folder / f"{_MEMBER}{self.member}")
        self._held: dict[int, int] = {}
        self._generations: dict[int, int] = {}

    @property
    def held(self) -> list[int]:
        """The buckets that are this member's now."""
        return sorted(self._held)

    def rebalance(self) -> dict[int, int]:
        """Take and leave buckets as the living members demand; offsets of the new ones.

        A bucket is taken only when its former member has let go of it.
        """
        members = self._living()
        share = {b for b in self._buckets if members[b % len(members)] == self.member}
        for bucket in [b for b in self._held if b not in share]:
            self._let_go(bucket)
        taken = {}
        for bucket in sorted(share - set(self._held)):
            fd = _try_lock(self.folder / f"bucket_{bucket}.lock")
            if fd is not None:
                taken[bucket] = self._take(bucket, fd)
        return taken

    def commit(self, offsets: dict[int, int]) -> dict[int, int]:
        """Make offsets durable, those of buckets that are still this member's."""
        done = {}
        for bucket, offset in offsets.items():
            if bucket in self._held:
                self._write(bucket, Committed(offset, self._generations[bucket]))
                done[bucket] = offset
        return done

    def committed(self) -> dict[int, int]:
        """The committed offsets of all buckets of the group."""
        return {b: read_committed(self.folder, b, self._fs).offset for b in self._buckets}

    def leave(self) -> None:
        """Give every bucket back, at once."""
        for bucket in list(self._held):
            self._let_go(bucket)
        own, self._own = self._own, None
        if own is not None:
            self._fs.remove(self.folder / f"{_MEMBER}{self.member}")
            os.close(own)

    def _living(self) -> list[str]:
        """The members whose file is locked, in a fixed order; files of dead ones are removed."""
        living = []
        for name in self._fs.list(self.folder):
            if not name.startswith(_MEMBER):
                continue
            member = name.removeprefix(_MEMBER)
            if member == self.member or self._is_alive(name):
                living.append(member)
        return living

    def _is_alive(self, name: str) -> bool:
        try:
            fd = _try_lock(self.folder / name, create=False)
        except FileNotFoundError:
            return False
        if fd is None:
            return True
        self._fs.remove(self.folder / name)
        os.close(fd)
        return False

    def _take(self, bucket: int, fd: int) -> int:
        try:
            known = read_committed(self.folder, bucket, self._fs)
            self._generations[bucket] = known.generation + 1
            self._write(bucket, Committed(known.offset, known.generation + 1))
        except BaseException:
            os.close(fd)
            raise
        self._held[bucket] = fd
        return known.offset

    def _let_go(self, bucket: int) -> None:
        os.close(self._held.pop(bucket))

    def _write(self, bucket: int, committed: Committed) -> None:
        path = self.folder / f"bucket_{bucket}.json"
        try:
            self._fs.write_file(path, msgspec.json.encode(committed))
        except OSError as exc:
            raise StorageError(f"cannot commit to {path}: {exc.strerror or exc}") from exc


def _try_lock(path: Path, *, create: bool = True) -> int | None:
    """A locked file, None if somebody else holds it."""
    fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
