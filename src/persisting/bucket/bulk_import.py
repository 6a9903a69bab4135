"""Taking over rows that other processes wrote as files: what a bulk writer does with a bucket.

Blocking; for an owner that opened the bucket for this and puts nothing else.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from persisting.bucket.bucket import EVOLVING, Bucket
from persisting.bucket.producer_sequences import ANONYMOUS, WRITERS
from persisting.records.arrow import merge
from persisting.table import bulk_write


def prepare(bucket: Bucket, schema: pa.Schema) -> dict[str, Any]:
    """Make the table ready for files of records of ``schema``; what their writers need to know."""
    with bucket.emptied(), bucket.table_turn:
        table = bucket.table
        table.create(merge(table.view.schema, schema, EVOLVING))
        bucket.adopt_table()
        bucket.know(table.view.schema)
        dataset = table.view.dataset
        assert dataset is not None
        return {"version": dataset.version, "columns": bulk_write.fingerprint(dataset)}


def has(bucket: Bucket, writer: str, number: int) -> bool:
    """Whether a writer's rows of that number, or later ones, are stored."""
    return bucket.writers.has((writer, number))


def adopt(
    bucket: Bucket,
    fragments: list[dict[str, Any]],
    columns: list[dict[str, Any]],
    writer: str,
    number: int,
    *,
    replace: bool = False,
) -> int:
    """Store the rows of fragments once per (writer, number); how many were new.

    ``columns`` are the columns that they were written for, one description or several.
    """
    with bucket.emptied(), bucket.table_turn:
        if has(bucket, writer, number):
            return 0
        view = bucket.table.view
        changes = bool(fragments or view.rows)
        if not changes and (not replace or writer.startswith(ANONYMOUS)):
            return 0  # else the mark is kept: others may put before the overwriting is repeated
        bucket.writers.remember([(writer, number)])
        last = view.arrival(view.end - 1) if view.rows else 0
        bulk_write.commit_files(
            bucket.table,
            bucket.fs,
            fragments,
            columns,
            max(last, time.time_ns() // 1000),
            {WRITERS: bucket.writers.encode()},
            replace=f"{writer}/{number}" if replace and changes else None,
        )
        bucket.adopt_table()
    bucket.upkeep.look()
    return sum(fragment["physical_rows"] for fragment in fragments)
