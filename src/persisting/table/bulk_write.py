"""Bulk writes: other processes write data files, and the owner commits all of them together.

A worker writes the columns of the records, without their arrival time. The owner, which holds the
table, adds that column to each fragment as a small file of its own, and commits all fragments as
one version. So arrival times never fall, whatever order the workers wrote in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError
from persisting.records.arrow_casts import convert
from persisting.table import layout
from persisting.table.alignment import aligned
from persisting.table.bulk_files import BulkFiles, FilesUnfit
from persisting.table.properties import RESTORES, START, Restored, encode_restores
from persisting.table.table import Table

_REWRITE_ROWS = 8192


def fingerprint(dataset: Any) -> dict[str, list[Any]]:
    """The columns that a worker's files refer to: name to [field id, type]."""
    return {
        field.name(): [field.id(), str(dataset.schema.field(field.name()).type)]
        for field in dataset.lance_schema.fields()
    }


def write_files(
    place: BulkFiles, version: int, batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> list[dict[str, Any]]:
    """Write records of ``schema`` as data files, durably; return their fragments.

    Runs in a worker, which does not own the bucket: nothing refers to the files until the commit.
    """
    import lance

    with place.translated("write to"):
        dataset = place.open(version)
        target = pa.schema(
            [
                f
                for f in dataset.schema
                if f.name in schema.names and f.name != layout.ARRIVAL_FIELD.name
            ]
        )
        reader = pa.RecordBatchReader.from_batches(target, _physical(batches, target))
        written = lance.fragment.write_fragments(
            reader, dataset, mode="append", storage_options=place.storage_options
        )
        fragments = [fragment.to_json() for fragment in written]
        place.finish(fragments)
    return fragments


def rewrite_files(
    place: BulkFiles, version: int, fragments: Iterable[dict[str, Any]], schema: pa.Schema
) -> list[dict[str, Any]]:
    """Write the rows of workers' fragments again, for columns that have changed since."""
    written = []
    for fragment in fragments:
        (file,) = fragment["files"]
        with place.translated("read files of"):
            reader = place.reader(file["path"])
            # A field that had no type yet has no column in the file.
            stored = reader.metadata().schema.names
            rows = reader.read_all(batch_size=_REWRITE_ROWS).to_batches()
        columns = pa.schema([field for field in schema if field.name in stored])
        written += write_files(place, version, rows, columns)
    return written


def changed_field(table: Table, written_for: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a column that is not what workers wrote for, None if all are."""
    now = {} if table.view.dataset is None else fingerprint(table.view.dataset)
    fields = [field for columns in written_for for field in columns.items()]
    return next((name for name, field in fields if now.get(name) != list(field)), None)


def check_content(
    table: Table, fragments: Iterable[dict[str, Any]], written_for: Iterable[Mapping[str, Any]]
) -> None:
    """Raise if files do not hold the rows and columns that their fragments name.

    It would not be noticed before rows are read: Lance commits what it is given.
    """
    columns = {name: list(field) for known in written_for for name, field in known.items()}
    changed = changed_field(table, [columns]) is not None
    dataset = table.view.dataset
    now, leaves = ({}, {}) if dataset is None else (fingerprint(dataset), _leaf_ids(dataset))
    for fragment in fragments:
        if len(fragment["files"]) != 1 or fragment.get("deletion_file") or fragment.get("overlays"):
            raise FilesUnfit(f"a fragment for {table.root} is not one plain data file")
        (file,) = fragment["files"]
        rows, fields = _stored(table.bulk_files, file["path"])
        if rows != fragment["physical_rows"]:
            raise FilesUnfit(
                f"{file['path']} of {table.root} has {rows} rows, not {fragment['physical_rows']}"
            )
        for field in fields:
            # A worker whose version was cleaned up wrote for the columns of a later one.
            types = {known[field.name][1] for known in (columns, now) if field.name in known}
            if field.name not in columns or str(field.type) not in types:
                raise FilesUnfit(
                    f"{file['path']} of {table.root} has a column {field.name!r} of type "
                    f"{field.type}, for which the table was not prepared"
                )
        ids = [leaf for field in fields for leaf in leaves.get(field.name, [])]
        # If the columns have changed since, the rows are written again, by the names of the fields.
        if not changed and (file["fields"] != ids or file["column_indices"] != [*range(len(ids))]):
            raise FilesUnfit(f"{file['path']} of {table.root} is given other columns than it has")


def _stored(place: BulkFiles, name: str) -> tuple[int, pa.Schema]:
    """Return how many rows a data file has, and its columns."""
    with place.translated(f"read {name} of"):
        found = place.reader(name).metadata()
        return int(found.num_rows), found.schema


def _leaf_ids(dataset: Any) -> dict[str, list[int]]:
    """Return by column the ids of the fields whose values are in the files."""
    return {field.name(): list(_leaves(field)) for field in dataset.lance_schema.fields()}


def _leaves(field: Any) -> Iterator[int]:
    children = field.children()
    if not children:
        yield field.id()
    for child in children:
        yield from _leaves(child)


def commit_files(
    table: Table,
    fragments: list[dict[str, Any]],
    written_for: Iterable[Mapping[str, Any]],
    arrival: int,
    beside: Mapping[str, str],
    *,
    replace: str | None = None,
) -> None:
    """Commit workers' fragments as the next rows, with properties ``beside`` them.

    ``written_for`` are the fingerprints of the columns that the workers wrote for. With
    ``replace``, the token of an overwrite, the rows replace all others.
    """
    changed = changed_field(table, written_for)
    if changed is not None:
        raise StorageError(
            f"field {changed!r} of {table.root} changed while the rows were written; run the "
            "write again"
        )
    place = table.bulk_files
    place.check(fragments)
    with place.removed_on_failure(lambda: table.committer.undo_pending):
        _commit_timed(table, place, fragments, arrival, beside, replace)


def _commit_timed(
    table: Table,
    place: BulkFiles,
    fragments: list[dict[str, Any]],
    arrival: int,
    beside: Mapping[str, str],
    replace: str | None,
) -> None:
    """Add the arrival time to fragments, and commit them."""
    import lance
    from lance import LanceOperation

    arrival_id = fingerprint(table.view.dataset)[layout.ARRIVAL_FIELD.name][0]
    with place.translated("write to"):
        timed = place.with_arrivals(fragments, arrival_id, arrival)
    ready = [lance.fragment.FragmentMetadata.from_json(json.dumps(f)) for f in timed]
    if replace is None:
        table.committer.commit("append to", LanceOperation.Append(ready), beside)
    else:
        restores = encode_restores([*table.restores, Restored(0, replace)])
        gone = [fragment.id for fragment in table.view.fragments]
        operation = LanceOperation.Update(removed_fragment_ids=gone, new_fragments=ready)
        table.committer.commit("overwrite", operation, {**beside, START: "0", RESTORES: restores})


def _physical(batches: Iterable[pa.RecordBatch], target: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = [aligned(convert(batch.column(field.name), field.type)) for field in target]
        yield pa.RecordBatch.from_arrays(columns, schema=target)
