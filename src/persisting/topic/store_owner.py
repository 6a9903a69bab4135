"""Owning buckets of a topic in an object store briefly, outside of any event loop.

Opening a bucket takes it over, fences its table and replays what a dead owner left in its log, so
that the table then holds everything that was acknowledged. All buckets that are owned at the same
time share one lease.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.bucket.store_ownership import PATIENCE_SECONDS
from persisting.errors import BucketLocked, StorageError
from persisting.store.object_store import ObjectStore
from persisting.topic.spec import TopicConfig, bucket_name

log = logging.getLogger("persisting")


class StoreOwner:
    """Owns buckets for one short change. Not thread-safe; leave the context to give them back."""

    def __init__(
        self, store: ObjectStore, config: TopicConfig, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """``store`` is that of the topic; ``seconds`` is how long to wait for another process that
        owns a bucket only briefly."""
        self._store, self._config, self._seconds = store, config, seconds
        self._log: StoreOwnerLog | None = None
        self._open: dict[int, PersistingBackend] = {}

    @property
    def log_name(self) -> str:
        """The log of this ownership; empty if it owns nothing yet."""
        return "" if self._log is None else self._log.name

    @property
    def lost(self) -> str:
        """Why another process has taken over; empty if none is known to have."""
        return "" if self._log is None else self._log.lost

    def look_for_notes(self) -> None:
        """Adopt what is handed over to the owned buckets, in the background."""
        if self._log is not None and self._log.handovers is not None:
            self._log.handovers.called()

    def own(self, bucket: int) -> PersistingBackend:
        """Return a bucket, which is taken over the first time. Blocking.

        Raises :class:`BucketLocked` if a live process has it open; waits for one that needs it only
        briefly, and until the lease of a dead owner expires.
        """
        if bucket in self._open:
            return self._open[bucket]
        try:
            self._open[bucket] = self._opened(bucket)
        except BucketLocked as exc:
            raise self._locked(bucket, exc) from exc
        return self._open[bucket]

    def _opened(self, bucket: int) -> PersistingBackend:
        options: dict[str, Any] = {**self._config.options, "enable_metrics": False}
        size = self._config.batch_size
        if self._log is None:
            count = self._config.num_buckets
            self._log = new_store_owner_log(
                self._store,
                count,
                passing=True,
                patience=self._seconds,
                batch_size=size,
                **options,
            )
        place: Any = self._store.address / bucket_name(bucket)
        return PersistingBackend(
            bucket_id=bucket,
            storage_path=place,
            batch_size=size,
            **options | {"owner_log": self._log},
        )

    def _locked(self, bucket: int, exc: BucketLocked) -> BucketLocked:
        place = self._store.address / bucket_name(bucket)
        return BucketLocked(
            f"cannot open {place}: {exc.summary}",
            owner=exc.owner,
            hint="close the topic there, or make the change in that process",
        )

    def __enter__(self) -> StoreOwner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StorageError as exc:
            if error is None:
                raise
            log.warning("cannot release the buckets of %s: %s", self._store.address, exc)

    def close(self) -> None:
        """Release the buckets; if that fails, others get them once the lease expires."""
        try:
            self._close()
        except StorageError:
            if self._log is not None:
                self._log.abandon()
            raise

    def _close(self) -> None:
        for bucket in list(self._open):
            self._open[bucket].close_now()
            del self._open[bucket]
        if self._log is not None:
            self._log.retire()
