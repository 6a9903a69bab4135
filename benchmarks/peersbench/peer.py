"""A system to measure, as the registry lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peersbench import workload
from peersbench.record_kinds import Kind, Record

Measure = Callable[[Path, Kind, str, list[Record], float], dict[str, float]]


@dataclass(frozen=True)
class Peer:
    """A system that stores records."""

    name: str
    durability: str
    """What survives power loss when a put returns."""
    measure: Measure
    missing: Callable[[], str | None] = lambda: None
    """Returns why it cannot be measured on this machine, or None."""
    version: Callable[[], str] = lambda: ""
    ours: bool = False


def in_process(opener: workload.Opener) -> Measure:
    """Return the measurement of a store within this process."""

    def measured(
        folder: Path, kind: Kind, name: str, rows: list[Record], seconds: float
    ) -> dict[str, float]:
        return workload.measure(opener, folder, kind, name, rows, seconds)

    return measured
