"""The copy of the rows that a replay buffer reads from."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persisting.data import packed_rows, row_cache
from persisting.data.row_cache import RowCache

VECTOR = pa.list_(pa.float32(), 3)
FIELDS: dict[str, tuple[pa.DataType, Any]] = {
    "number": (pa.int64(), lambda n: n),
    "small": (pa.int8(), lambda n: n % 100),
    "share": (pa.float64(), lambda n: n / 7),
    "flag": (pa.bool_(), lambda n: n % 3 == 0),
    "vector": (VECTOR, lambda n: [n, 0.5, -n]),
    "text": (pa.string(), lambda n: "é" * (n % 9)),
    "same": (pa.string(), lambda n: f"{n:08}"),
    "long": (pa.string(), lambda n: "x" * (5000 if n == 3 else 1)),
    "bytes": (pa.binary(), lambda n: bytes([n % 256] * (n % 4))),
    "gaps": (pa.float64(), lambda n: None if n % 5 == 0 else n),
    "gaps_text": (pa.string(), lambda n: None if n % 5 == 0 else str(n)),
    "list": (pa.list_(pa.int64()), lambda n: list(range(n % 4))),
    "time": (pa.timestamp("us", "UTC"), lambda n: dt.datetime.fromtimestamp(n, dt.timezone.utc)),
    "day": (pa.date32(), lambda n: dt.date(2020, 1, 1) + dt.timedelta(days=n)),
    "price": (pa.decimal128(12, 2), lambda n: decimal.Decimal(n) / 4),
    "struct": (pa.struct([("a", pa.int64())]), lambda n: {"a": n}),
    "deep": (pa.list_(pa.list_(pa.float32(), 2)), lambda n: [[n, 1.0], [2.0, n]]),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in FIELDS.items()])
PACKED = {"number", "small", "share", "vector", "text", "same", "bytes", "time", "day", "price"}


def batch(first: int, count: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    rows = [
        {name: FIELDS[name][1](n) for name in schema.names} for n in range(first, first + count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RowCache:
    """Two buckets of which the even and odd numbers are the rows; small parts go to files."""
    monkeypatch.setattr(row_cache, "_STORED_BYTES", 2048)
    monkeypatch.setattr(row_cache, "_CHUNK_ROWS", 64)
    return RowCache(2, tmp_path)


def fill(
    cache: RowCache, rows: pa.RecordBatch, bucket: int, first: int = 0, step: int = 20
) -> None:
    for start in range(0, rows.num_rows, step):
        part = rows.slice(start, step)
        arrivals = np.arange(first + start, first + start + part.num_rows)
        cache.append(bucket, first + start, part, arrivals)
        cache.store(bucket)


def taken(cache: RowCache, places: list[tuple[int, int]], schema: pa.Schema) -> pa.RecordBatch:
    buckets, offsets = np.array(places).T
    found = cache.take(buckets, offsets, schema, {})
    found.validate(full=True)
    return found


@pytest.mark.parametrize("step", [1, 7, 20, 200])
def test_a_take_returns_the_rows_of_files_and_of_memory_in_the_requested_order(
    cache: RowCache, step: int
) -> None:
    rows = [batch(0, 150), batch(1000, 130)]
    fill(cache, rows[0], 0, step=step)
    fill(cache, rows[1], 1, step=step)
    random = np.random.default_rng(step)
    places = [
        (bucket, int(random.integers(rows[bucket].num_rows)))
        for bucket in random.integers(2, size=90)
    ]
    expected = [rows[bucket].slice(offset, 1).to_pylist()[0] for bucket, offset in places]
    assert taken(cache, places, SCHEMA).to_pylist() == expected
    alone = [place for place in places if place == places[0]]
    assert taken(cache, alone, SCHEMA).to_pylist() == [expected[0]] * len(alone)


def test_columns_without_nulls_are_packed_and_the_others_are_not(cache: RowCache) -> None:
    layout = packed_rows.layout_of(batch(0, 60))
    assert layout is not None
    assert set(layout.by_name) == PACKED
    assert packed_rows.layout_of(batch(0, 60).select(["gaps", "list"])) is None


def test_a_field_that_gets_a_wider_type_is_read_from_all_files(cache: RowCache) -> None:
    narrow = pa.schema([("number", pa.int32()), ("text", pa.string())])
    wide = pa.schema([("number", pa.int64()), ("text", pa.string()), ("share", pa.float64())])
    fill(cache, batch(0, 70, narrow), 0)
    fill(cache, batch(70, 70, wide), 0, first=70)
    places = [(0, 100), (0, 3), (0, 69), (0, 70), (0, 139)]
    found = taken(cache, places, wide)
    assert found["number"].to_pylist() == [100, 3, 69, 70, 139]
    assert found["share"].to_pylist() == [100 / 7, None, None, 10.0, 139 / 7]
    with_default = cache.take(np.zeros(2, int), np.array([3, 70]), wide, {"share": 2.5})
    assert with_default["share"].to_pylist() == [2.5, 10.0]


def test_a_part_of_a_larger_batch_is_cached_like_a_whole_one(cache: RowCache) -> None:
    rows = batch(0, 200)
    cache.append(0, 0, rows.slice(50, 100), np.arange(100))
    cache.store(0)
    assert taken(cache, [(0, 9), (0, 0)], SCHEMA).to_pylist() == [
        rows.slice(59, 1).to_pylist()[0],
        rows.slice(50, 1).to_pylist()[0],
    ]


@pytest.mark.parametrize("name", ["number", "text", "gaps", "vector"])
def test_a_range_of_a_column_is_read_from_files_and_memory(cache: RowCache, name: str) -> None:
    rows = batch(0, 150)
    fill(cache, rows, 0)
    assert cache.column(0, 5, 149, name) == rows[name].slice(5, 144).to_pylist()
    assert cache.column(0, 60, 63, "missing") == [None] * 3


def test_dropped_rows_take_no_space_on_disk(cache: RowCache, tmp_path: Path) -> None:
    fill(cache, batch(0, 640), 0)
    before = sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    cache.drop(0, 600)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) < before / 4
    assert taken(cache, [(0, 639)], SCHEMA)["number"].to_pylist() == [639]
    cache.close()
    assert not list(tmp_path.iterdir())
