"""What the keeper of a work group notes every few seconds, for tools that only read files."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from persisting import json_files
from persisting.bucket.group_offsets import WORK_FOLDER
from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.lock import LOCK_FILE, is_locked

FILE = "work.json"


class WorkCounts(msgspec.Struct):
    """How many times each thing has happened since a work group was created."""

    delivered: int = 0
    redelivered: int = 0
    expired: int = 0
    acknowledged: int = 0
    released: int = 0
    dead: int = 0
    redriven: int = 0
    removed: int = 0
    """Unacknowledged records that retention has removed, which it only does if configured to."""


class WorkStatus(WorkCounts, kw_only=True):
    """The numbers of a work group at some point in time."""

    time: float
    """When they were noted, in seconds of Unix time."""
    members: int = 0
    """Members that have asked for records within the last minute."""
    in_flight: int = 0
    """Records that are leased."""
    retrying: int = 0
    """Records that were delivered and wait for their next delivery."""
    dying: int = 0
    """Records whose dead letters are not written yet."""
    unacknowledged: int = 0
    oldest_available: float | None = None
    """Since when the oldest record that is not acknowledged can be delivered, in seconds of Unix
    time: when it was put, or its delay ended, or it was re-driven."""
    breaker_open: bool = False
    """Whether the group delivers slowly because most deliveries failed."""
    dead_letter_error: str | None = None
    kept: bool = False
    """Whether a process keeps the group now; the numbers are at most a few seconds old then."""

    @property
    def oldest_seconds(self) -> float | None:
        """Seconds that the oldest record that is not acknowledged could have been delivered."""
        if self.oldest_available is None:
            return None
        return max(0.0, time.time() - self.oldest_available)


def write_status(group: Path, status: WorkStatus, fs: FileSystem) -> None:
    """Note the numbers in the folder of a group. Blocking."""
    path = group / FILE
    try:
        fs.write_note(path, msgspec.json.encode(status))
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror or exc}") from exc


def read_status(group: Path, fs: FileSystem) -> WorkStatus:
    """Return the numbers of a work group that were noted last. Blocking."""
    path = group / FILE
    try:
        status = json_files.decode(fs.read(path), WorkStatus)
    except (FileNotFoundError, msgspec.DecodeError):  # not noted yet, or lost with the power
        status = WorkStatus(time=0.0)
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror or exc}") from exc
    status.kept = is_locked(group / WORK_FOLDER / LOCK_FILE)
    return status
