"""What a host needs for topics in object stores.

A host never waits for another owner's lease: it reads the lease, answers that the bucket is owned,
and its clients ask again. So it can answer for all other buckets meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from persisting.bucket.store_ownership import check_free
from persisting.cluster.store_access import quick_store, topic_store
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, InvalidArgument, SchemaError, StorageError
from persisting.store.object_store import ObjectStore, StoreError
from persisting.store.storage_options import StorageOptions
from persisting.topic import store_config
from persisting.topic.address import TopicAddress
from persisting.topic.live_topics import live_in_store
from persisting.topic.spec import TopicConfig

_LOCKED_SECONDS = 0.3
"""How long the answer that a bucket is owned by another is repeated without another check."""

_FAILED_SECONDS = 1.0
"""The same for a store that cannot be reached, or a bucket that cannot be opened."""


class StoreUnavailable(StorageError):
    """This node cannot open a bucket in an object store now; another one may, or this one later."""


class NodeStores:
    """The object stores of a node's topics, and what it has found out about them lately."""

    def __init__(self, options: StorageOptions | None = None) -> None:
        """``options`` are the node's own; None: those of the process, else the environment's."""
        self._options = options
        self._stores: dict[str, tuple[ObjectStore, ObjectStore]] = {}
        self._answers: dict[str, tuple[float, StorageError]] = {}
        """Refusals that are repeated until a point in time."""

    def of(self, place: str) -> ObjectStore:
        """Return the store of a topic."""
        return self._both(place)[0]

    def trouble(self, place: str) -> str:
        """Return why requests for a topic fail at present; empty if none is known to fail."""
        known = self._stores.get(place)
        return "" if known is None else known[0].trouble or known[1].trouble

    def _both(self, place: str) -> tuple[ObjectStore, ObjectStore]:
        address = TopicAddress.parse(place).store
        assert address is not None
        store = topic_store(address, self._options)
        known = self._stores.get(place)
        if known is None or known[0].options != store.options:
            known = self._stores[place] = store, quick_store(store)
        return known

    async def load_config(self, place: str) -> TopicConfig | None:
        """Return the configuration of a topic, or raise :class:`StoreUnavailable`."""
        with self.failures_remembered(place):
            return await in_thread(store_config.load, self._both(place)[1])

    async def check_free(self, place: str, bucket: int) -> None:
        """Return if this node may open a bucket; raise :class:`BucketLocked` if another one owns
        it and its lease has not ended, :class:`StoreUnavailable` if this is unknown."""
        self._repeat(place)
        key = f"{place} {bucket}"
        self._repeat(key)
        store = self._both(place)[1]
        live = live_in_store(store.address)
        if live is not None and live.open_backend(bucket) is not None:
            return
        name = "" if live is None else live.log_name
        with self.failures_remembered(place, bucket):
            try:
                await in_thread(check_free, store, bucket, name)
            except BucketLocked as exc:
                self._answers[key] = time.monotonic() + _LOCKED_SECONDS, exc
                raise

    def _repeat(self, key: str) -> None:
        """Raise the last answer about a topic or a bucket if it is recent."""
        until, refusal = self._answers.get(key, (0.0, None))
        if refusal is not None:
            if time.monotonic() < until:
                raise refusal.with_traceback(None)
            self._answers.pop(key, None)

    @contextmanager
    def failures_remembered(self, place: str, bucket: int | None = None) -> Iterator[None]:
        """Raise failures as :class:`StoreUnavailable`, and repeat them for a short time.

        Calls for other buckets do not wait again for a store that cannot be reached.
        """
        try:
            yield
        except (BucketLocked, StoreUnavailable, InvalidArgument, SchemaError):
            raise
        except StorageError as exc:
            refusal = StoreUnavailable(str(exc))
            key = place if bucket is None or isinstance(exc, StoreError) else f"{place} {bucket}"
            self._answers[key] = time.monotonic() + _FAILED_SECONDS, refusal
            raise refusal from exc
