"""Import rows that other processes wrote as files of the table.

Blocking. Puts wait for the end of an import: the rows that are buffered have their offsets, so they
are flushed first, and the imported rows get the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persisting.bucket.delays import NO_DELAYS
from persisting.bucket.producer_sequences import ANONYMOUS, WRITERS, ProducerSequences
from persisting.bucket.schema_state import EVOLVING
from persisting.errors import StorageError
from persisting.records.arrow import merge
from persisting.table import bulk_write, files
from persisting.table.table import Table

if TYPE_CHECKING:
    from persisting.bucket.bucket import Bucket


def prepare(bucket: Bucket, schema: pa.Schema) -> dict[str, Any]:
    """Prepare the table for files with records of ``schema``; return what their writers need."""
    view = bucket.table.view
    if view.dataset is not None and merge(view.schema, schema, EVOLVING).equals(view.schema):
        return state_of(view.dataset)
    with bucket.bypass.quiesced(), bucket.table_writer.exclusive() as table:
        table.create(merge(table.view.schema, schema, EVOLVING))
        bucket.table_writer.publish()
        bucket.bypass.merge_table_schema(table.view.schema)
        return state_of(table.view.dataset)


def state_of(dataset: Any) -> dict[str, Any]:
    """Return what writers of files need to know of a version of the table."""
    return {"version": dataset.version, "columns": bulk_write.fingerprint(dataset)}


def has(bucket: Bucket, writer: str, number: int) -> bool:
    """Whether a producer's rows of that number, or later ones, are stored."""
    return bucket.puts.producers.has((writer, number))


def check(bucket: Bucket, fragments: list[dict[str, Any]], columns: list[dict[str, Any]]) -> None:
    """Raise if the files of fragments cannot be adopted, or are not what is said of them."""
    bucket.lifecycle.check_writable()
    # Maintenance must not remove a file after its check.
    with bucket.table_writer.exclusive() as table:
        table.bulk_files.check(fragments)
        bulk_write.check_content(table, fragments, columns)


def adopt(
    bucket: Bucket,
    fragments: list[dict[str, Any]],
    columns: list[dict[str, Any]],
    writer: str,
    number: int,
    *,
    replace: bool = False,
    schema: pa.Schema | None = None,
) -> int:
    """Store the rows of fragments once per (writer, number); return how many were stored.

    ``columns`` describes the columns that the fragments were written for. If the table has other
    ones now, the rows are written again, given the ``schema`` of the records; else this raises.
    """
    rewritten: list[dict[str, Any]] | None = None
    try:
        while True:
            with bucket.bypass.quiesced(), bucket.table_writer.exclusive() as table:
                if has(bucket, writer, number) or _is_stored(table, fragments):
                    return 0
                if schema is None or bulk_write.changed_field(table, columns) is None:
                    stored = _commit(
                        bucket, rewritten or fragments, columns, writer, number, replace
                    )
                    break
            # Outside of the context, so that puts do not wait for it.
            state = prepare(bucket, schema)
            columns = [state["columns"]]
            if rewritten is not None:
                bucket.maintenance.remove_files(_names(rewritten), never_named=True)
                rewritten = None
            place = bucket.table.bulk_files
            rewritten = bulk_write.rewrite_files(place, state["version"], fragments, schema)
    except BaseException:
        if rewritten is not None:  # the next attempt rewrites the files again
            with suppress(StorageError, OSError):
                bucket.maintenance.remove_files(_names(rewritten))
        raise
    if rewritten is not None:
        bucket.maintenance.remove_files(_names(fragments), never_named=True)
    bucket.maintenance.schedule_if_needed()
    return stored


def _is_stored(table: Table, fragments: list[dict[str, Any]]) -> bool:
    """Whether the table already holds the files of fragments."""
    return not _names(fragments).isdisjoint(files.data_paths(table.view.fragments))


def _commit(
    bucket: Bucket,
    fragments: list[dict[str, Any]],
    columns: list[dict[str, Any]],
    writer: str,
    number: int,
    replace: bool,
) -> int:
    """Commit fragments with the number of the write. Call with the table, and nothing buffered."""
    view = bucket.table.view
    changes = bool(fragments or view.rows)
    is_repeated = not writer.startswith(ANONYMOUS) or writer in bucket.puts.producers.kept
    if not changes and not (replace and is_repeated):
        return 0
    replaced = replace and changes
    # An overwrite is remembered even if nothing changes: a retry must not remove what others
    # have put since.
    producers = bucket.puts.producers.copy()
    producers.remember([(writer, number)])
    last_arrival = view.arrival(view.end - 1) if view.rows else 0
    arrival = max(last_arrival, time.time_ns() // 1000)
    beside = {
        WRITERS: producers.encode(),
        **(NO_DELAYS if replaced else bucket.delays.table_property()),
    }
    with _stored_after_all(bucket.table, writer, number):
        bulk_write.commit_files(
            bucket.table,
            fragments,
            columns,
            arrival,
            beside,
            replace=f"{writer}/{number}" if replaced else None,
        )
    bucket.bypass.imported(arrival, (writer, number), replaced=replaced)
    return sum(fragment["physical_rows"] for fragment in fragments)


@contextmanager
def _stored_after_all(table: Table, writer: str, number: int) -> Iterator[None]:
    """Let a commit pass that raises although it has landed: its answer was lost."""
    try:
        yield
    except StorageError as failure:
        try:
            resolved = table.committer.resolve()
        except StorageError as exc:
            raise StorageError(
                f"it is unknown whether the rows are stored in {table.root}: {failure}; and then: "
                f"{exc}. Repeat the write only with the same writeId, which stores them once"
            ) from None
        known = ProducerSequences(table.properties.get(WRITERS))
        if not resolved or not known.has((writer, number)):
            raise


def _names(fragments: list[dict[str, Any]]) -> set[str]:
    return {file["path"] for fragment in fragments for file in fragment["files"]}
