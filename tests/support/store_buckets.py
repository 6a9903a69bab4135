"""Who owns the buckets of a topic in an object store."""

from __future__ import annotations

from persisting.bucket.store_ownership import FREE, owner_register
from persisting.store.object_store import ObjectStore


def is_free(store: ObjectStore, bucket: int) -> bool:
    """Whether nobody owns a bucket, and its table holds everything that was acknowledged;
    ``store`` is that of the topic."""
    held = owner_register(store, bucket).read()
    return held is None or (held.content.owner, held.content.log) == (FREE, FREE)
