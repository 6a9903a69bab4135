"""PersistingBackend: the Lance table behind a write-ahead log, with an evolving schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from persisting import metrics
from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.log_note import has_log
from persisting.bucket.log_recovery import recover
from persisting.bucket.owner_log import OwnerLog, recover_noted
from persisting.bucket.readonly_bucket import ReadonlyBucket
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.bucket.store_ownership import PATIENCE_SECONDS
from persisting.errors import InvalidArgument, SchemaError, WALError
from persisting.options import MIB, PersistingOptions, storage_folder, take_known
from persisting.records import EMPTY, RecordEncoder, Rules
from persisting.records.values import vector_item
from persisting.store.object_store import ObjectStore
from persisting.store_address import StoreAddress
from persisting.table.store_table import LoadedAhead


class PersistingBackend(TableBackend):
    """Enhanced storage backend with enterprise features.

    It does everything that :class:`~persisting.queue.LanceBackend` does. In addition, with
    ``enable_wal`` an acknowledged record survives a crash (see ``wal_sync_interval``), records may
    bring new fields and wider types, and Prometheus metrics are exported.
    """

    def __init__(
        self,
        bucket_id: int,
        storage_path: str,
        batch_size: int = 100,
        enable_wal: bool = False,
        compression: str | None = None,
        enable_metrics: bool = False,
        wal_sync_interval: float = 1.0,
        max_wal_size: int = 100 * MIB,
        **kwargs: Any,
    ) -> None:
        """
        Initialize Persisting backend: take the lock, open the table, recover the log. Blocks.

        Parameters
        ----------
        bucket_id : int
            Unique identifier for this bucket.
        storage_path : str
            Folder of the bucket: the table ``data.lance`` and the log ``wal/`` are in it.
        batch_size : int, optional
            Rows per page of streams and transfers (default: 100).
        enable_wal : bool, optional
            Enable Write-Ahead Log (default: False).
        compression : str | None, optional
            Compression algorithm: "zstd", "lz4", "snappy" (default: None).
        enable_metrics : bool, optional
            Enable Prometheus metrics (default: False).
        wal_sync_interval : float, optional
            WAL sync interval in seconds (default: 1.0); 0.0 syncs before every acknowledgement.
        max_wal_size : int, optional
            Maximum WAL file size in bytes (default: 100MB).
        **kwargs
            Further options of :class:`~persisting.options.PersistingOptions`; unknown ones are
            ignored with a warning.
        """
        options = self._options(
            bucket_id=bucket_id,
            storage_path=storage_path,
            batch_size=batch_size,
            enable_wal=enable_wal,
            compression=compression,
            enable_metrics=enable_metrics,
            wal_sync_interval=wal_sync_interval,
            max_wal_size=max_wal_size,
            **kwargs,
        )
        super().__init__(_open(options))

    @classmethod
    def _options(cls, **given: Any) -> PersistingOptions:
        known = take_known(PersistingOptions, given)
        batch_size = given.get("batch_size", 100)
        if isinstance(batch_size, int):
            known.setdefault("flush_threshold", max(1000, batch_size))
        path = given["storage_path"]
        if not isinstance(path, StoreAddress):
            path = storage_folder(path)
        options = PersistingOptions(**known | {"storage_path": path})
        _check_place(options)
        _checked_defaults(options)
        return options

    async def stats(self) -> dict[str, Any]:
        """Get storage statistics, with the state of the log."""
        options, group_commit = self._bucket.options, self._bucket.group_commit
        assert isinstance(options, PersistingOptions)
        return {
            **await super().stats(),
            "wal_enabled": group_commit is not None,
            "wal_size": self._bucket.log_bytes,
            "wal_sync_interval": options.wal_sync_interval,
            "wal_failed": group_commit is not None and group_commit.failed,
            "metrics_enabled": options.enable_metrics,
        }


def new_store_owner_log(
    store: ObjectStore,
    num_buckets: int,
    *,
    passing: bool = False,
    patience: float = PATIENCE_SECONDS,
    takes_notes: bool = True,
    listening_at: str = "",
    on_lost: Callable[[], None] | None = None,
    **options: Any,
) -> StoreOwnerLog:
    """Create the log that the buckets of a topic in an object store share in this process.
    Blocking."""
    checked = PersistingBackend._options(bucket_id=0, storage_path=store.address, **options)
    return StoreOwnerLog(
        store,
        num_buckets,
        checked,
        _rules(checked),
        passing=passing,
        patience=patience,
        takes_notes=takes_notes,
        listening_at=listening_at,
        on_lost=on_lost,
    )


def _check_place(options: PersistingOptions) -> None:
    """Raise for options that do nothing where the bucket is."""
    if not isinstance(options.storage_path, StoreAddress):
        for name in _STORE_ONLY:
            if getattr(options, name) != _default_of(name):
                raise InvalidArgument(
                    f"{name} is an option of topics in an object store, and this one is in a "
                    "folder; leave it out"
                )
        return
    if not options.enable_wal:
        raise InvalidArgument(
            f"{options.storage_path} is in an object store, where every topic has a log: pass "
            "durable=True, or enable_wal=True in backend_options"
        )
    for name in _NOT_IN_STORES:
        if getattr(options, name) != _default_of(name):
            raise InvalidArgument(
                f"{name} is not supported for topics in an object store yet "
                f"({options.storage_path}); leave it out"
            )


_STORE_ONLY = ("linger", "linger_bytes", "lease")
_NOT_IN_STORES = ("read_only",)


def _default_of(name: str) -> Any:
    return next(field.default for field in fields(PersistingOptions) if field.name == name)


def new_owner_log(topic: Path, **options: Any) -> OwnerLog:
    """Create the log that the buckets of a topic share in this process. Blocking."""
    checked = PersistingBackend._options(bucket_id=0, storage_path=topic, **options)
    return OwnerLog(topic, checked, _rules(checked))


def _rules(options: PersistingOptions) -> Rules:
    return Rules(
        evolving=True,
        vector=vector_item(options.vector_type),
        defaults=_checked_defaults(options),
        keep_vectors=options.vectors == "keep",
    )


def _open(options: PersistingOptions) -> Bucket:
    bucket_metrics = metrics.NO_METRICS
    if options.enable_metrics:
        topic = metrics.topic_of(options.storage_path)
        bucket_metrics = metrics.PrometheusMetrics(topic, options.bucket_id)
    if isinstance(options.storage_path, StoreAddress):
        return _open_in_store(options, bucket_metrics)
    owner_log: OwnerLog | None = options.owner_log
    schema = owner_log.schema_state if owner_log is not None else None
    try:
        bucket_type = ReadonlyBucket if options.read_only else Bucket
        bucket = bucket_type(options, _rules(options), bucket_metrics, schema)
    except BaseException:
        bucket_metrics.remove()
        raise
    if not options.read_only:
        try:
            _attach_log(bucket, options)
        except BaseException:
            bucket.abandon()
            bucket_metrics.remove()
            raise
    return bucket


def _open_in_store(options: PersistingOptions, bucket_metrics: metrics.BucketMetrics) -> Bucket:
    owner_log: StoreOwnerLog = options.owner_log
    try:
        address: Any = options.storage_path
        table = LoadedAhead(address, owner_log.store.options)
        ownership = owner_log.own(options.bucket_id, table.begin)
        try:
            schema = owner_log.schema_state
            bucket = StoreBucket(
                options,
                _rules(options),
                owner_log.store,
                ownership,
                schema,
                bucket_metrics,
                owner_log.handovers,
                table.result,
            )
            try:
                owner_log.attach(bucket)
                bucket.check_defaults()
            except BaseException:
                bucket.abandon()
                raise
        except BaseException:
            owner_log.disown(ownership)
            raise
    except BaseException:
        bucket_metrics.remove()
        raise
    return bucket


def _attach_log(bucket: Bucket, options: PersistingOptions) -> None:
    """Recover what earlier owners left in logs, even with ``enable_wal=False``; then keep logging
    if it is enabled."""
    folder = options.storage_path
    has_own = options.enable_wal and options.owner_log is None
    try:
        recover_noted(bucket)
        own = recover(bucket, options.max_wal_size) if has_own or has_log(folder) else None
    except OSError as exc:
        raise WALError(
            f"cannot read or repair the log in {folder}: {exc}; nothing is lost, fix the cause and "
            "open it again"
        ) from exc
    bucket.check_defaults()
    if own is not None and has_own:
        bucket.attach(GroupCommit(own, bucket.schema_state, options))
        return
    if own is not None:
        bucket.flush_job.commit_buffer()
        own.reset()
        own.close()
    if options.enable_wal:
        options.owner_log.attach(bucket)


def _checked_defaults(options: PersistingOptions) -> dict[str, Any]:
    defaults = dict(options.schema_defaults)
    try:
        RecordEncoder(EMPTY, Rules(evolving=True)).take([defaults])
    except SchemaError as exc:
        raise InvalidArgument(f"schema_defaults: {exc}") from exc
    return defaults
