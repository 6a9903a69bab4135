"""Owning a bucket of a stored topic for a moment, outside any event loop.

What a crashed owner left in a log is brought into the table first, so that whoever looks at the
table then sees everything that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persisting.backends.lance import LanceBackend
from persisting.backends.persisting import PersistingBackend
from persisting.backends.table_backend import TableBackend
from persisting.bucket.group_commit import has_log
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import BucketLocked, StorageError
from persisting.lock import briefly, owner_of
from persisting.topic.groups import FOLDER as GROUPS_FOLDER
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig, bucket_folder


def open_owner(folder: Path, config: TopicConfig, bucket: int) -> TableBackend:
    """The bucket, open for a moment of writing without a log.

    Raises :class:`BucketLocked` if it is owned; an owner of a moment is waited for.
    """
    cls = get_backend_class(config.backend)
    if not issubclass(cls, (LanceBackend, PersistingBackend)):
        raise StorageError(
            f"topic {config.topic!r} has the backend {config.backend!r}, which keeps no table"
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
def owned(folder: Path, config: TopicConfig, bucket: int) -> Iterator[TableBackend]:
    """Own a bucket for the length of a block; everything in it is durable at its end."""
    backend = open_owner(folder, config, bucket)
    try:
        yield backend
    finally:
        backend.close_now()


def recover(folder: Path, config: TopicConfig, bucket: int) -> None:
    """Bring what a crashed owner left in its log into the table, if nobody owns the bucket."""
    place = bucket_folder(folder, bucket)
    if has_log(place) and owner_of(place) is None:
        try:
            with owned(folder, config, bucket):
                pass
        except BucketLocked:
            return  # its owner brings it there
