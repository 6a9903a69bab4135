"""Model of retention: the offsets at which a bucket may start."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

CLOCKS_AGREE = 0.001
"""Seconds by which two readings of one clock may differ due to rounding."""


@dataclass
class RetentionModel:
    """The limits of a round, and what keeps rows in spite of them."""

    rows: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    waits_for: Collection[str] = ()
    asked: int | None = None
    """The limit of an explicit retain() whose outcome is unknown."""
    now: float = 0.0
    """The latest time of day since the last observation."""
    put_at: dict[str, float] = field(default_factory=dict)
    """When each record was about to be put for the first time."""
    joining: bool = False
    """Whether a group may have joined since the last observation: retention may have run before."""
    joined: bool = False
    committed: dict[int, int] = field(default_factory=dict)
    """The highest offsets that the group may have committed."""
    tags: dict[str, dict[int, int]] = field(default_factory=dict)
    """First offsets of the tags that have existed since the last observation."""

    def begin_round(self, options: dict[str, Any]) -> None:
        self.rows = options.get("retention_rows")
        self.bytes = options.get("retention_bytes")
        self.seconds = options.get("retention_seconds")
        self.waits_for = options.get("retention_waits_for", ())
        self.now = 0.0

    @property
    def automatic(self) -> bool:
        return (self.rows, self.bytes, self.seconds) != (None, None, None)

    def may_commit(self, offsets: dict[int, int]) -> None:
        for bucket, offset in offsets.items():
            self.committed[bucket] = max(offset, self.committed.get(bucket, 0))

    def allows(self, bucket: int, start: int, end: int, gone: Iterable[str]) -> bool:
        """Return whether rows up to ``end`` may start at ``start`` after the rows ``gone`` were
        dropped."""
        if start > min(self._held_from(bucket), end):
            return False
        return (
            any(rows is not None and end - start >= rows for rows in (self.rows, self.asked))
            or (self.bytes is not None and end > start)
            or (self.seconds is not None and all(map(self._is_old, gone)))
        )

    def _is_old(self, name: str) -> bool:
        assert self.seconds is not None
        return self.put_at[name] + self.seconds <= self.now + CLOCKS_AGREE

    def _held_from(self, bucket: int) -> float:
        """Return the offset from which all rows must be kept."""
        held = [inf]
        if "groups" in self.waits_for and self.joined:
            held.append(self.committed.get(bucket, 0))
        if "tags" in self.waits_for:
            held += [starts[bucket] for starts in self.tags.values() if bucket in starts]
        return min(held)
