"""Arrow data in and out, consistent with records."""

from __future__ import annotations

import datetime as dt
import re

import numpy as np
import pyarrow as pa
import pytest
from support.buckets import Bucket

from persisting.queue import SchemaError

TABLE = pa.table({"i": [1, 2, 3], "s": ["a", None, "c"], "v": pa.array([[1], [], None])})


async def test_arrow_rows_are_read_as_records(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_arrow(TABLE)
    assert backend.total_count() == 3
    assert await backend.get() == TABLE.to_pylist()
    await backend.flush()
    assert await backend.get() == TABLE.to_pylist()
    backend = await bucket.reopen(backend)
    assert await backend.get() == TABLE.to_pylist()


async def test_a_record_batch_is_taken_like_a_table(bucket: Bucket) -> None:
    backend = bucket.open()
    for batch in TABLE.to_batches(max_chunksize=2):
        await backend.put_arrow(batch)
    assert await backend.get() == TABLE.to_pylist()


async def test_slices_store_only_their_rows(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_arrow(TABLE.slice(1, 1))
    await backend.put_arrow(TABLE.slice(2))
    await backend.put_arrow(TABLE.slice(3))
    assert await backend.get() == TABLE.to_pylist()[1:]
    await backend.flush()
    assert await backend.get() == TABLE.to_pylist()[1:]


async def test_get_arrow_equals_get(bucket: Bucket) -> None:
    backend = bucket.open()
    rows = [{"i": i, "d": {"x": [i]}, "t": dt.datetime(2024, 1, i + 1)} for i in range(6)]
    await backend.put_batch(rows[:3])
    await backend.flush()
    await backend.put_batch(rows[3:])
    table = await backend.get_arrow()
    assert isinstance(table, pa.Table)
    assert table.column_names == ["i", "d", "t"]
    assert table.to_pylist() == await backend.get() == rows
    assert (await backend.get_arrow(2, 3)).to_pylist() == rows[2:5]


async def test_result_of_get_arrow_can_be_put(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch([{"i": 1, "v": [0.5, 1.5], "n": None}, {"i": 2, "v": None, "n": None}])
    await backend.put_arrow(await backend.get_arrow())
    await backend.flush()
    await backend.put_arrow(await backend.get_arrow())
    rows = await backend.get()
    assert len(rows) == 8
    assert rows == rows[:2] * 4


async def test_columns_may_come_in_another_order(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({"a": 1, "b": "x"})
    await backend.put_arrow(pa.table({"b": ["y"], "a": [2]}))
    assert await backend.get() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


async def test_an_empty_table_stores_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_arrow(TABLE.schema.empty_table())
    assert backend.total_count() == 0
    await backend.put({"other": 1})
    assert await backend.get() == [{"other": 1}]


@pytest.mark.parametrize(
    "data", [None, [{"a": 1}], {"a": [1]}, pa.array([1])], ids=lambda one: type(one).__name__
)
async def test_put_arrow_refuses_data_that_is_not_from_arrow(bucket: Bucket, data: object) -> None:
    backend = bucket.open()
    with pytest.raises(SchemaError, match="Table"):
        await backend.put_arrow(data)


async def test_put_arrow_refuses_duplicate_column_names(bucket: Bucket) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(SchemaError, match="one name"):
        await bucket.open().put_arrow(table)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([None], pa.month_day_nano_interval()),
        pa.array([[1], None], pa.list_view(pa.int64())),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.time64("ns")),
        pa.array([1], pa.duration("ns")),
    ],
    ids=lambda c: str(c.type),
)
async def test_put_arrow_refuses_a_column_that_would_lose_precision(
    bucket: Bucket, column: pa.Array
) -> None:
    backend = bucket.open()
    with pytest.raises(SchemaError, match="'field'"):
        await backend.put_arrow(pa.table({"field": column}))
    assert backend.total_count() == 0


ARROW_COLUMNS = {
    "large_string": pa.array(["a", None], pa.large_string()),
    "string_view": pa.array(["a", None], pa.string_view()),
    "large_binary": pa.array([b"a", None], pa.large_binary()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "date64": pa.array([dt.date(2020, 1, 1), None], pa.date64()),
    "time32": pa.array([dt.time(1), None], pa.time32("s")),
    "seconds": pa.array([dt.datetime(2020, 1, 1), None], pa.timestamp("s")),
    "berlin": pa.array([dt.datetime(2020, 1, 1), None], pa.timestamp("us", tz="Europe/Berlin")),
    "duration": pa.array([dt.timedelta(1), None], pa.duration("s")),
    "int8": pa.array([-128, None], pa.int8()),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "float16": pa.array([1.5, None], pa.float32()).cast(pa.float16()),
    "float32": pa.array([1.5, None], pa.float32()),
    "decimal": pa.array(["1.50", None]).cast(pa.decimal128(10, 2)),
    "fixed_binary": pa.array([b"ab", None], pa.binary(2)),
    "large_list": pa.array([[1], None], pa.large_list(pa.int64())),
    "vectors": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
    "int_vectors": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
    "holed_vectors": pa.array([[1.0, None], None], pa.list_(pa.float32(), 2)),
    "fixed_texts": pa.array([["a", "b"], None], pa.list_(pa.string(), 2)),
    "fixed_dicts": pa.array([[{"a": 1}], None], pa.list_(pa.struct([("a", pa.int64())]), 1)),
    "matrices": pa.array([[[1.0], [2.0]], None], pa.list_(pa.list_(pa.float64(), 1), 2)),
    "no_vectors": pa.array([[], None], pa.list_(pa.float64(), 0)),
    "list_of_vectors": pa.array([[[1.0, 2.0]], None], pa.list_(pa.list_(pa.float64(), 2))),
    "dict_of_dictionary": pa.array(
        [{"a": "x"}, None], pa.struct([("a", pa.dictionary(pa.int32(), pa.string()))])
    ),
    "empty_dicts": pa.array([{}, None], pa.struct([])),
    "uuid": pa.array([b"0123456789abcdef", None], pa.uuid()),
    "nulls": pa.nulls(2),
}


@pytest.mark.parametrize("name", ARROW_COLUMNS)
async def test_every_arrow_type_reads_back_the_same(keeper: Bucket, name: str) -> None:
    table = pa.table({"x": ARROW_COLUMNS[name]})
    expected = table.to_pylist()
    backend = keeper.open()
    await backend.put_arrow(table)
    assert await backend.get() == expected
    await backend.flush()
    assert await backend.get() == expected
    await backend.put_arrow(table.slice(1))
    backend = await keeper.reopen(backend)
    assert await backend.get() == expected + expected[1:]


@pytest.mark.parametrize("name", sorted(set(ARROW_COLUMNS) - {"uint64"}))
async def test_records_read_from_arrow_rows_can_be_put_again(keeper: Bucket, name: str) -> None:
    backend = keeper.open()
    await backend.put_arrow(pa.table({"x": ARROW_COLUMNS[name]}))
    rows = await backend.get()
    await backend.put_batch(rows)
    assert await backend.get() == rows * 2


def broken_text() -> pa.Array:
    ends = pa.py_buffer(np.array([0, 2], dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff\xfe")])


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (broken_text(), "'v'"),
        (pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), broken_text()), "'v'"),
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), "'a'"),
        (pa.array([2**62], pa.timestamp("us")), "'v'"),
        (pa.array([-(2**62)], pa.timestamp("us", tz="UTC")), "'v'"),
        (pa.array([2**31 - 1], pa.date32()), "'v'"),
        (pa.array([86_400_000_000], pa.int64()).view(pa.time64("us")), "'v'"),
        (pa.array([[None, {"t": 2**62}]], pa.list_(pa.struct([("t", pa.timestamp("us"))]))), "v"),
    ],
    ids=str,
)
async def test_values_that_could_never_be_read_are_refused_and_lose_nothing(
    bucket: Bucket, column: pa.Array, named: str
) -> None:
    backend = bucket.open()
    await backend.put({"id": 1, "v": None})
    with pytest.raises(SchemaError, match=re.escape(named)):
        await backend.put_arrow(pa.table({"id": pa.array([2]), "v": column}))
    await backend.put({"id": 3, "v": None})
    backend = await bucket.reopen(backend)
    assert [one["id"] for one in await backend.get()] == [1, 3]


async def test_earliest_and_latest_timestamps_are_stored(bucket: Bucket) -> None:
    rows = [
        {"at": dt.datetime.min, "on": dt.date.min, "time": dt.time.min},
        {"at": dt.datetime.max, "on": dt.date.max, "time": dt.time.max},
        {"at": None, "on": None, "time": None},
    ]
    backend = bucket.open()
    await backend.put_arrow(pa.Table.from_pylist(rows))
    backend = await bucket.reopen(backend)
    assert await backend.get() == rows


async def test_changing_the_source_array_does_not_change_stored_rows(
    bucket: Bucket,
) -> None:
    numbers, items = np.arange(4), np.arange(8.0)
    backend = bucket.open()
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(items), 2)
    await backend.put_arrow(pa.table({"n": pa.array(numbers), "v": vectors}))
    numbers[:], items[:] = -1, -1.0
    expected = [{"n": n, "v": [2.0 * n, 2.0 * n + 1]} for n in range(4)]
    assert await backend.get() == expected
    backend = await bucket.reopen(backend)
    assert await backend.get() == expected


async def test_arrow_slice_is_checked_by_its_own_rows_only(bucket: Bucket) -> None:
    ends = pa.py_buffer(np.array([0, 1, 3], dtype=np.int32).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff\xfe")])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), texts)
    table = pa.table({"v": lists})
    backend = bucket.open()
    await backend.put_arrow(table.slice(0, 1))
    with pytest.raises(SchemaError, match="'v'"):
        await backend.put_arrow(table.slice(1, 1))
    assert await backend.get() == [{"v": ["a"]}]
