"""Encoding many records: the fast path must give the same result as the slow path."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from persisting.errors import SchemaError
from persisting.records import EMPTY, RecordEncoder, Rules

STRICT, EVOLVING = Rules(), Rules(evolving=True)


def new_encoder(rules: Rules) -> RecordEncoder:
    return RecordEncoder(EMPTY, rules, defined=False)


def convert_all(encoder: RecordEncoder, records: list[Any]) -> list[dict[str, Any]]:
    rows, after = encoder.take(records)
    return after.to_batch(rows).to_pylist()


def stored(records: list[Any], rules: Rules = EVOLVING) -> list[dict[str, Any]]:
    return convert_all(new_encoder(rules), records)


def test_the_first_record_defines_the_schema() -> None:
    _, encoder = new_encoder(STRICT).take([{"b": 1, "a": "x"}])
    assert encoder.schema == pa.schema([("b", pa.int64()), ("a", pa.string())])


def test_records_of_a_known_shape_keep_the_encoder() -> None:
    _, encoder = new_encoder(STRICT).take([{"a": 1}])
    _, again = encoder.take([{"a": 2}, {"a": None}])
    assert again is encoder


def test_take_changes_nothing_if_it_raises() -> None:
    _, encoder = new_encoder(EVOLVING).take([{"a": 1}])
    with pytest.raises(SchemaError):
        encoder.take([{"a": 2, "new": 1}, {"a": "text"}])
    assert encoder.schema.names == ["a"]


def test_rows_follow_the_order_of_the_schema() -> None:
    assert [list(r) for r in stored([{"a": 1, "b": 2}, {"b": 3, "a": 4}])] == [["a", "b"]] * 2


def test_missing_fields_are_none_if_the_schema_evolves() -> None:
    rows = stored([{"a": 1}, {"b": 2}, {"a": 3, "b": 4}])
    assert rows == [{"a": 1, "b": None}, {"a": None, "b": 2}, {"a": 3, "b": 4}]


def test_the_fast_path_detects_values_that_arrow_would_change() -> None:
    utc = dt.timezone.utc
    pairs: list[tuple[Any, Any]] = [
        (dt.datetime(2024, 1, 1, tzinfo=utc), dt.datetime(2024, 1, 1)),
        ([1, 2], [1, "a"]),
        ([1.5, 2.5], [1.5, True]),
        ({"x": 1}, {"x": "a"}),
        ([{"x": 1}], [{"x": 1.5, "y": object()}]),
        ([[1]], [["a"]]),
        (1, 2**63),
        ("a", "\ud800"),
    ]
    for good, bad in pairs:
        _, encoder = new_encoder(STRICT).take([{"f": good}])
        encoder.take([{"f": good}])
        with pytest.raises(SchemaError, match="f"):
            convert_all(encoder, [{"f": good}, {"f": bad}])


def test_the_fast_path_does_not_drop_unknown_dict_keys() -> None:
    records = [{"f": {"x": 1}}, {"f": {"x": 2}}, {"f": {"x": 3, "y": 4}}, {"f": {"y": 5}}]
    assert stored(records) == [
        {"f": {"x": 1, "y": None}},
        {"f": {"x": 2, "y": None}},
        {"f": {"x": 3, "y": 4}},
        {"f": {"x": None, "y": 5}},
    ]


def test_a_float_without_fraction_is_refused_by_a_strict_int_field() -> None:
    _, encoder = new_encoder(STRICT).take([{"f": 1}])
    with pytest.raises(SchemaError):
        encoder.take([{"f": 1.0}])


def test_the_number_of_remembered_shapes_is_bounded() -> None:
    _, encoder = new_encoder(EVOLVING).take([{f"f{i}": None for i in range(12)}])
    for mask in range(2**12):
        record = {f"f{i}": None for i in range(12) if mask >> i & 1}
        _, encoder = encoder.take([record])
    assert len(encoder._shapes) <= 1024


def test_known_row_accepts_only_flat_complete_records() -> None:
    _, encoder = new_encoder(EVOLVING).take([{"a": 1, "b": "x"}])
    assert encoder.known_row({"a": 5, "b": "y"})
    for other in ({"b": "y", "a": 5}, {"a": 5}, {"a": 5, "b": 5}, {"a": 2**63, "b": ""}, None):
        assert encoder.known_row(other) is None
    assert encoder.known_row({"a": 5, "b": "\ud800"}) is None


def test_known_row_counts_the_bytes_of_text_and_blobs() -> None:
    _, encoder = new_encoder(EVOLVING).take([{"t": "x", "b": b"y"}])
    size = encoder.known_row({"t": "t" * 1000, "b": b"b" * 500})
    assert size is not None
    assert 1500 <= size <= 2000
    wide = encoder.known_row({"t": "漢" * 1000, "b": b""})
    assert wide is not None
    assert wide >= 3000


def test_defaults_fill_missing_fields() -> None:
    rules = Rules(evolving=True, defaults={"age": 0})
    assert stored([{"age": 5}, {"id": 1}, {"id": 2, "age": None}], rules) == [
        {"age": 5, "id": None},
        {"age": 0, "id": 1},
        {"age": None, "id": 2},
    ]
