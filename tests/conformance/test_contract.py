"""The methods of the protocol, one by one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.buckets import Bucket, read_all
from support.comparing import assert_same

from persisting.queue import SchemaError, StorageBackend, StorageError

ROWS = [{"i": i, "text": f"row {i}"} for i in range(10)]


async def test_a_backend_satisfies_the_protocol(bucket: Bucket) -> None:
    assert isinstance(bucket.open(), StorageBackend)


def test_incomplete_class_does_not_satisfy_the_protocol() -> None:
    assert not isinstance(object(), StorageBackend)


@pytest.mark.parametrize("method", ["get", "get_stream", "put", "put_batch", "stats", "flush"])
async def test_signatures_are_those_of_the_protocol(bucket: Bucket, method: str) -> None:
    backend = bucket.open()
    every = inspect.signature(getattr(backend, method)).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]  # a backend may offer more by name
    protocol = list(inspect.signature(getattr(StorageBackend, method)).parameters.values())[1:]
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in protocol]


async def test_a_new_bucket_is_empty(bucket: Bucket) -> None:
    backend = bucket.open()
    assert backend.total_count() == 0
    assert await backend.get() == []
    assert await read_all(backend) == []
    assert (await backend.get_arrow()).num_rows == 0


async def test_put_then_get_returns_the_record(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({"id": "1", "value": 42})
    assert await backend.get() == [{"id": "1", "value": 42}]


async def test_put_and_put_batch_and_flush_return_none(bucket: Bucket) -> None:
    backend = bucket.open()
    assert await backend.put({"a": 1}) is None
    assert await backend.put_batch([{"a": 1}]) is None
    assert await backend.flush() is None


async def test_records_keep_the_order_of_their_puts(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=7)
    await backend.put(ROWS[0])
    await backend.put_batch(ROWS[1:4])
    await backend.flush()
    for row in ROWS[4:8]:
        await backend.put(row)
    await backend.put_batch(ROWS[8:])
    assert await backend.get() == ROWS
    assert await read_all(backend) == ROWS


async def test_fields_keep_the_order_of_the_record(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({"z": 1, "a": 2, "m": 3})
    await backend.flush()
    assert list((await backend.get())[0]) == ["z", "a", "m"]


async def test_an_empty_batch_stores_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch([])
    assert backend.total_count() == 0
    await backend.flush()
    assert await backend.get() == []


@pytest.mark.parametrize("kind", [tuple, iter], ids=["tuple", "iterator"])
async def test_a_batch_may_be_any_iterable_of_records(bucket: Bucket, kind: Any) -> None:
    backend = bucket.open()
    await backend.put_batch(kind(ROWS))
    assert await backend.get() == ROWS


async def test_a_batch_of_many_pages_is_stored_in_order(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=100_000)
    rows = [{"i": i, "text": str(i)} for i in range(3500)]
    await backend.put_batch(rows)
    assert await backend.get() == rows
    await backend.flush()
    assert await backend.get() == rows


@pytest.mark.parametrize(
    "record", [None, 5, "text", [("a", 1)], object()], ids=lambda one: type(one).__name__
)
async def test_put_refuses_a_record_that_is_not_a_dict(bucket: Bucket, record: object) -> None:
    backend = bucket.open()
    with pytest.raises(SchemaError, match="dict"):
        await backend.put(record)
    with pytest.raises(SchemaError, match="dict"):
        await backend.put_batch([{"a": 1}, record])
    assert backend.total_count() == 0


@pytest.mark.parametrize("batch", [None, 5, {"a": 1}, "text"], ids=repr)
async def test_put_batch_refuses_anything_but_a_list_of_records(
    bucket: Bucket, batch: object
) -> None:
    backend = bucket.open()
    with pytest.raises(StorageError):
        await backend.put_batch(batch)
    assert backend.total_count() == 0


async def test_a_dict_subclass_is_a_record(bucket: Bucket) -> None:
    class Row(dict):  # type: ignore[type-arg]
        pass

    backend = bucket.open()
    await backend.put(Row(a=1))
    await backend.put({"a": 2})
    assert_same([{"a": 1}, {"a": 2}], await backend.get())


async def test_total_count_is_right_after_every_step(bucket: Bucket) -> None:
    backend = bucket.open(flush_threshold=4)
    for n in range(1, 10):
        await backend.put({"i": n})
        assert backend.total_count() == n
    await backend.flush()
    assert backend.total_count() == 9
    await backend.put_batch([{"i": 10}, {"i": 11}])
    assert backend.total_count() == 11


async def test_flush_of_nothing_does_nothing(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.flush()
    await backend.put({"a": 1})
    await backend.flush()
    before = await backend.stats()
    await backend.flush()
    assert await backend.stats() == before


async def test_stats_have_the_specified_keys(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put_batch(ROWS)
    stats = await backend.stats()
    assert stats["bucket_id"] == 0
    assert stats["total_count"] == stats["buffer_count"] + stats["persisted_count"] == len(ROWS)
    assert stats["storage_path"] == str(bucket.folder)
    assert (stats["start_offset"], stats["end_offset"]) == (0, len(ROWS))


async def test_stats_follow_a_flush(stored: Bucket) -> None:
    backend = stored.open()
    await backend.put_batch(ROWS)
    stats = await backend.stats()
    assert (stats["buffer_count"], stats["persisted_count"]) == (10, 0)
    await backend.flush()
    stats = await backend.stats()
    assert (stats["buffer_count"], stats["persisted_count"]) == (0, 10)


async def test_unknown_option_is_ignored(bucket: Bucket) -> None:
    if bucket.kind.persistent:
        with pytest.warns(UserWarning, match="colour"):
            backend = bucket.open(colour="red")
    else:
        backend = bucket.open(colour="red")
    await backend.put({"a": 1})
    assert backend.total_count() == 1


async def test_a_record_without_fields_is_a_record(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({})
    await backend.put_batch([{}, {}])
    assert await backend.get() == [{}, {}, {}]
    await backend.flush()
    assert await backend.get() == [{}, {}, {}]
    assert await backend.get(1, 1) == [{}]
    assert await read_all(backend) == [{}, {}, {}]
    await backend.put({})
    backend = await bucket.reopen(backend)
    assert backend.total_count() == 4
    assert await backend.get() == [{}] * 4


async def test_a_record_of_nones_is_a_record(bucket: Bucket) -> None:
    backend = bucket.open()
    record = {"a": None, "b": None}
    await backend.put_batch([record, record])
    assert await backend.get() == [record] * 2
    await backend.flush()
    assert await backend.get() == [record] * 2
    backend = await bucket.reopen(backend)
    assert await backend.get() == [record] * 2


async def test_a_field_that_was_none_takes_any_value_later(bucket: Bucket) -> None:
    backend = bucket.open()
    rows = [{"a": None, "b": None}, {"a": 1, "b": None}, {"a": 2, "b": ["x"]}]
    for row in rows:
        await backend.put(row)
        await backend.flush()
        assert await backend.get() == rows[: backend.total_count()]
    backend = await bucket.reopen(backend)
    assert await backend.get() == rows
