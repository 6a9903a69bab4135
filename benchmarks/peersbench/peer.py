"""What the registry knows of a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peersbench import work
from peersbench.kinds import Kind, Record

Measure = Callable[[Path, Kind, str, list[Record], float], dict[str, float]]


@dataclass(frozen=True)
class Peer:
    """Someone who stores records."""

    name: str
    durability: str
    """What survives power loss at the moment a put returns."""
    measure: Measure
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot be measured here, None if it can."""
    version: Callable[[], str] = lambda: ""


def here(opener: work.Opener) -> Measure:
    """Measured in this process."""

    def measured(
        folder: Path, kind: Kind, name: str, rows: list[Record], seconds: float
    ) -> dict[str, float]:
        return work.measure(opener, folder, kind, name, rows, seconds)

    return measured
