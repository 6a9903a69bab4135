"""Bulk writes: other processes write data files, and the owner commits all of them at once.

A worker writes the columns of the records, without their arrival time. The owner, which holds the
table, adds that column to each fragment as a small file of its own, and commits all fragments as
one version. So arrival times never fall, whatever order the workers wrote in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.records.arrow_casts import convert
from persisting.table import checksums, files, layout
from persisting.table.alignment import aligned
from persisting.table.lance_errors import translated
from persisting.table.properties import RESTORES, START, Restored, encode_restores
from persisting.table.table import Table

_ARRIVAL_SCHEMA = pa.schema([layout.ARRIVAL_FIELD])


def fingerprint(dataset: Any) -> dict[str, list[Any]]:
    """The columns that a worker's files refer to: name to [field id, type]."""
    return {
        field.name(): [field.id(), str(dataset.schema.field(field.name()).type)]
        for field in dataset.lance_schema.fields()
    }


def write_files(
    root: Path, version: int, batches: Iterable[pa.RecordBatch], schema: pa.Schema, fs: FileSystem
) -> list[dict[str, Any]]:
    """Write records of ``schema`` as data files, signed and synced; return their fragments.

    Runs in a worker, without the bucket's lock: nothing refers to the files until the commit.
    """
    import lance

    with translated("write to", root):
        try:
            dataset = lance.dataset(str(root), version=version)
        except (ValueError, OSError):
            # The version was cleaned up. The commit checks that the columns are still the same.
            dataset = lance.dataset(str(root))
        target = pa.schema(
            [
                f
                for f in dataset.schema
                if f.name in schema.names and f.name != layout.ARRIVAL_FIELD.name
            ]
        )
        reader = pa.RecordBatchReader.from_batches(target, _physical(batches, target))
        fragments = [
            f.to_json() for f in lance.fragment.write_fragments(reader, dataset, mode="append")
        ]
        checksums.sign(fs, root, fragments)
        files.sync_data(fs, root, [file["path"] for f in fragments for file in f["files"]])
    return fragments


def commit_files(
    table: Table,
    fs: FileSystem,
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
    import lance
    from lance import LanceOperation

    dataset = table.view.dataset
    now = fingerprint(dataset)
    changed = [
        name
        for columns in written_for
        for name, field in columns.items()
        if now.get(name) != list(field)
    ]
    if changed:
        raise StorageError(
            f"field {changed[0]!r} of {table.root} changed while the rows were written; nothing "
            "was stored, run the write again"
        )
    arrival_id = now[layout.ARRIVAL_FIELD.name][0]
    for fragment in fragments:
        for file in fragment["files"]:
            if not (table.root / files.DATA / file["path"]).exists():
                raise StorageError(
                    f"{file['path']} of {table.root} was removed before it was committed; nothing "
                    "was stored, run the write again"
                )
    with translated("write to", table.root):
        timed = [_with_arrival(table.root, f, arrival_id, arrival) for f in fragments]
        checksums.sign(fs, table.root, _arrival_files(timed))
        for fragment in timed:
            fragment["files"] += fragment.pop("new")["files"]
        if timed:
            files.sync_data(fs, table.root, [f["files"][-1]["path"] for f in timed])
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


def _with_arrival(
    root: Path, fragment: dict[str, Any], field_id: int, arrival: int
) -> dict[str, Any]:
    """Write a file with the arrival time of a fragment's rows; return the fragment with the file
    under ``new``."""
    import lance

    first = fragment["files"][0]
    name = f"{os.urandom(16).hex()}.lance"
    path = root / files.DATA / name
    version = f"{first['file_major_version']}.{first['file_minor_version']}"
    times = pa.array([arrival], layout.ARRIVAL_FIELD.type)
    with lance.file.LanceFileWriter(str(path), _ARRIVAL_SCHEMA, version=version) as writer:
        remaining = fragment["physical_rows"]
        while remaining:
            rows = min(remaining, 65536)
            column = times.take(pa.nulls(rows, pa.int32()).fill_null(0))
            writer.write_batch(pa.record_batch([column], schema=_ARRIVAL_SCHEMA))
            remaining -= rows
    file = {
        **first,
        "path": name,
        "fields": [field_id],
        "column_indices": [0],
        "file_size_bytes": path.stat().st_size,
    }
    return {**fragment, "new": {"files": [file]}}


def _arrival_files(fragments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fragment["new"] for fragment in fragments]
