"""Import rows that other processes wrote as files of the table.

Blocking; for an owner that opened the bucket for this and puts nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.producer_sequences import ANONYMOUS, WRITERS
from persisting.records import Rules
from persisting.records.arrow import merge
from persisting.table import bulk_write

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket


def prepare(bucket: Bucket, schema: pa.Schema) -> dict[str, Any]:
    """Prepare the table for files with records of ``schema``; return what their writers need."""
    with bucket.quiesced(), bucket.table_writer.lock:
        table = bucket.table
        table.create(merge(table.view.schema, schema, Rules(evolving=True)))
        bucket.publish_table()
        bucket.merge_table_schema(table.view.schema)
        dataset = table.view.dataset
        assert dataset is not None
        return {"version": dataset.version, "columns": bulk_write.fingerprint(dataset)}


def has(bucket: Bucket, writer: str, number: int) -> bool:
    """Whether a producer's rows of that number, or later ones, are stored."""
    return bucket.producers.has((writer, number))


def adopt(
    bucket: Bucket,
    fragments: list[dict[str, Any]],
    columns: list[dict[str, Any]],
    writer: str,
    number: int,
    *,
    replace: bool = False,
) -> int:
    """Store the rows of fragments once per (writer, number); return how many were stored.

    ``columns`` describes the columns that the fragments were written for.
    """
    with bucket.quiesced(), bucket.table_writer.lock:
        if has(bucket, writer, number):
            return 0
        view = bucket.table.view
        changes = bool(fragments or view.rows)
        if not changes and (not replace or writer.startswith(ANONYMOUS)):
            return 0
        # An overwrite is remembered even if nothing changes: a retry must not remove what others
        # have put since.
        bucket.producers.remember([(writer, number)])
        last_arrival = view.arrival(view.end - 1) if view.rows else 0
        bulk_write.commit_files(
            bucket.table,
            bucket.fs,
            fragments,
            columns,
            max(last_arrival, time.time_ns() // 1000),
            {WRITERS: bucket.producers.encode()},
            replace=f"{writer}/{number}" if replace and changes else None,
        )
        bucket.publish_table()
    bucket.maintenance.schedule_if_needed()
    return sum(fragment["physical_rows"] for fragment in fragments)
