"""Many records: the fast road must give what the careful one gives."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from persisting.errors import SchemaError
from persisting.records import EMPTY, RecordEncoder, Rules

STRICT, EVOLVING = Rules(), Rules(evolving=True)


def fresh(rules: Rules) -> RecordEncoder:
    return RecordEncoder(EMPTY, rules, defined=False)


def convert_all(shaper: RecordEncoder, records: list[Any]) -> list[dict[str, Any]]:
    rows, after = shaper.take(records)
    return after.to_batch(rows).to_pylist()


def stored(records: list[Any], rules: Rules = EVOLVING) -> list[dict[str, Any]]:
    return convert_all(fresh(rules), records)


def test_the_first_record_defines_the_schema() -> None:
    _, shaper = fresh(STRICT).take([{"b": 1, "a": "x"}])
    assert shaper.schema == pa.schema([("b", pa.int64()), ("a", pa.string())])


def test_a_known_shape_keeps_the_shaper() -> None:
    _, shaper = fresh(STRICT).take([{"a": 1}])
    _, again = shaper.take([{"a": 2}, {"a": None}])
    assert again is shaper


def test_take_changes_nothing_when_it_raises() -> None:
    _, shaper = fresh(EVOLVING).take([{"a": 1}])
    with pytest.raises(SchemaError):
        shaper.take([{"a": 2, "new": 1}, {"a": "text"}])
    assert shaper.schema.names == ["a"]


def test_rows_follow_the_order_of_the_schema() -> None:
    assert [list(r) for r in stored([{"a": 1, "b": 2}, {"b": 3, "a": 4}])] == [["a", "b"]] * 2


def test_missing_fields_are_none_where_the_schema_evolves() -> None:
    rows = stored([{"a": 1}, {"b": 2}, {"a": 3, "b": 4}])
    assert rows == [{"a": 1, "b": None}, {"a": None, "b": 2}, {"a": 3, "b": 4}]


def test_the_fast_road_notices_what_only_looks_the_same() -> None:
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
        _, shaper = fresh(STRICT).take([{"f": good}])
        shaper.take([{"f": good}])
        with pytest.raises(SchemaError, match="f"):
            convert_all(shaper, [{"f": good}, {"f": bad}])


def test_the_fast_road_does_not_drop_unknown_keys_of_dicts() -> None:
    records = [{"f": {"x": 1}}, {"f": {"x": 2}}, {"f": {"x": 3, "y": 4}}, {"f": {"y": 5}}]
    assert stored(records) == [
        {"f": {"x": 1, "y": None}},
        {"f": {"x": 2, "y": None}},
        {"f": {"x": 3, "y": 4}},
        {"f": {"x": None, "y": 5}},
    ]


def test_whole_floats_do_not_turn_an_int_field_silently() -> None:
    _, shaper = fresh(STRICT).take([{"f": 1}])
    with pytest.raises(SchemaError):
        shaper.take([{"f": 1.0}])


def test_thousands_of_shapes_do_not_grow_without_bound() -> None:
    _, shaper = fresh(EVOLVING).take([{f"f{i}": None for i in range(12)}])
    for mask in range(2**12):
        record = {f"f{i}": None for i in range(12) if mask >> i & 1}
        _, shaper = shaper.take([record])
    assert len(shaper._shapes) <= 1024


def test_only_flat_complete_records_are_kept_as_they_are() -> None:
    _, shaper = fresh(EVOLVING).take([{"a": 1, "b": "x"}])
    assert shaper.known_row({"a": 5, "b": "y"})
    for other in ({"b": "y", "a": 5}, {"a": 5}, {"a": 5, "b": 5}, {"a": 2**63, "b": ""}, None):
        assert shaper.known_row(other) is None
    assert shaper.known_row({"a": 5, "b": "\ud800"}) is None


def test_the_size_of_a_row_counts_its_bytes() -> None:
    _, shaper = fresh(EVOLVING).take([{"t": "x", "b": b"y"}])
    size = shaper.known_row({"t": "t" * 1000, "b": b"b" * 500})
    assert size is not None
    assert 1500 <= size <= 2000
    wide = shaper.known_row({"t": "漢" * 1000, "b": b""})
    assert wide is not None
    assert wide >= 3000


def test_defaults_fill_what_a_record_lacks() -> None:
    rules = Rules(evolving=True, defaults={"age": 0})
    assert stored([{"age": 5}, {"id": 1}, {"id": 2, "age": None}], rules) == [
        {"age": 5, "id": None},
        {"age": 0, "id": 1},
        {"age": None, "id": 2},
    ]
