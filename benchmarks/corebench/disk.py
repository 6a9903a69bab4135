"""What the disk alone costs: the floor of every synced put."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from corebench.report import stopwatch


def synced_writes(folder: Path, blobs: Iterable[bytes]) -> float:
    """Return the seconds that it takes to append each blob to a file and sync it."""
    fd = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with stopwatch() as took:
            for blob in blobs:
                os.write(fd, blob)
                os.fdatasync(fd)
        return took()
    finally:
        os.close(fd)
