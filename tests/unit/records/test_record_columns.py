"""Records as Arrow columns: they come back as they were, or are not sent that way."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.bucket.chunk import Prepared, prepare, prepare_columns
from persisting.cluster import wire
from persisting.errors import SchemaError, StorageError
from persisting.records import EMPTY, RecordEncoder, Rules
from persisting.records.record_columns import RecordColumns, columns_of

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.lists(st.integers(), max_size=2),
)
NAMES = st.sampled_from(["a", "b", "c"])


def exactly(value: Any) -> tuple[type, str]:
    """Return a value as something that is equal only to the same value of the same type."""
    return type(value), repr(value)


def all_exactly(records: list[dict[str, Any]]) -> list[dict[str, tuple[type, str]]]:
    return [{name: exactly(value) for name, value in record.items()} for record in records]


@given(st.lists(st.lists(st.dictionaries(NAMES, VALUES), max_size=4), min_size=1, max_size=3))
def test_records_come_back_as_they_were(parts: list[list[dict[str, Any]]]) -> None:
    columns = columns_of(parts)
    if columns is not None:
        divided = columns.divided([len(part) for part in parts])
        assert [all_exactly(c.to_records()) for c in divided] == [all_exactly(p) for p in parts]


@pytest.mark.parametrize(
    "value", [1, -(2**63), 2**63 - 1, 0.5, -0.0, math.inf, True, "", "日\x00", b"\xff", None]
)
def test_plain_values_are_sent_as_columns(value: Any) -> None:
    other = "x" if value is None else value
    records = [{"id": 1, "v": value}, {"id": 2, "v": other}, {"id": 3, "v": None}]
    columns = columns_of([records])
    assert columns is not None
    assert all_exactly(columns.to_records()) == all_exactly(records)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{}],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
        [{"a": 1}, {"a": True}],
        [{"a": 1}, {"a": 1.5}],
        [{"a": None}],
        [{"a": 2**63}],
        [{"a": "\ud800"}],
        [{"a": [1]}],
        [{"a": dt.datetime(2020, 1, 1)}],
        [{1: 1}],
        [["a"]],
    ],
    ids=repr,
)
def test_records_that_are_not_plain_are_not_sent_as_columns(records: list[Any]) -> None:
    assert columns_of([records]) is None


@given(
    st.lists(st.lists(st.dictionaries(NAMES, VALUES), min_size=1, max_size=4), max_size=2),
    st.lists(st.dictionaries(NAMES, VALUES), min_size=1, max_size=4),
)
def test_columns_are_prepared_as_the_records_would_be(
    earlier: list[list[dict[str, Any]]], records: list[dict[str, Any]]
) -> None:
    columns = columns_of([records])
    if columns is None:
        return
    encoder = RecordEncoder(EMPTY, Rules(evolving=True), defined=False)
    for stored in earlier:
        try:
            encoder = prepare(encoder, stored).encoder
        except SchemaError:
            continue
    assert outcome(encoder, columns) == outcome(encoder, records)


def outcome(encoder: RecordEncoder, rows: RecordColumns | list[dict[str, Any]]) -> Any:
    """Return what is stored of some rows, or the error."""
    try:
        if isinstance(rows, RecordColumns):
            return content(prepare_columns(encoder, rows))
        return content(prepare(encoder, rows))
    except SchemaError as exc:
        return str(exc)


def content(prepared: Prepared) -> Any:
    rows = [all_exactly(chunk.batch.to_pylist()) for chunk in prepared.chunks]
    return rows, prepared.encoder.schema, prepared.large


def test_columns_of_many_parts_are_packed_as_one_piece() -> None:
    parts = [
        [{"id": n, "text": f"text {n}"} for n in range(start, start + 50)] for start in (0, 50)
    ]
    packed = wire.pack_lists(parts)
    assert packed is not None
    assert len(packed.pieces) == 1
    unpacked = wire.unpack_columns(packed.pieces, packed.schema)
    assert [part.to_records() for part in unpacked.divided([50, 50])] == parts


@pytest.mark.parametrize("counts", [[50], [50, 51], [-1, 101], ["50", "50"], [50.0, 50.0], []])
def test_counts_that_do_not_match_the_records_are_refused(counts: list[Any]) -> None:
    columns = columns_of([[{"id": n} for n in range(100)]])
    assert columns is not None
    with pytest.raises(StorageError, match="100 records from another process"):
        columns.divided(counts)


def test_large_columns_are_packed_in_pieces_that_fit_messages() -> None:
    records = [{"id": n, "text": "x" * 50_000} for n in range(200)]
    packed = wire.pack_lists([records])
    assert packed is not None
    assert len(packed.pieces) > 1
    assert max(map(len, packed.pieces)) <= wire.MESSAGE_BYTES
    assert wire.unpack_columns(packed.pieces, packed.schema).to_records() == records


def test_few_records_and_arrow_data_are_not_packed_as_columns() -> None:
    assert wire.pack_lists([[{"id": 1}] * 10]) is None
    assert wire.pack_lists([pa.table({"id": range(100)})]) is None


@pytest.mark.parametrize("damage", ["schema", "piece", "offsets", "no pieces"])
def test_damaged_columns_are_refused(damage: str) -> None:
    packed = wire.pack_lists([[{"id": n, "text": "seven c"} for n in range(100)]])
    assert packed is not None
    schema, pieces = packed.schema, packed.pieces
    if damage == "schema":
        schema = schema[:20]
    elif damage == "piece":
        pieces = [pieces[0][:100]]
    elif damage == "offsets":
        offsets = b"".join(n.to_bytes(4, "little") for n in (0, 7, 14))
        assert pieces[0].count(offsets) == 1
        pieces = [pieces[0].replace(offsets, b"\xff\xff\xff\x7f" * 3)]
    else:
        pieces = []
    with pytest.raises(StorageError, match="another process"):
        wire.unpack_columns(pieces, schema)
