"""Stored records are copies that callers cannot change."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from support.buckets import Bucket
from support.comparing import assert_same

from persisting.queue import SchemaError


def nested() -> dict[str, Any]:
    return {"i": 1, "list": [1, 2], "dict": {"x": [1]}, "dicts": [{"y": 1}], "v": [0.5, 1.5]}


def spoil(record: dict[str, Any]) -> None:
    record["i"] = 99
    record["list"].append(99)
    record["dict"]["x"].append(99)
    record["dicts"][0]["y"] = 99
    record["v"][0] = 99.0
    record["new"] = 99


async def test_changing_a_record_after_put_changes_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    records = [nested() for _ in range(4)]
    await backend.put(records[0])
    await backend.put(records[1])
    await backend.put_batch(records[2:])
    for record in records:
        spoil(record)
    assert await backend.get() == [nested()] * 4
    await backend.flush()
    assert await backend.get() == [nested()] * 4


async def test_changing_a_flat_record_after_put_changes_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    record = {"i": 0, "s": "a"}
    for i in range(5):
        record["i"] = i
        await backend.put(record)
    record["s"] = "changed"
    assert await backend.get() == [{"i": i, "s": "a"} for i in range(5)]


async def test_changing_an_array_after_put_changes_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    vector, blob = np.array([1.0, 2.0]), bytearray(b"ab")
    for _ in range(3):
        await backend.put({"v": vector, "b": blob})
    vector[0], blob[0] = 9.0, 0
    assert await backend.get() == [{"v": [1.0, 2.0], "b": b"ab"}] * 3


async def test_changing_the_list_after_put_batch_changes_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    batch = [{"i": 0}, {"i": 1}]
    await backend.put_batch(batch)
    batch.clear()
    assert await backend.get() == [{"i": 0}, {"i": 1}]


async def test_a_put_does_not_change_the_record(bucket: Bucket) -> None:
    backend = bucket.open()
    record = {**nested(), "t": (1, 2), "n": np.int64(5)}
    before = copy.deepcopy(record)
    await backend.put(record)
    await backend.put_batch([record])
    assert record == before
    assert list(record) == list(before)
    assert type(record["t"]) is tuple


async def test_changing_what_get_returned_changes_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put(nested())
    await backend.put(nested())
    for _ in range(2):
        for record in await backend.get():
            spoil(record)
        async for record in backend.get_stream():
            spoil(record)
        assert await backend.get() == [nested()] * 2
        await backend.flush()


@pytest.mark.parametrize("count", [2, 2500])
async def test_a_batch_with_one_bad_record_stores_nothing(bucket: Bucket, count: int) -> None:
    backend = bucket.open()
    await backend.put({"i": 0, "s": "a"})
    batch: list[Any] = [{"i": i, "s": "b"} for i in range(count)]
    for bad in ({"i": 2**64, "s": "c"}, {"i": 1, "s": object()}, {"i": 1, 5: "c"}, None):
        for place in (0, count // 2, count - 1):
            with pytest.raises(SchemaError):
                await backend.put_batch([*batch[:place], bad, *batch[place:]])
            assert backend.total_count() == 1
    await backend.put_batch(batch)
    assert_same([{"i": 0, "s": "a"}, *batch], await backend.get())


async def test_a_refused_first_batch_leaves_no_schema_behind(bucket: Bucket) -> None:
    backend = bucket.open()
    with pytest.raises(SchemaError):
        await backend.put_batch([{"a": 1}, {"a": object()}])
    await backend.put({"b": "text"})
    assert await backend.get() == [{"b": "text"}]
    await backend.flush()
    assert await backend.get() == [{"b": "text"}]
