"""Whether a store obeys the conditions of ``create`` and ``swap``.

One owner per bucket, exactly-once flushes and consumer groups rest on them. Some servers that speak
S3 ignore a condition and answer success: two owners would destroy each other's records there.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress

from persisting.store.object_store import (
    ObjectChanged,
    ObjectExists,
    ObjectStore,
    StoreError,
)

FOLDER = "probe"

_obeying: set[tuple[object, object]] = set()
"""Buckets and the options they were reached with, probed once in a process."""
_guard = threading.Lock()


def is_probed(store: ObjectStore) -> bool:
    """Whether this process knows that the store obeys conditions."""
    with _guard:
        return _key(store) in _obeying


def probe(store: ObjectStore) -> None:
    """Raise :class:`StoreError` unless the store obeys conditions. 7 requests, once a process."""
    if is_probed(store):
        return
    name = f"{FOLDER}/{secrets.token_hex(16)}"
    try:
        _probe(store, name)
    except BaseException:
        with suppress(StoreError):  # the first error says more
            store.delete([name])
        raise
    store.delete([name])
    with _guard:
        _obeying.add(_key(store))


def _key(store: ObjectStore) -> tuple[object, object]:
    return (store.address.scheme, store.address.bucket), store.options


def _probe(store: ObjectStore, name: str) -> None:
    first = store.create(name, secrets.token_bytes(16))
    try:
        store.create(name, secrets.token_bytes(16))
    except ObjectExists:
        pass
    else:
        raise _refused(store, "If-None-Match", "an object that existed was created again")
    store.swap(name, secrets.token_bytes(16), first)
    try:
        store.swap(name, secrets.token_bytes(16), first)
    except ObjectChanged:
        pass
    else:
        raise _refused(store, "If-Match", "an object that had changed was replaced")


def _refused(store: ObjectStore, condition: str, seen: str) -> StoreError:
    return StoreError(
        f"the server of {store.address} ignores the condition {condition} ({seen}). A topic there "
        "could have two owners, which would lose records. Use a store that obeys If-None-Match and "
        "If-Match on PUT: Amazon S3, Google Cloud Storage, Azure Blob Storage, SeaweedFS"
    )
