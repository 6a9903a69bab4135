"""Facts about topics in an object store: which topics there are. Blocking."""

from __future__ import annotations

from persisting import store_address
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.topic import spec as topics


def topic_names(root: str) -> list[str]:
    """Return the names of the topics below an address."""
    store = open_store(store_address.parse(root), StorageOptions(None))
    return [name for name in store.folders() if store.get(f"{name}/{topics.FILE}") is not None]
