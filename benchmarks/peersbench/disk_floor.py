"""The floor: bytes of the same size, written and synced without any system around them."""

from __future__ import annotations

import time
from pathlib import Path

from corebench.disk import synced_writes
from corebench.report import rate

from peersbench.peer import Peer
from peersbench.record_kinds import Kind, Packer, Record
from peersbench.workload import BATCH, CROWD, INGEST, PRODUCERS, SINGLES, WARM_UP, TimeLimited

_RECORDS_PER_SYNC = {INGEST: BATCH, SINGLES: 1, CROWD: PRODUCERS}
"""Waiting producers can share a sync, so a crowd needs one per round of producers."""


def _measured(
    folder: Path, kind: Kind, work: str, rows: list[Record], seconds: float
) -> dict[str, float]:
    packed, size = list(map(Packer(kind).pack, rows[WARM_UP:])), _RECORDS_PER_SYNC[work]
    groups = [packed[start : start + size] for start in range(0, len(packed), size)]
    blobs = TimeLimited(map(b"".join, groups), time.perf_counter() + seconds)
    took = synced_writes(folder, blobs)
    return {work: rate(sum(map(len, groups[: len(blobs.yielded)])), took)}


PEER = Peer("write + fdatasync", "synced, the disk's floor", _measured)
