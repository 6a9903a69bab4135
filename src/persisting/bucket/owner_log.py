"""The log of one topic in one process, shared by all buckets that the process owns.

It is a folder below the topic's ``log/``, with a lock that the process holds until it ends. A log
that its owner left behind is read by the next owners of its buckets and never changed; it is
removed once no bucket notes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from persisting import fs as filesystem
from persisting.bucket import log_index, log_note
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.log_positions import POSITIONS_FILE, PositionsFile
from persisting.bucket.log_recovery import Replay
from persisting.bucket.schema_state import SchemaState
from persisting.bucket.shared_schema import SharedSchema
from persisting.errors import StorageError, WALError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import LOCK_FILE, LockedFile, this_process
from persisting.options import PersistingOptions
from persisting.records import Rules
from persisting.wal import Log
from persisting.wal.log import segment_bytes

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket

log = logging.getLogger("persisting")


class OwnerLog:
    """An open log. Buckets of the topic attach to it; all of them share its group commit."""

    def __init__(self, topic: Path, options: PersistingOptions, rules: Rules) -> None:
        """Create the folder and take its lock. Blocking."""
        self.options, self._fs = options, filesystem.current()
        self.process = os.getpid()
        path = options.schema_path
        self.schema_state = SchemaState(rules, SharedSchema(path, self._fs) if path else None)
        logs = topic / log_note.LOGS_FOLDER
        with os_errors_as("create a log in", logs):
            self._fs.make_folder(logs)
            self.folder, self._lock = _new_folder(logs, self._fs)
            try:
                positions = PositionsFile(self.folder / POSITIONS_FILE)
            except BaseException:
                self._lock.free()  # the folder is removed by the next owner
                raise
        size = segment_bytes(options.max_wal_size)
        files = Log(self.folder, self._fs, next_sequence=1, segment_bytes=size)
        self.group_commit = GroupCommit(files, self.schema_state, options, positions.publish)
        self._attached: set[int] = set()
        self._retired = False
        self._guard = threading.Lock()
        self._let_go = weakref.finalize(self, _let_go, files.close, positions, self._lock)

    def attach(self, bucket: Bucket) -> None:
        """Log the records of a bucket from now on; its table holds everything so far."""
        folder = bucket.options.storage_path
        with self._guard:
            if self._retired:
                raise StorageError(f"the log {self.folder} is closed; open the bucket again")
            self._attached.add(bucket.number)
        number = bucket.number
        try:
            log_note.write(folder, self.folder, bucket.number, self._fs)
        except BaseException:
            self._forget(number, folder)
            raise
        bucket.attach(self.group_commit, lambda: self._forget(number, folder))

    def _forget(self, bucket: int, folder: Path) -> None:
        """Detach a bucket whose table has all its records that are here.

        If its note cannot be removed, the log stays until a later owner of the bucket has read it.
        """
        try:
            log_note.clear(folder, self._fs)
        except StorageError as exc:
            log.warning("%s; nothing is lost, the next owner of the bucket removes it", exc)
            return
        try:
            self.group_commit.release()
        except WALError as exc:
            log.warning("%s", exc)
        self._detached(bucket)

    def retire(self) -> None:
        """Close and remove the log once no bucket is attached to it."""
        with self._guard:
            self._retired = True
        self._close_if_unused()

    def _detached(self, bucket: int) -> None:
        with self._guard:
            self._attached.discard(bucket)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._guard:
            if not self._retired or self._attached or not self._let_go.alive:
                return
            self.group_commit.close()
            # While the lock is held: another process could remove the folder otherwise.
            with suppress(OSError):
                _remove(self.folder, self._fs)
            self._let_go()


def _new_folder(logs: Path, fs: FileSystem) -> tuple[Path, LockedFile]:
    """Create a folder for a log, and hold its lock."""
    while True:
        folder = logs / f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        folder.mkdir(mode=filesystem.PRIVATE_FOLDER)
        try:
            lock = LockedFile(folder / LOCK_FILE)
        except FileNotFoundError:
            continue  # another process took it for the empty folder of a dead owner
        try:
            lock.lock()
            if os.path.samestat(os.fstat(lock.fd), os.stat(folder / LOCK_FILE)):
                lock.write_note(this_process())
                fs.sync_folder(folder)
                fs.sync_folder(logs)
                return folder, lock
        except (BlockingIOError, FileNotFoundError):
            pass  # the same
        except BaseException:
            lock.free()
            raise
        lock.free()


def _let_go(close_files: Callable[[], None], positions: PositionsFile, lock: LockedFile) -> None:
    close_files()
    positions.close()
    lock.free()


# Logs of owners that died


def recover_noted(bucket: Bucket) -> None:
    """Bring the records that a dead owner's log holds for a bucket into its table. Blocking.

    Afterwards the bucket needs no log but the one that it attaches to next.
    """
    folder = bucket.options.storage_path
    note = log_note.read(folder, bucket.fs)
    if note is None:
        return
    after = bucket.table.sequence
    index = log_index.index_of(note.folder, bucket.fs)
    index.check(note.bucket, after)
    replay = Replay(bucket, note.folder, after)
    replay.add_blocks(index.blocks(note.bucket, after))
    replay.finish()
    bucket.flush_job.commit_buffer()
    log_note.clear(folder, bucket.fs)
    _remove_if_unused(note.folder, bucket.fs)


def remove_unused(topic: Path, fs: FileSystem) -> None:
    """Remove the logs of dead owners that no bucket of the topic notes. Blocking."""
    logs = topic / log_note.LOGS_FOLDER
    try:
        names = fs.list(logs)
    except OSError:  # there is none, or a later owner removes them
        return
    for name in names:
        if log_note.is_log_name(name):
            _remove_if_unused(logs / name, fs)


def _remove_if_unused(folder: Path, fs: FileSystem) -> None:
    try:
        folder.rmdir()  # its owner died right after it had created the folder
        return
    except OSError:
        pass
    try:
        # Created if it is missing: power loss may undo the removal of all other files.
        lock = LockedFile(folder / LOCK_FILE)
    except OSError:
        return
    try:
        lock.lock()
        if not _is_noted(folder, fs):
            _remove(folder, fs)
            log_index.forget(folder)
    except BlockingIOError:
        return  # its owner is alive
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as exc:
        log.warning("cannot remove the log %s, whose records are in the tables: %s", folder, exc)
    finally:
        lock.free()


def _is_noted(folder: Path, fs: FileSystem) -> bool:
    """Whether a bucket of the topic still needs a log, or would after power loss."""
    buckets = list(folder.parent.parent.glob("bucket_*"))
    for bucket in buckets:
        try:
            note = log_note.read(bucket, fs)
            if note is not None and note.folder == folder:
                return True
        except StorageError:
            return True  # its note is damaged, and may have named this log
    for bucket in buckets:
        # The process that removed a note may have died before it synced the removal.
        fs.sync_folder(bucket)
    return False


def _remove(folder: Path, fs: FileSystem) -> None:
    """Remove a log whose lock is held; the lock file goes last."""
    for name in fs.list(folder):
        if name != LOCK_FILE:
            filesystem.remove_all(folder / name)
    fs.remove(folder / LOCK_FILE)
    folder.rmdir()
