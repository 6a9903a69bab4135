"""One owner per bucket: an ``flock`` on a small file that names the owner.

The lock belongs to the open file, so it also fences a second open within one process, and the
kernel releases it when the process ends. A fork shares the open file, so a forked child closes its
copy; otherwise it would hold the lock after its parent has died.

The file also tells the next owner whether the last one left cleanly. After a crash, what Lance
wrote must be synced before it can be trusted, and a broken last commit is a torn write. After a
clean close, the same breakage is damage.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from persisting import json_files
from persisting.errors import BucketLocked, StorageError
from persisting.fs import os_errors_as

LOCK_FILE = ".lock"
IDENTITY: dict[str, Any] = {}
"""Further entries of an owner's note; a cluster node adds its id and address."""

_NOTE_LIMIT = 64 * 1024
_PROBE_WAIT = 0.1
"""Seconds to wait for a lock that may only be a probe by :func:`owner_of`."""
_BRIEF_WAIT = 10.0
"""Seconds to wait for an owner whose note says that it holds the lock only briefly."""
_NOTE_WAIT = 1.0
"""Seconds to wait for a new owner to write its note."""
_PAUSE = 0.01
_NOT_DESCRIBED = ("pid", "host", "clean", "passing", "socket", "unlogged")
_brief: ContextVar[bool] = ContextVar("brief", default=False)
_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


class LockedFile:
    """An open file that can be locked; the lock ends with :meth:`free` or with this process."""

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self._pid = os.getpid()
        with _opening:
            self.fd = os.open(path, flags, 0o600)
            _files.add(self)

    def lock(self, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
        """Take the lock, or raise ``BlockingIOError``."""
        fcntl.flock(self.fd, how)

    def write_note(self, note: dict[str, Any]) -> None:
        """Replace the note in the file, without a sync.

        It is written over the last one: at no moment is there none, whatever fails. What is left of
        a longer one follows in lines of its own, which nobody reads, until it is cut off.
        """
        data = msgspec.json.encode(note) + b"\n"
        if os.pwrite(self.fd, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self.fd, len(data))

    def free(self) -> None:
        """Unlock and close; may be called twice."""
        with _opening:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                try:
                    if os.getpid() == self._pid:
                        # Closing alone is not enough if a forked child has a copy of the file.
                        fcntl.flock(fd, fcntl.LOCK_UN)
                finally:
                    os.close(fd)


_files: weakref.WeakSet[LockedFile] = weakref.WeakSet()
_opening = threading.RLock()
"""Held during a fork, so that no file is open without being listed in ``_files``. Reentrant: a
finalizer may free a file while its thread opens another."""


def _close_copies() -> None:
    """In a forked child, close the copies of its parent's locked files."""
    _opening.release()
    for file in list(_files):
        fd, file.fd = file.fd, -1
        if fd >= 0:
            os.close(fd)


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_copies
)


class BucketLock:
    """The exclusive right to write to one bucket folder."""

    def __init__(self, folder: Path, **owner: Any) -> None:
        """Take the lock, or raise :class:`BucketLocked`; ``owner`` is added to the note."""
        self._path = folder / LOCK_FILE
        self._pid = os.getpid()
        try:
            self._file = LockedFile(self._path)
        except OSError as exc:
            raise StorageError(
                f"cannot open the lock file {self._path}: {exc.strerror}; "
                "check the folder's permissions, or open the bucket with read_only=True"
            ) from exc
        try:
            self._take()
        except OSError as exc:
            note = _read(self._file.fd)
            self._file.free()
            raise BucketLocked(
                f"bucket {folder} is open for writing by {described(note)}",
                owner=note,
                hint=(
                    "close it there, or only read it here: a topic with read_queue, a backend with "
                    "read_only=True"
                ),
            ) from exc
        try:
            self.note = _note_in(os.pread(self._file.fd, _NOTE_LIMIT, 0))
            """The last owner's note; it counts only if that owner left cleanly."""
        except OSError as exc:
            self._file.free()
            raise StorageError(f"cannot read the lock file {self._path}: {exc.strerror}") from exc
        self.left_clean = self.note.get("clean") is True
        self.may_lack_records = not self.left_clean and self.note.get("unlogged") is True
        """Whether the last owner died and may have acknowledged records that are stored nowhere."""
        self._owner = {**this_process(), **owner, **(_noted.get() or {})}
        if self.may_lack_records:  # until that is acted on: this opening may fail before
            self._owner["unlogged"] = True
        self.is_brief = _brief.get()
        """Whether the owner holds the lock only briefly, and acknowledges nothing."""
        if self.is_brief:
            self._owner["passing"] = True
        try:
            self._write({**self._owner, "clean": False})
        except OSError as exc:
            self._file.free()
            raise StorageError(
                f"cannot write the lock file {self._path}: {exc.strerror}; fix the cause and retry"
            ) from exc

    def _take(self) -> None:
        holder, since = None, time.monotonic()
        while True:
            try:
                self._file.lock()
                return
            except BlockingIOError:
                note = _read(self._file.fd)
                if (note.get("pid"), note.get("clean")) != holder:
                    holder, since = (note.get("pid"), note.get("clean")), time.monotonic()
                if time.monotonic() - since > _patience(note):
                    raise
            time.sleep(_PAUSE)

    def release(self, *, clean: bool, **left: Any) -> None:
        """Release the lock; ``clean`` promises that everything in the folder is synced.

        ``left`` is added to the note for the next owner.
        """
        try:
            if clean and os.getpid() == self._pid:
                self._write({**self._owner, **left, "clean": True})
        except OSError as exc:
            raise StorageError(
                f"cannot mark {self._path} as left cleanly: {exc.strerror}; nothing is lost, the "
                "next owner checks the bucket as after a crash"
            ) from exc
        finally:
            self._file.free()

    @property
    def in_place(self) -> bool:
        """Whether the lock file is still in its folder, which may have been removed."""
        try:
            return os.path.samestat(os.fstat(self._file.fd), os.stat(self._path))
        except OSError:
            return False

    def mark_unlogged(self, unlogged: bool) -> None:
        """Note durably whether the owner has acknowledged records that are in no log and not
        flushed, or may do so without another call."""
        if unlogged == self._owner.get("unlogged", False):
            return
        owner = {name: value for name, value in self._owner.items() if name != "unlogged"}
        if unlogged:
            owner["unlogged"] = True
        try:
            self._write({**owner, "clean": False})
        except OSError as exc:
            raise StorageError(
                f"cannot write the lock file {self._path}: {exc.strerror}; fix the cause and retry"
            ) from exc
        self._owner = owner

    def _write(self, note: dict[str, Any]) -> None:
        self._file.write_note(note)
        os.fdatasync(self._file.fd)


def this_process() -> dict[str, Any]:
    """Return what identifies this process in the note of a lock."""
    return {"pid": os.getpid(), "host": socket.gethostname(), **IDENTITY}


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file during a short blocking operation; wait for it if necessary."""
    with os_errors_as("open the lock file", path):
        file = LockedFile(path)
    try:
        with os_errors_as("lock", path):
            file.lock(fcntl.LOCK_EX)
        yield
    finally:
        file.free()


def _patience(note: dict[str, Any]) -> float:
    """How long to wait for the lock if its file holds this note."""
    if note.get("passing"):
        return _BRIEF_WAIT
    # An empty note, or one of an owner that left cleanly, is not from the present owner.
    return _PROBE_WAIT if note.get("pid") and note.get("clean") is False else _NOTE_WAIT


@contextmanager
def briefly() -> Iterator[None]:
    """Mark locks taken in this context as held only briefly: other processes wait for them."""
    token = _brief.set(True)
    try:
        yield
    finally:
        _brief.reset(token)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file. Takes a shared lock for a very short time."""
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


@contextmanager
def noting(**entries: Any) -> Iterator[None]:
    """Add entries to the notes of locks that are taken in this context."""
    token = _noted.set(entries)
    try:
        yield
    finally:
        _noted.reset(token)


def left_note(folder: Path) -> dict[str, Any]:
    """The note that the last owner of a bucket left; empty unless it left cleanly."""
    note = last_note(folder)
    return note if note.get("clean") is True else {}


def last_note(folder: Path) -> dict[str, Any]:
    """The note in a lock file, of the present owner or of the last one."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return _read(fd)
    finally:
        os.close(fd)


def owner_of(folder: Path) -> dict[str, Any] | None:
    """The note of the present owner of a bucket; None if it has none.

    This takes a shared lock for a very short time; a new owner waits for it.
    """
    try:
        file = LockedFile(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StorageError(
            f"cannot read the lock file {folder / LOCK_FILE}: {exc.strerror}"
        ) from exc
    try:
        file.lock(fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(file.fd)
    finally:
        file.free()
    return None


def _read(fd: int) -> dict[str, Any]:
    try:
        return _note_in(os.pread(fd, _NOTE_LIMIT, 0))
    except OSError:
        return {}


def _note_in(data: bytes) -> dict[str, Any]:
    """Return the note in the content of a lock file; empty if there is none."""
    try:
        note = json_files.decode_any(data.partition(b"\n")[0])
    except msgspec.DecodeError:
        return {}
    return note if isinstance(note, dict) else {}


def described(note: dict[str, Any]) -> str:
    """Describe an owner as readable text, by its note."""
    if not note.get("pid"):
        return "an unknown owner"
    extra = "".join(f", {k} {v}" for k, v in note.items() if k not in _NOT_DESCRIBED)
    is_here = note["pid"] == os.getpid() and note.get("host") in (None, socket.gethostname())
    here = " (this process)" if is_here else ""
    return f"process {note['pid']} on {note.get('host', 'an unknown host')}{here}{extra}"
