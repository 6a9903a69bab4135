"""Which node a bucket should live on: rendezvous hashing over the nodes that host buckets.

Every node computes the same order from the names alone; when one comes or goes, only the buckets
that it gains or loses move. The order is a wish: the lock on the bucket decides who owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def ranked(bucket: str, nodes: Iterable[str]) -> list[str]:
    """The nodes in the order in which they should own ``bucket``."""
    return sorted(nodes, key=lambda node: _weight(bucket, node), reverse=True)


def _weight(bucket: str, node: str) -> bytes:
    return blake2b(f"{bucket}\0{node}".encode(), digest_size=8).digest()


def bucket_key(place: str, bucket: int) -> str:
    """A name for a bucket that Pulsing accepts, whatever the topic is called."""
    digest = blake2b(place.encode(), digest_size=12).hexdigest()
    return f"persisting/b{digest}/{bucket}"
