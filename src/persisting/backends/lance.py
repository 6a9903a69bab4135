"""LanceBackend: a buffer in front of a Lance table."""

from __future__ import annotations

from typing import Any

from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.log_note import is_logged
from persisting.bucket.readonly_bucket import ReadonlyBucket
from persisting.errors import StorageError
from persisting.options import BucketOptions, storage_folder, take_known
from persisting.records import Rules
from persisting.records.values import vector_item


class LanceBackend(TableBackend):
    """Lance-based storage backend for Pulsing queues.

    Records are buffered and become durable with :meth:`flush`, which also runs automatically at
    ``flush_threshold`` records. The first record defines the schema; putting a record that differs
    raises and stores nothing.
    """

    def __init__(
        self,
        bucket_id: int,
        storage_path: str,
        batch_size: int = 100,
        flush_threshold: int = 1000,
        **kwargs: Any,
    ) -> None:
        """
        Initialize Lance backend: take the bucket's lock and open its table. Blocks.

        Parameters
        ----------
        bucket_id : int
            Unique identifier for this bucket.
        storage_path : str
            Folder of the bucket; the table is ``data.lance`` in it.
        batch_size : int, optional
            Rows per page of streams and transfers (default: 100).
        flush_threshold : int, optional
            Number of records before auto-flush (default: 1000).
        **kwargs
            Further options of :class:`~persisting.options.BucketOptions`; unknown ones are ignored
            with a warning. With ``read_only`` also ``schema_defaults``, of a bucket whose owner is
            a ``PersistingBackend``: records that are read from its log need them.
        """
        defaults = kwargs.pop("schema_defaults", None) if kwargs.get("read_only") else None
        options = self._options(
            bucket_id=bucket_id,
            storage_path=storage_path,
            batch_size=batch_size,
            flush_threshold=flush_threshold,
            **kwargs,
        )
        if not options.read_only and is_logged(options.storage_path):
            raise StorageError(
                f"{options.storage_path} holds a write-ahead log with records that may not be in "
                "the table yet; open and close it once with PersistingBackend, then open it here"
            )
        rules = Rules(vector=vector_item(options.vector_type), defaults=defaults)
        bucket_type = ReadonlyBucket if options.read_only else Bucket
        super().__init__(bucket_type(options, rules))

    @classmethod
    def _options(cls, **given: Any) -> BucketOptions:
        known = take_known(BucketOptions, given)
        return BucketOptions(**known | {"storage_path": storage_folder(given["storage_path"])})
