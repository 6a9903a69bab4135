"""Owning a bucket of a stored topic briefly, outside of any event loop.

Opening a bucket first replays what a crashed owner left in its log, so that the table then holds
everything that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting import fs as filesystem
from persisting.bucket.handover_notes import note_names
from persisting.bucket.log_note import has_log, is_logged
from persisting.bucket.owner_log import remove_unused
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import BucketLocked, StorageError
from persisting.lock import briefly, owner_of
from persisting.store_address import StoreAddress
from persisting.topic.groups import FOLDER as GROUPS_FOLDER
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig, bucket_folder

if TYPE_CHECKING:  # most processes own nothing
    from persisting.backends.table_backend import TableBackend


def open_owner(folder: Path, config: TopicConfig, bucket: int) -> TableBackend:
    """Open a bucket for a short change, without a log.

    Raises :class:`BucketLocked` if the bucket is owned; waits for another short-lived owner. What
    was handed over to the bucket is in it when this returns, else :class:`StorageError` is raised.
    """
    from persisting.backends.lance import LanceBackend
    from persisting.backends.persisting import PersistingBackend

    cls = get_backend_class(config.backend)
    if not issubclass(cls, (LanceBackend, PersistingBackend)):
        raise StorageError(
            f"topic {config.topic!r} has the backend {config.backend!r}, which has no table"
        )
    options: dict[str, Any] = dict(config.options)
    if issubclass(cls, PersistingBackend):
        options |= {"enable_wal": False, "enable_metrics": False}
    with briefly():
        return cls(
            bucket_id=bucket,
            storage_path=str(bucket_folder(folder, bucket)),
            batch_size=config.batch_size,
            **options
            | {"schema_path": folder / SCHEMA_FILE, "groups_path": folder / GROUPS_FOLDER},
        )


@contextmanager
def owned(place: Path | StoreAddress, config: TopicConfig, bucket: int) -> Iterator[TableBackend]:
    """Own a bucket for the duration of a block; everything put in it is durable at its end.

    ``place`` is the folder of the topic, or its address in an object store, whose credentials are
    in the environment.
    """
    if isinstance(place, StoreAddress):
        from persisting.store.object_store import open_store
        from persisting.store.storage_options import StorageOptions
        from persisting.topic.store_owner import StoreOwner

        with StoreOwner(open_store(place, StorageOptions()), config) as owner:
            yield owner.own(bucket)
        return
    backend = open_owner(place, config, bucket)
    try:
        yield backend
    finally:
        backend.close_now()


def recover(folder: Path, config: TopicConfig, bucket: int) -> None:
    """Replay the log of a crashed owner into the table, if nobody owns the bucket, and adopt the
    files that were handed over to it.

    Needed by those who read only tables, and to repair a table that power loss has torn.
    """
    place = bucket_folder(folder, bucket)
    if is_logged(place) or note_names(place, filesystem.current()):
        _own_briefly(folder, config, bucket)


def recover_own_log(folder: Path, config: TopicConfig, bucket: int) -> None:
    """Like :func:`recover`, but for a log in the bucket's own folder: readers do not follow those.

    Version 0.4.0 had a log in each bucket; a backend that is used alone still has one.
    """
    if has_log(bucket_folder(folder, bucket)):
        _own_briefly(folder, config, bucket)


def _own_briefly(folder: Path, config: TopicConfig, bucket: int) -> None:
    if owner_of(bucket_folder(folder, bucket)) is None:
        try:
            with owned(folder, config, bucket):
                pass
        except BucketLocked:
            return  # its new owner replays the log
        remove_unused(folder, filesystem.current())
