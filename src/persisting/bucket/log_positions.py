"""How far a log is acknowledged and synced: a small file beside its segments, for readers.

The owner rewrites it in place after every group commit and never syncs it. It counts only while the
owner lives, which the log's lock shows: a dead owner's log is read to its last complete entry.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from persisting.lock import LockedFile

log = logging.getLogger("persisting")

LOCK_FILE = ".lock"
POSITIONS_FILE = "positions"
POSITIONS = struct.Struct("<QQ")
"""The acknowledged and the synced sequence, rewritten in place and never synced."""


class Positions(NamedTuple):
    """The last sequence that is acknowledged, and the last one that survives power loss."""

    acknowledged: int
    synced: int


def publisher(fd: int) -> Callable[[int, int], None]:
    """Return a callable that publishes both sequences in an open file."""

    def publish(acknowledged: int, synced: int) -> None:
        try:
            os.pwrite(fd, POSITIONS.pack(acknowledged, synced), 0)
        except OSError as exc:  # the records are stored; readers see them after the next flush
            log.warning("cannot tell readers of other processes about new records: %s", exc)

    return publish


def read_positions(fd: int) -> Positions:
    """Return what the owner published last.

    Read until two reads agree: the owner may be writing, and a read may then see a part of it.
    """
    data = os.pread(fd, POSITIONS.size, 0)
    while (again := os.pread(fd, POSITIONS.size, 0)) != data:
        data = again
    return Positions(*POSITIONS.unpack(data)) if len(data) == POSITIONS.size else Positions(0, 0)


def is_alive(log: Path) -> bool:
    """Whether a process holds the lock of a log. Takes a shared lock for a very short time."""
    try:
        file = LockedFile(log / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        file.lock(fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        file.free()
    return False
