"""Reads a range of a bucket as Arrow batches, for one task of Spark or one export.

It holds one batch in memory at a time, whatever the size of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import laid_out, typed
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.records.arrow import no_columns
from persisting.records.field_names import ARRIVAL
from persisting.store_address import is_store_address, parse
from persisting.table import layout
from persisting.table.lance_errors import indices_of, translated
from persisting.table.search import check_condition, check_where, enclosed, matching
from persisting.table.table import Table
from persisting.table.view import TableView
from persisting.topic import spec as topics
from persisting.topic.nested_fields import Leaf, assembled, needed_leaves
from persisting.topic.spec import bucket_folder, bucket_name

BUCKET, OFFSET, TIME = "_bucket", "_offset", "_time"
METADATA = pa.schema(
    [(BUCKET, pa.int32()), (OFFSET, pa.int64()), (TIME, pa.timestamp("us", tz="UTC"))]
)
"""Columns that can be added to a record: its place, and when it arrived."""

_BATCH_ROWS = 65536
_BATCH_BYTES = 16 * 1024 * 1024
_MOST_UNINDEXED = 50_000
"""Rows that an index lacks, and that are read to look something up nevertheless."""
_ASSUMED_BYTES = 32
"""A rough size of a value in memory, if nothing better is known."""


@dataclass(frozen=True)
class Slice:
    """A range of offsets of one bucket."""

    folder: str
    """The path of the topic's folder, or its address in an object store."""
    bucket: int
    start: int
    end: int
    epoch: int = 0
    version: int | None = None


@dataclass(frozen=True)
class Filter:
    """A condition, and the fields that it may name."""

    where: str
    known: pa.Schema

    @classmethod
    def checked(cls, where: str, known: pa.Schema) -> Filter:
        """Return the filter, or raise if the condition is invalid for these fields."""
        check_where(where)
        check_condition(layout.physical_schema(typed(known), None), where)
        return cls(where, known)


@dataclass(frozen=True)
class Hint:
    """A condition that the caller evaluates again, so that it may be ignored, and its fields."""

    where: str
    fields: pa.Schema

    @classmethod
    def checked(cls, where: str, fields: pa.Schema) -> Hint:
        """Return the hint, or raise if Lance cannot evaluate it."""
        check_condition(layout.physical_schema(fields, None), where)
        return cls(where, fields)

    def fits(self, view: TableView) -> bool:
        """Whether a table has all fields of the condition, with the types that it was made for."""
        return all(
            f.name in view.schema.names and view.schema.field(f.name).type == f.type
            for f in self.fields
        )


def read(
    part: Slice,
    names: Sequence[str],
    where: Filter | None = None,
    *,
    metadata: bool = False,
    hint: Hint | None = None,
    shape: pa.Schema | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice with those fields of ``names`` that the bucket has.

    With ``metadata`` the columns of :data:`METADATA` follow the fields. Rows that do not match
    ``hint`` may be left out. Fields of structs that ``shape`` does not have may be left out.
    Without fields, metadata and condition nothing is read.
    """
    view, wanted = _view(part), list(names)
    if hint is not None and not hint.fits(view):
        hint = None
    if where is not None:
        return _filtered(view, part, wanted, where, hint, metadata=metadata)
    if hint is not None:
        return _filtered_by_lance(view, part, wanted, hint.where, metadata=metadata)
    if not wanted and not metadata:
        return _without_fields(part)
    narrow = {} if shape is None or metadata else _narrow_structs(view, shape)
    if narrow:
        return _narrowed(view, part, wanted, narrow)
    return _plain(view, part, wanted, metadata=metadata)


def read_matching(view: TableView, part: Slice, where: Filter) -> Iterator[pa.RecordBatch]:
    """Like :func:`read` with metadata and without fields, but of a view that is already open."""
    return _filtered(view, part, [], where, None, metadata=True)


def look_up(
    part: Slice,
    names: Sequence[str],
    hint: Hint,
    *,
    most_rows: int,
    most_bytes: int,
    metadata: bool = False,
    table: Table | None = None,
) -> list[pa.RecordBatch] | None:
    """Return the rows that :func:`read` would with a hint, if an index finds them and they are few;
    None otherwise. Rows that are large on disk are not read to find out. ``table`` is the bucket's
    table if it is already open.

    Also None if the table is not the one that the slice was made for: reading it will raise.
    """
    try:
        view = _view(part, table)
    except StorageError:
        return None
    if view.dataset is None or not hint.fits(view):
        return None
    dataset: Any = view.dataset
    fields = set(hint.fields.names)
    indexed = [i.num_rows_indexed for i in indices_of(dataset) if fields & {*i.field_names}]
    if view.rows - max(indexed, default=0) > _MOST_UNINDEXED:
        return None
    with translated("read", dataset.uri):
        plan = dataset.scanner(columns=[], with_row_id=True, filter=enclosed(hint.where))
        if "ScalarIndexQuery" not in plan.explain_plan():
            return None
        count = dataset.count_rows(enclosed(hint.where))
    if not count:
        return []
    stored = sum(size.nbytes for size in view.sizes) // max(1, view.rows)
    if count > most_rows or count * stored > most_bytes:
        return None
    found = list(_filtered_by_lance(view, part, list(names), hint.where, metadata=metadata))
    return found if sum(batch.nbytes for batch in found) <= most_bytes else None


def read_snapshot(
    snapshot: Snapshot, bucket: int, first: int, end: int, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Like :func:`read` with metadata, but for offsets ``first`` to ``end`` of a snapshot of a
    bucket, whose last records may not be in the table yet."""
    part = Slice("", bucket, first, min(end, snapshot.persisted))
    if part.start < part.end:
        yield from _plain(snapshot.view, part, list(names), metadata=True)
    first = max(first, snapshot.persisted)
    if first < end:
        fields = [name for name in names if name in snapshot.schema.names]
        times = snapshot.buffered_arrivals()[first - snapshot.persisted :]
        for batch in snapshot.batches(first, end - first, fields):
            arrivals = pa.array(times[: batch.num_rows]).cast(layout.ARRIVAL_FIELD.type)
            batch = batch.append_column(layout.ARRIVAL_FIELD, arrivals)
            yield _described(batch, bucket, first)
            first, times = first + batch.num_rows, times[batch.num_rows :]


def defaults_of(folder: str | Path) -> Mapping[str, Any]:
    """Return the values of fields that the records of a topic lack."""
    if is_store_address(folder):
        from persisting.store.object_store import open_store
        from persisting.store.storage_options import StorageOptions
        from persisting.topic import store_config  # it loads the owner's side

        config = store_config.load(open_store(parse(str(folder)), StorageOptions()))
    else:
        config = topics.load_any(Path(folder), filesystem.current())
    defaults: Mapping[str, Any] = config.options.get("schema_defaults", {}) if config else {}
    return defaults


def divided(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array, pa.Array, pa.Array]:
    """Split a batch with metadata into fields, and the columns of buckets, offsets and times.

    It goes by position, since records may have fields of the same names.
    """
    count = batch.num_columns - len(METADATA)
    fields = batch.select(list(range(count)))
    bucket, offset, time = (batch.column(place) for place in range(count, batch.num_columns))
    return fields, bucket, offset, time


def _view(part: Slice, table: Table | None = None) -> TableView:
    table = table or _table(part)
    if part.version is not None:
        return table.at(part.version)
    table.refresh()
    if _differs(table, part):
        raise StorageError(
            f"bucket {part.bucket} of {part.folder} was overwritten, or restored to an older "
            "version, since the read was planned; load it again"
        )
    view = table.view
    if part.start < view.start:
        raise OffsetOutOfRange(
            f"offsets {part.start} to {view.start} of bucket {part.bucket} of {part.folder} were "
            "removed by retention while they were read"
        )
    return view


def _differs(table: Table, part: Slice) -> bool:
    """Whether rows of a part are others now, since the bucket was restored or overwritten."""
    restores = table.restores
    since = restores[part.epoch :]
    return len(restores) < part.epoch or any(restored.end < part.end for restored in since)


def _table(part: Slice) -> Table:
    if is_store_address(part.folder):  # credentials are in the environment
        from persisting.store.storage_options import StorageOptions
        from persisting.table.store_table import StoreTable

        return StoreTable(parse(part.folder) / bucket_name(part.bucket), StorageOptions())
    return Table(bucket_folder(Path(part.folder), part.bucket), filesystem.current())


def _without_fields(part: Slice) -> Iterator[pa.RecordBatch]:
    for first in range(part.start, part.end, _BATCH_ROWS):
        yield no_columns(min(_BATCH_ROWS, part.end - first))


def _plain(
    view: TableView, part: Slice, names: list[str], *, metadata: bool
) -> Iterator[pa.RecordBatch]:
    offset = part.start
    count = part.end - part.start
    for batch in view.batches(offset, count, names, rows=_rows(view, names), arrival=metadata):
        yield _described(batch, part.bucket, offset) if metadata else batch
        offset += batch.num_rows


def _narrow_structs(view: TableView, shape: pa.Schema) -> dict[str, list[Leaf]]:
    """Return the needed fields of those structs that are not needed whole, by name."""
    found = {}
    for asked in shape:
        if asked.name in view.schema.names and pa.types.is_struct(asked.type):
            leaves = needed_leaves(view.schema.field(asked.name), asked.type)
            if leaves is not None:
                found[asked.name] = leaves
    return found


def _narrowed(
    view: TableView, part: Slice, names: list[str], narrow: dict[str, list[Leaf]]
) -> Iterator[pa.RecordBatch]:
    """Yield rows with parts of structs, as long as these say which structs are null."""
    dataset: Any = view.dataset
    wanted = pa.schema([f for f in view.schema if f.name in names])
    stored = [f for f in wanted if f.name in dataset.schema.names]
    columns = {f.name: f"`{f.name}`" for f in stored if f.name not in narrow}
    leaves = [leaf for parts in narrow.values() for leaf in parts]
    offset = part.start
    with translated("read", dataset.uri):
        for batch in dataset.scanner(
            columns=columns | {leaf.expression: leaf.expression for leaf in leaves},
            offset=part.start - view.start,
            limit=part.end - part.start,
            batch_size=_rows(view, names),
            scan_in_order=True,
        ).to_batches():
            read = {name: batch.column(name) for name in batch.schema.names}
            structs = {name: assembled(parts, read) for name, parts in narrow.items()}
            if any(struct is None for struct in structs.values()):
                break
            plain = pa.schema([f for f in wanted if f.name not in narrow])
            records = layout.to_logical(batch, plain)
            for name, struct in structs.items():
                records = records.append_column(name, struct)
            yield records
            offset += batch.num_rows
    if offset < part.end:
        yield from _plain(view, replace(part, start=offset), names, metadata=False)


def _rows(view: TableView, names: list[str]) -> int:
    """Return how many rows make a batch of some MiB; a consumer may hold several batches."""
    wide = sum(
        f.type.list_size * 8 if pa.types.is_fixed_size_list(f.type) else _ASSUMED_BYTES
        for f in view.schema
        if f.name in names
    )
    stored = sum(size.nbytes for size in view.sizes) // max(1, view.rows)
    return max(64, min(_BATCH_ROWS, _BATCH_BYTES // max(1, wide, stored)))


def _described(batch: pa.RecordBatch, bucket: int, first: int) -> pa.RecordBatch:
    offsets = np.arange(first, first + batch.num_rows, dtype=np.int64)
    return _with_metadata(batch, bucket, offsets)


def _with_metadata(batch: pa.RecordBatch, bucket: int, offsets: np.ndarray) -> pa.RecordBatch:
    times = batch.column(ARRIVAL)
    batch = batch.drop_columns([ARRIVAL])
    batch = batch.append_column(BUCKET, pa.array(np.full(len(offsets), bucket, np.int32)))
    batch = batch.append_column(OFFSET, pa.array(offsets))
    return batch.append_column(TIME, times)


def _filtered(
    view: TableView,
    part: Slice,
    names: list[str],
    where: Filter,
    hint: Hint | None,
    *,
    metadata: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that match; Lance filters if its table has all fields of the topic."""
    if view.schema.equals(where.known) and not any(pa.types.is_null(f.type) for f in view.schema):
        text = where.where if hint is None else f"{enclosed(where.where)} AND {hint.where}"
        yield from _filtered_by_lance(view, part, names, text, metadata=metadata)
        return
    offset = part.start
    count = part.end - part.start
    defaults = defaults_of(part.folder)
    for batch in view.batches(offset, count, rows=_rows(view, view.schema.names), arrival=True):
        rows = pa.Table.from_batches([batch.drop_columns([ARRIVAL])])
        inside = laid_out(rows, where.known, offset, batch.column(ARRIVAL), defaults)
        offsets = np.array(matching(inside, where.where, None), dtype=np.int64)
        matched = batch.take(pa.array(offsets - offset))
        if metadata:
            matched = _with_metadata(matched, part.bucket, offsets)
        yield matched
        offset += batch.num_rows


def _filtered_by_lance(
    view: TableView, part: Slice, names: list[str], where: str, *, metadata: bool
) -> Iterator[pa.RecordBatch]:
    """Let Lance filter the fragments that the slice touches; drop rows outside of the slice."""
    wanted = pa.schema([f for f in view.schema if f.name in names])
    dataset: Any = view.dataset
    columns = [name for name in wanted.names if name in dataset.schema.names]
    if metadata or not columns:
        columns = [*columns, ARRIVAL]
    firsts: dict[int, int] = {}
    first = view.start
    for fragment, size in zip(view.fragments, view.sizes, strict=True):
        if first < part.end and first + size.rows > part.start:
            firsts[fragment.id] = first
        first += size.rows
    if not firsts:
        return
    ids = np.array(sorted(firsts), np.uint64)
    offsets_of_ids = np.array([firsts[int(number)] for number in ids], np.int64)
    for batch in _matching(view, list(firsts), columns, where, _rows(view, wanted.names)):
        addresses = batch.column("_rowaddr").to_numpy()
        places = np.searchsorted(ids, addresses >> np.uint64(32))
        within = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        offsets = offsets_of_ids[places] + within
        keep = (offsets >= part.start) & (offsets < part.end)
        batch = batch.filter(pa.array(keep))
        records = layout.to_logical(batch, wanted)
        if metadata:
            records = records.append_column(layout.ARRIVAL_FIELD, batch.column(ARRIVAL))
            records = _with_metadata(records, part.bucket, offsets[keep])
        yield records


def _matching(
    view: TableView, fragments: list[int], columns: list[str], where: str, rows: int
) -> Iterator[pa.RecordBatch]:
    dataset: Any = view.dataset
    with translated("read", dataset.uri):
        yield from dataset.scanner(
            columns=columns,
            filter=enclosed(where),
            fragments=[dataset.get_fragment(number) for number in fragments],
            batch_size=rows,
            with_row_address=True,
            scan_in_order=True,
        ).to_batches()
