"""Offsets of a stream and how a trigger's share is divided: pure functions.

An offset is a dict as Spark keeps it in its checkpoint, ``{"0": 1200, "1": 900}``; buckets that
were restored to an older version have their epoch in it, ``{"0": 1200, "epochs": {"0": 1}}``, and
topics that have an id have that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EPOCHS = "epochs"
TOPIC = "topic"


class Place(NamedTuple):
    """Where a stream is in a bucket."""

    offset: int
    epoch: int = 0


def encode(places: Mapping[int, Place], topic: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {str(b): place.offset for b, place in sorted(places.items())}
    epochs = {str(b): place.epoch for b, place in sorted(places.items()) if place.epoch}
    return found | ({EPOCHS: epochs} if epochs else {}) | ({TOPIC: topic} if topic else {})


def topic_of(offset: Mapping[str, Any]) -> str:
    """The id of the topic that an offset is of, empty if it had none."""
    return str(offset.get(TOPIC, ""))


def decode(offset: Mapping[str, Any]) -> dict[int, Place]:
    epochs = offset.get(EPOCHS, {})
    return {
        int(bucket): Place(int(value), int(epochs.get(bucket, 0)))
        for bucket, value in offset.items()
        if bucket not in (EPOCHS, TOPIC)
    }


def shares(lags: Mapping[int, int], most: int | None) -> dict[int, int]:
    """How many rows to take of each bucket: all, or ``most`` in all, divided evenly.

    What a bucket does not need goes to the others; if anything is there, something is taken.
    """
    if most is None or sum(lags.values()) <= most:
        return dict(lags)
    left, taken = most, {}
    waiting = sorted(lags, key=lambda bucket: lags[bucket])
    for index, bucket in enumerate(waiting):
        share = min(lags[bucket], -(-left // (len(waiting) - index)))
        taken[bucket] = share
        left -= share
    return taken
