"""How this process reaches the object stores of a cluster's topics.

Credentials never travel in messages. Every node and every client has its own: those that it passed
to ``serve``, ``write_queue`` or ``read_queue``, else those of its environment.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from persisting import store_address
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress

QUICK_SECONDS = 3.0
"""How long a question to a store may take that a node asks before it opens a bucket."""

_remembered: dict[StoreAddress, StorageOptions] = {}
_guard = threading.Lock()


def remember(storage_path: str, storage_options: Mapping[str, Any] | None) -> None:
    """Reach the topics at an address with these options from now on, in this process."""
    if storage_options is not None:
        options = StorageOptions(storage_options)
        with _guard:
            _remembered[store_address.parse(storage_path)] = options


def options_for(topic: StoreAddress) -> StorageOptions:
    """Return the options for a topic: those that were remembered, else the environment's."""
    with _guard:
        known = _remembered.get(topic.parent)
    return known if known is not None else StorageOptions()


def topic_store(topic: StoreAddress, options: StorageOptions | None = None) -> ObjectStore:
    """Return the store of a topic. No request is made."""
    return open_store(topic, options_for(topic) if options is None else options)


def quick_store(store: ObjectStore) -> ObjectStore:
    """Return the same store with short timeouts, for reads whose answer a caller waits for."""
    seconds = f"{QUICK_SECONDS:g}s"
    given = {"timeout": seconds, "connect_timeout": seconds, **store.options.for_lance}
    return open_store(store.address, StorageOptions(given), retry_seconds=QUICK_SECONDS)
