"""Offsets of a stream, and how a trigger's limit is divided among buckets: pure functions.

Spark stores an offset in its checkpoint as a dict, ``{"0": 1200, "1": 900}``. It also has the epoch
of each bucket that was restored to an older version, ``{"0": 1200, "epochs": {"0": 1}}``, and the
id of the topic, if the topic has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EPOCHS = "epochs"
TOPIC = "topic"


class StreamPlace(NamedTuple):
    """The position of a stream in a bucket."""

    offset: int
    epoch: int = 0


def encode(places: Mapping[int, StreamPlace], topic: str = "") -> dict[str, Any]:
    offset: dict[str, Any] = {str(b): place.offset for b, place in sorted(places.items())}
    epochs = {str(b): place.epoch for b, place in sorted(places.items()) if place.epoch}
    return offset | ({EPOCHS: epochs} if epochs else {}) | ({TOPIC: topic} if topic else {})


def topic_of(offset: Mapping[str, Any]) -> str:
    """Return the id of the topic that an offset belongs to; empty if the topic had none."""
    return str(offset.get(TOPIC, ""))


def decode(offset: Mapping[str, Any]) -> dict[int, StreamPlace]:
    epochs = offset.get(EPOCHS, {})
    return {
        int(bucket): StreamPlace(int(value), int(epochs.get(bucket, 0)))
        for bucket, value in offset.items()
        if bucket not in (EPOCHS, TOPIC)
    }


def divide_limit(lags: Mapping[int, int], most: int | None) -> dict[int, int]:
    """Return how many rows to take from each bucket: all of them, or ``most`` in total.

    The limit is divided evenly, and what a bucket does not need goes to the others. If there are
    any rows, at least one is taken.
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
