"""Keeps fields of vectors searchable: refuses records that would turn their vectors into lists.

The first records show what a field is for, so lists of different lengths are never refused while
there are few. Once a field has a vector index, or the topic has enough vectors of one length, the
field keeps them. Logs are replayed without this check: what was acknowledged stays.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import Loosened, Prepared
from persisting.bucket.readonly_bucket import ReadonlyBucket
from persisting.bucket.snapshot import Snapshot
from persisting.errors import SchemaError, StorageError
from persisting.options import BucketOptions
from persisting.records import Rules
from persisting.table import indexes

ENOUGH = 100
"""This many vectors of one length are not an accident."""


def check_vectors(bucket: Bucket, prepared: Prepared) -> None:
    """Raise if records would turn the vectors of a field that keeps them into lists.

    Blocking: it may read the field in all buckets of the topic.
    """
    for change in prepared.loosened:
        if _keeps_vectors(bucket, change):
            raise SchemaError(
                f"field {change.name!r} holds vectors of {change.size} floats, got {change.other}: "
                f"vector search needs one length. Put a vector of {change.size} floats or None, "
                'use another field, or open with the option vectors="widen" to turn the field into '
                "lists for good"
            )


def _keeps_vectors(bucket: Bucket, change: Loosened) -> bool:
    state = bucket.schema_state
    if change.name in state.vector_fields or change.vectors >= ENOUGH:
        return True
    own = bucket.options.storage_path
    folders = [own]
    if bucket.options.schema_path is not None:
        folders += sorted(set(own.parent.glob("bucket_*")) - {own})
    count = change.vectors
    for folder in folders:
        count += _vectors_in(bucket, folder, change.name, ENOUGH - count)
        if count >= ENOUGH or _has_index(bucket, folder, change.name):
            with state.lock:
                state.vector_fields.add(change.name)
            return True
    return False


def _vectors_in(bucket: Bucket, folder: Path, name: str, limit: int) -> int:
    """Count the records of a bucket of the topic that have a value in a field, up to a limit."""
    if folder == bucket.options.storage_path:
        return _count(bucket.snapshot(), name, limit)
    options = BucketOptions(
        bucket_id=bucket.number,
        storage_path=folder,
        read_only=True,
        schema_path=bucket.options.schema_path,
    )
    with suppress(StorageError):  # a damaged bucket does not stop puts to the others
        return _count(ReadonlyBucket(options, Rules()).snapshot(), name, limit)
    return 0


def _count(snapshot: Snapshot, name: str, limit: int) -> int:
    count = 0
    if name in snapshot.schema.names:
        for batch in snapshot.batches(snapshot.start, None, [name]):
            count += batch.num_rows - batch.column(name).null_count
            if count >= limit:
                break
    return count


def _has_index(bucket: Bucket, folder: Path, name: str) -> bool:
    with suppress(StorageError):
        specs = indexes.load(folder, bucket.fs)
        return any(spec.column == name and spec.family == "vector" for spec in specs)
    return False
