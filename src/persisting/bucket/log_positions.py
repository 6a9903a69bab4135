"""How far a log is acknowledged and synced: a small file beside its segments, for readers.

The owner rewrites it in place after every group commit and never syncs it. It counts only while the
owner is alive, which the log's lock shows: a dead owner's log is read to its last complete entry.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from pathlib import Path
from typing import NamedTuple

from persisting.fs import PRIVATE_FILE
from persisting.lock import LOCK_FILE, is_locked

log = logging.getLogger("persisting")

POSITIONS_FILE = "positions"
POSITIONS = struct.Struct("<QQ")
"""The acknowledged and the synced sequence, rewritten in place and never synced."""


class Positions(NamedTuple):
    """The last sequence that is acknowledged, and the last one that survives power loss."""

    acknowledged: int
    synced: int


class PositionsFile:
    """The file that tells readers in other processes how far the log is valid."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, PRIVATE_FILE)
        self._acknowledged = self._synced = 0
        # Reentrant: the garbage collector may close this while its thread publishes.
        self._guard = threading.RLock()
        self.publish(0, 0)

    def publish(self, acknowledged: int, synced: int) -> None:
        """Rewrite the file; a position that another thread has already passed does not go back.

        Nothing durable depends on the file, so a failure delays readers and fails no put.
        """
        with self._guard:
            self._acknowledged = max(self._acknowledged, acknowledged)
            self._synced = max(self._synced, synced)
            data = POSITIONS.pack(self._acknowledged, self._synced)
            if self._fd < 0:  # the number may now be another file's
                return
            try:
                os.pwrite(self._fd, data, 0)
            except OSError as exc:
                log.warning("cannot publish the positions of a log to readers: %s", exc)

    def close(self) -> None:
        with self._guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def read_positions(fd: int) -> Positions:
    """Return what the owner published last.

    Read until two reads agree: the owner may be writing, and a read may then see a part of it.
    """
    data = os.pread(fd, POSITIONS.size, 0)
    while (again := os.pread(fd, POSITIONS.size, 0)) != data:
        data = again
    return Positions(*POSITIONS.unpack(data)) if len(data) == POSITIONS.size else Positions(0, 0)


def is_alive(log: Path) -> bool:
    """Whether the owner of a log is alive."""
    return is_locked(log / LOCK_FILE)
