"""Which node a bucket should live on: rendezvous hashing over the nodes that own buckets.

Every node computes the same order from the names alone; when a node comes or goes, only the
buckets that it gains or loses move. The order is a preference: the lock on the bucket decides who
owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

LANES = 4
"""Endpoints of a bucket. Each answers one call at a time; calls on several lanes share syncs."""


def ranked(bucket: str, nodes: Iterable[str]) -> list[str]:
    """Return the nodes in the order in which they should own ``bucket``."""
    return sorted(nodes, key=lambda node: _weight(bucket, node), reverse=True)


def _weight(bucket: str, node: str) -> bytes:
    return blake2b(f"{bucket}\0{node}".encode(), digest_size=8).digest()


def bucket_key(place: str, bucket: int) -> str:
    """Return a name for a bucket that Pulsing accepts, whatever the topic's name is."""
    digest = blake2b(place.encode(), digest_size=12).hexdigest()
    return f"persisting/b{digest}/{bucket}"


NODE_LANES = 16
"""Endpoints of a node for all its buckets in object stores. They exist from the start: while a
node hangs, Pulsing takes minutes to publish a name, and a take-over would wait for it."""

KEY = "bucket key"
"""The argument of a request to such an endpoint that names the bucket."""


def node_lane_endpoint(lane: int) -> str:
    """Return the endpoint of one lane of a node."""
    return f"persisting/node/{lane}"


def lane_endpoint(key: str, lane: int) -> str:
    """Return the endpoint of one lane of a bucket."""
    return f"{key}/{lane}"
