"""LanceBackend keeps the fields of its first record."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from support.buckets import Bucket

from persisting.queue import SchemaError

FIRST = {"id": "1", "n": 42, "v": [0.1, 0.2], "d": {"x": 1}, "l": ["a"]}

MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": (
        {"id": "2", "n": 1, "v": [0.1, 0.2], "d": {"x": 1}},
        ["'l'", "missing", "list of str"],
    ),
    "extra": ({**FIRST, "new": 1}, ["'new'", "not in the schema", "'id'"]),
    "other-type": ({**FIRST, "n": "42"}, ["'n'", "int", "str"]),
    "float-for-int": ({**FIRST, "n": 4.2}, ["'n'", "int", "float"]),
    "bool-for-int": ({**FIRST, "n": True}, ["'n'", "int", "bool"]),
    "int-for-text": ({**FIRST, "id": 1}, ["'id'", "str", "int"]),
    "bytes-for-text": ({**FIRST, "id": b"1"}, ["'id'", "str", "bytes"]),
    "other-length": ({**FIRST, "v": [0.1]}, ["'v'", "vector of 2 floats", "vector of 1 floats"]),
    "no-vector": ({**FIRST, "v": "x"}, ["'v'", "vector of 2 floats", "str"]),
    "nested-type": ({**FIRST, "d": {"x": "1"}}, ["'d.x'", "int", "str"]),
    "nested-missing": ({**FIRST, "d": {}}, ["'d'", "dict with x", "dict with no fields"]),
    "nested-extra": ({**FIRST, "d": {"x": 1, "y": 2}}, ["'d'", "dict with x", "dict with x, y"]),
    "item-type": ({**FIRST, "l": [1]}, ["'l[]'", "str", "int"]),
    "list-for-dict": ({**FIRST, "d": [1]}, ["'d'", "dict with x", "list of int"]),
    "empty": ({}, ["'id'", "missing"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("flushed", [False, True], ids=["buffered", "flushed"])
async def test_a_record_that_does_not_match_raises_at_put_and_nothing_is_added(
    lance: Bucket, name: str, flushed: bool
) -> None:
    record, words = MISFITS[name]
    backend = lance.open()
    await backend.put(FIRST)
    if flushed:
        await backend.flush()
    for put in (
        lambda: backend.put(record),
        lambda: backend.put_batch([FIRST, record]),
        lambda: backend.put_batch([FIRST] * 1200 + [record]),
    ):
        with pytest.raises(SchemaError) as caught:
            await put()
        for word in words:
            assert word in str(caught.value)
        assert backend.total_count() == 1
    await backend.put(FIRST)
    backend = await lance.reopen(backend)
    assert await backend.get() == [FIRST, FIRST]


async def test_first_record_of_a_batch_defines_the_schema(lance: Bucket) -> None:
    backend = lance.open()
    with pytest.raises(SchemaError, match="'b'"):
        await backend.put_batch([{"a": 1}, {"a": 2, "b": 1}])
    assert backend.total_count() == 0


async def test_fields_may_come_in_any_order_and_keep_that_of_the_first_record(
    lance: Bucket,
) -> None:
    backend = lance.open()
    await backend.put({"b": 1, "a": "x"})
    await backend.put({"a": "y", "b": 2})
    await backend.flush()
    await backend.put_batch([{"a": "z", "b": 3}])
    assert [list(r.items()) for r in await backend.get()] == [
        [("b", 1), ("a", "x")],
        [("b", 2), ("a", "y")],
        [("b", 3), ("a", "z")],
    ]


async def test_none_is_accepted_by_every_field(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put(FIRST)
    await backend.put(dict.fromkeys(FIRST))
    await backend.flush()
    assert await backend.get() == [FIRST, dict.fromkeys(FIRST)]


async def test_an_int_fits_a_float_field_when_exact(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put({"f": 0.5})
    await backend.put({"f": 2})
    await backend.put({"f": 2**60})
    with pytest.raises(SchemaError, match=r"'f'.*9007199254740993"):
        await backend.put({"f": 2**53 + 1})
    assert [r["f"] for r in await backend.get()] == [0.5, 2.0, float(2**60)]


async def test_a_first_record_without_fields_takes_no_others(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put({})
    with pytest.raises(SchemaError, match="'a'"):
        await backend.put({"a": 1})
    await backend.put({})
    backend = await lance.reopen(backend)
    with pytest.raises(SchemaError, match="'a'"):
        await backend.put({"a": 1})
    assert await backend.get() == [{}, {}]


async def test_arrow_data_is_checked_against_the_same_schema(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put({"a": 1, "b": "x"})
    for table, word in (
        (pa.table({"a": [1]}), "'b' is missing"),
        (pa.table({"a": [1], "b": ["x"], "c": [1]}), "'c' is not in the schema"),
        (pa.table({"a": [1.5], "b": ["x"]}), "'a' is int, got float"),
        (pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), "'a' is int, got int32"),
    ):
        with pytest.raises(SchemaError, match=word):
            await backend.put_arrow(table)
    assert backend.total_count() == 1


async def test_a_date_and_a_datetime_are_different(lance: Bucket) -> None:
    backend = lance.open()
    await backend.put({"d": dt.date(2024, 1, 1), "t": dt.datetime(2024, 1, 1)})
    with pytest.raises(SchemaError, match="'d' is date, got datetime without timezone"):
        await backend.put({"d": dt.datetime(2024, 1, 1), "t": dt.datetime(2024, 1, 1)})
    with pytest.raises(SchemaError, match="'t' is datetime without timezone, got date"):
        await backend.put({"d": dt.date(2024, 1, 1), "t": dt.date(2024, 1, 1)})


async def test_a_narrow_vector_keeps_its_width(lance: Bucket) -> None:
    import numpy as np

    backend = lance.open(vector_type="float32")
    await backend.put({"v": [0.1, 0.2]})
    await backend.put({"v": np.array([0.1, 0.2], dtype=np.float32)})
    expected = [float(np.float32(0.1)), float(np.float32(0.2))]
    await backend.flush()
    assert await backend.get() == [{"v": expected}] * 2
    assert (await backend.get_arrow()).schema.field("v").type == pa.list_(pa.float32(), 2)


async def test_vectors_can_be_searched_by_lance(lance: Bucket) -> None:
    import lance as lancedb

    backend = lance.open()
    await backend.put_batch([{"id": i, "v": [float(i), 0.5]} for i in range(50)])
    await backend.flush()
    dataset = lancedb.dataset(str(lance.folder / "data.lance"))
    found = dataset.to_table(nearest={"column": "v", "q": [17.1, 0.5], "k": 1}, columns=["id"])
    assert found.column("id").to_pylist() == [17]
