"""Facts about topics in an object store: which topics there are. Blocking."""

from __future__ import annotations

from persisting import store_address
from persisting.bucket.store_ownership import is_removed
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.topic import spec as topics


def topic_names(root: str) -> list[str]:
    """Return the names of the topics below an address."""
    store = open_store(store_address.parse(root), StorageOptions(None))
    return [name for name in store.folders() if _is_topic(store, name)]


def _is_topic(store: ObjectStore, name: str) -> bool:
    found = store.get(f"{name}/{topics.FILE}")
    return found is not None and not is_removed(found.data)
