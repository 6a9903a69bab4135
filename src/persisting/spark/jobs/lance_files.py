"""Lance datasets outside of topics, written and read by Spark's tasks.

Each partition is a dataset of its own, in a folder ``<column>=<value>``. Unlike with Parquet, the
dataset also has the column itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from persisting.errors import InvalidArgument
from persisting.fs import remove_all
from persisting.records import EMPTY
from persisting.records.arrow import accept
from persisting.spark.jobs.columns import exact_column
from persisting.spark.jobs.file_formats import is_lance, lance_folders
from persisting.spark.jobs.spark_files import NULL
from persisting.spark.source_options import ROWS_PER_PARTITION
from persisting.spark.types import spark_schema, to_spark
from persisting.table.lance_errors import translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 8192
_DATASET_FOLDERS = ("data", "tree")
"""Folders of a Lance dataset, beside those that begin with ``_``."""
_WRITTEN = "part long, folder string, fragment string"

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def write(
    df: DataFrame,
    root: Path,
    partition_by: Sequence[str],
    vectors: Mapping[str, int],
    *,
    overwrite: bool,
) -> int:
    """Write or append to the datasets at ``root``, each with one commit; return how many rows.

    ``overwrite`` removes everything else at ``root`` once the new datasets are written.
    """
    target = _file_schema(df, vectors)
    before = {} if overwrite else {str(f): _version(f) for f in lance_folders(root)}
    rows = df.sortWithinPartitions(*map(exact_column, partition_by)) if partition_by else df
    task = _write_task(root, target, list(partition_by), before)
    by_folder: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows.mapInArrow(task, _WRITTEN).collect(), key=lambda row: row["part"]):
        by_folder.setdefault(row["folder"], []).append(json.loads(row["fragment"]))
    if not partition_by:
        by_folder.setdefault(str(root), [])
    for folder, fragments in by_folder.items():
        _commit(folder, fragments, target, before.get(folder))
    if overwrite:
        _remove_others(root, {Path(folder) for folder in by_folder})
    return sum(f["physical_rows"] for fragments in by_folder.values() for f in fragments)


def _remove_others(folder: Path, kept: set[Path]) -> None:
    """Remove everything in a folder except the datasets in ``kept``."""
    for entry in list(folder.iterdir()):
        if folder in kept and (entry.name.startswith("_") or entry.name in _DATASET_FOLDERS):
            continue
        if entry in kept or any(entry in path.parents for path in kept):
            _remove_others(entry, kept)
        else:
            remove_all(entry)


def _file_schema(df: DataFrame, vectors: Mapping[str, int]) -> pa.Schema:
    """Return the schema of the files: Spark's, with the declared vectors."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema: pa.Schema = to_arrow_schema(df.schema, timezone="UTC")
    unknown = [name for name in vectors if name not in schema.names]
    if unknown:
        raise InvalidArgument(f"vectors names {unknown[0]!r}, which is not a column")
    fields = []
    for field in schema:
        if field.name in vectors:
            if not pa.types.is_list(field.type) or not pa.types.is_floating(field.type.value_type):
                raise InvalidArgument(
                    f"vectors names {field.name!r}, which is {field.type}, not an array of floats"
                )
            field = field.with_type(pa.list_(field.type.value_type, vectors[field.name]))
        fields.append(field)
    return pa.schema(fields)


def _write_task(
    root: Path, target: pa.Schema, partition_by: list[str], before: Mapping[str, int]
) -> Task:
    """Return the function that writes a partition's rows in an executor and reports fragments."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        part = context.partitionId() if context is not None else 0
        pieces = _split_by_folder(batches, partition_by)
        for folder, group in itertools.groupby(pieces, lambda piece: piece[0]):
            place = str(root / folder) if folder else str(root)
            rows = (batch for _, batch in group)
            fragments = _write_files(place, rows, target, before.get(place))
            yield pa.record_batch(
                [
                    [part] * len(fragments),
                    [place] * len(fragments),
                    [json.dumps(fragment) for fragment in fragments],
                ],
                names=["part", "folder", "fragment"],
            )

    return run


def _write_files(
    place: str, batches: Iterable[pa.RecordBatch], target: pa.Schema, version: int | None
) -> list[dict[str, Any]]:
    import lance
    from lance.fragment import write_fragments

    reader = pa.RecordBatchReader.from_batches(target, (_cast(batch, target) for batch in batches))
    with translated("write to", place):
        if version is None:
            mode = "overwrite" if is_lance(Path(place)) else "create"
            fragments = write_fragments(reader, place, schema=target, mode=mode)
        else:
            dataset = lance.dataset(place, version=version)
            fragments = write_fragments(reader, dataset, mode="append")
    return [fragment.to_json() for fragment in fragments]


def _cast(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in target:
        column = batch.column(field.name)
        if pa.types.is_decimal(field.type):
            # Spark aligns decimals to 8 bytes and Lance needs 16, so copy them.
            column = column.take(pa.array(range(len(column)), pa.int64()))
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _split_by_folder(
    batches: Iterable[pa.RecordBatch], partition_by: list[str]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split batches where the folder changes."""
    for batch in batches:
        if not batch.num_rows:
            continue
        if not partition_by:
            yield "", batch
            continue
        values = zip(*(batch.column(name).to_pylist() for name in partition_by), strict=True)
        start = 0
        for key, run in itertools.groupby(values):
            count = len(list(run))
            yield _folder(partition_by, key), batch.slice(start, count)
            start += count


def _folder(names: list[str], values: tuple[Any, ...]) -> str:
    parts = [
        f"{quote(name, safe='')}={NULL if value is None else quote(str(value), safe='')}"
        for name, value in zip(names, values, strict=True)
    ]
    return "/".join(parts)


def _commit(
    folder: str, fragments: list[dict[str, Any]], target: pa.Schema, version: int | None
) -> None:
    import lance
    from lance import LanceOperation
    from lance.fragment import FragmentMetadata

    ready = [FragmentMetadata.from_json(json.dumps(fragment)) for fragment in fragments]
    with translated("write to", folder):
        if version is None:
            lance.LanceDataset.commit(folder, LanceOperation.Overwrite(target, ready))
        elif ready:
            append = LanceOperation.Append(ready)
            lance.LanceDataset.commit(folder, append, read_version=version)


def _version(folder: Path) -> int:
    import lance

    with translated("open", folder):
        return int(lance.dataset(str(folder)).version)


class DatasetPart(NamedTuple):
    """Fragments of one dataset that one task reads."""

    folder: str
    version: int
    fragments: list[int]


def read(spark: SparkSession, path: Path) -> tuple[DataFrame, dict[str, int]]:
    """Return the rows of all datasets at or below ``path``, and the lengths of their vectors."""
    from pyspark.sql.pandas.types import from_arrow_schema

    folders = lance_folders(path)
    if not folders:
        raise InvalidArgument(f"there is no Lance dataset at or below {path}")
    stored, pieces = EMPTY, []
    for folder in folders:
        schema, parts = _plan_dataset(folder)
        stored = pa.unify_schemas([stored, schema], promote_options="permissive")
        pieces += parts
    target = spark_schema(stored)
    numbers = spark.range(0, len(pieces), 1, max(1, len(pieces)))
    rows = numbers.mapInArrow(_read_task(pieces, target), from_arrow_schema(target))
    return rows, {f.name: f.type.list_size for f in stored if pa.types.is_fixed_size_list(f.type)}


def _plan_dataset(folder: Path) -> tuple[pa.Schema, list[DatasetPart]]:
    import lance

    with translated("open", folder):
        dataset = lance.dataset(str(folder))
        pieces: list[DatasetPart] = []
        room = 0
        for fragment in dataset.get_fragments():
            rows = fragment.metadata.physical_rows
            if rows > room:
                pieces.append(DatasetPart(str(folder), dataset.version, []))
                room = ROWS_PER_PARTITION
            pieces[-1].fragments.append(fragment.fragment_id)
            room -= rows
        return accept(dataset.schema.empty_table(), EMPTY).schema, pieces


def _read_task(pieces: list[DatasetPart], target: pa.Schema) -> Task:
    """Return the function that reads parts of datasets in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                yield from to_spark(_stored_batches(pieces[place]), target)

    return run


def _stored_batches(piece: DatasetPart) -> Iterator[pa.RecordBatch]:
    import lance

    with translated("read", piece.folder):
        dataset = lance.dataset(piece.folder, version=piece.version)
        fragments: list[Any] = [dataset.get_fragment(number) for number in piece.fragments]
        scanner = dataset.scanner(fragments=fragments, batch_size=_BATCH_ROWS, scan_in_order=True)
        for batch in scanner.to_batches():
            yield from accept(batch, EMPTY).to_batches()
