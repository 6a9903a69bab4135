"""A field that holds vectors refuses other lengths, whichever way the records come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.brute_force import QUIET
from support.buckets import Bucket

from persisting.bucket import vector_fields
from persisting.queue import (
    InvalidArgument,
    PersistingBackend,
    SchemaError,
    read_queue,
    write_queue,
)
from persisting.topic.inspect import describe, find

ENOUGH = vector_fields.ENOUGH
REFUSED = "field 'v' holds vectors of 3 floats, got {}: vector search needs one length"


def rows(count: int, start: int = 0, size: int = 3) -> list[dict[str, Any]]:
    return [{"id": i, "v": [float(i), *[1.0] * (size - 1)]} for i in range(start, start + count)]


OTHERS: dict[str, tuple[Any, str]] = {
    "shorter": ([1.0, 2.0], "2 floats"),
    "longer": ([1.0] * 4, "4 floats"),
    "one": ((1.0,), "1 float"),
    "empty": ([], "an empty list"),
    "with None": ([1.0, None, 2.0], "a list with None in it"),
    "array": (np.array([1.0, 2.0], np.float32), "2 floats"),
}


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("flushed", [False, True])
async def test_field_with_many_vectors_refuses_other_values(
    persisting: Bucket, value: tuple[Any, str], flushed: bool
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(rows(ENOUGH))
    if flushed:
        await backend.flush()
    given, words = value
    for _ in range(2):
        with pytest.raises(SchemaError, match=REFUSED.format(words)) as refused:
            await backend.put({"id": 0, "v": given})
    assert 'vectors="widen"' in str(refused.value)
    with pytest.raises(SchemaError, match="holds vectors of 3 floats"):
        await backend.put_batch([*rows(2), {"id": 0, "v": given}])
    await backend.put({"id": 0, "v": None})
    await backend.put(rows(1)[0])
    assert backend.total_count() == ENOUGH + 2
    assert len(await backend.search(vector=[1.0, 1.0, 1.0], k=5)) == 5


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1.0, 2.0]]),
        pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)),
        pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
        pa.array([[1.0, 2.0, 3.0], [1.0, 2.0]]),
    ],
    ids=["list", "vector", "narrow vector", "both lengths"],
)
async def test_vectors_of_another_length_are_refused_by_put_arrow(
    persisting: Bucket, column: pa.Array
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(rows(ENOUGH))
    table = pa.table({"id": [1] * len(column), "v": column})
    with pytest.raises(SchemaError, match=REFUSED.format("2 floats")):
        await backend.put_arrow(table)
    assert backend.total_count() == ENOUGH


async def test_few_records_may_still_show_that_a_field_holds_lists(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(rows(ENOUGH - 1))
    await backend.put({"id": 0, "v": [1.0]})
    await backend.put_batch(rows(ENOUGH, size=5))
    assert (await backend.get_arrow()).schema.field("v").type == pa.list_(pa.float64())


async def test_vectors_of_the_same_put_count(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    with pytest.raises(SchemaError, match=REFUSED.format("2 floats")):
        await backend.put_batch([*rows(ENOUGH), {"id": 0, "v": [1.0, 2.0]}])
    await backend.put_batch(rows(ENOUGH // 2))
    with pytest.raises(SchemaError, match=REFUSED.format("2 floats")):
        await backend.put_batch([*rows(ENOUGH // 2), {"id": 0, "v": [1.0, 2.0]}])
    await backend.put_batch([{"id": 0, "w": [1.0, 2.0]}, *({"w": [1.0]} for _ in range(ENOUGH))])
    assert backend.total_count() == ENOUGH // 2 + ENOUGH + 1


async def test_an_index_makes_a_field_keep_its_vectors(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(rows(3))
    await backend.create_index("v")
    with pytest.raises(SchemaError, match=REFUSED.format("2 floats")):
        await backend.put({"id": 0, "v": [1.0, 2.0]})


async def test_option_turns_the_field_into_lists_and_drops_its_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with PersistingBackend(0, tmp_path / "bucket_0", **QUIET) as backend:
        await backend.put_batch(rows(ENOUGH))
        await backend.create_index("v")
        await backend.create_index("id")
    async with PersistingBackend(0, tmp_path / "bucket_0", **QUIET, vectors="widen") as backend:
        await backend.put({"id": 0, "v": [1.0, 2.0]})
        assert [index["column"] for index in await backend.indexes()] == ["id"]
        await backend.flush()
        backend._bucket.maintenance._run()
        assert "dropping the vector index of field 'v'" in caplog.text
        assert [spec.column for spec in backend._bucket.maintenance.index_specs] == ["id"]
        assert (await backend.get(limit=1, offset=ENOUGH)) == [{"id": 0, "v": [1.0, 2.0]}]
    with pytest.raises(InvalidArgument, match="vectors must be one of 'keep', 'widen'"):
        PersistingBackend(0, tmp_path / "bucket_0", vectors="drop")


async def test_restored_table_without_vectors_takes_lists_again(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"id": 1})
    await backend.tag("before")
    await backend.put_batch(rows(ENOUGH))
    with pytest.raises(SchemaError):
        await backend.put({"id": 0, "v": [1.0, 2.0]})
    await backend.restore("before")
    await backend.put_batch([{"id": 0, "v": [1.0, 2.0]}, {"id": 0, "v": [1.0]}])
    assert backend.total_count() == 3


async def put_single(writer: Any, record: dict[str, Any]) -> None:
    await writer.put(record)


async def put_list(writer: Any, record: dict[str, Any]) -> None:
    await writer.put([*rows(8, 1000), record])


async def put_numbered(writer: Any, record: dict[str, Any]) -> None:
    await writer.put([record], sequence=10_000)


async def put_table(writer: Any, record: dict[str, Any]) -> None:
    await writer.put_arrow(pa.Table.from_pylist([record]))


WAYS = [(put, wal) for put in (put_single, put_list, put_table) for wal in (False, True)]
WAYS.append((put_numbered, True))  # numbered puts need a log


@pytest.mark.parametrize(("put", "wal"), WAYS)
async def test_vectors_in_any_bucket_of_a_topic_count(
    tmp_path: Path, wal: bool, put: Callable[[Any, dict[str, Any]], Awaitable[None]]
) -> None:
    options = {"enable_wal": wal, "flush_interval": None}
    words: dict[str, Any] = {"topic": "t", "bucket_column": "id", "storage_path": str(tmp_path)}
    writer = await write_queue(
        **words, backend="persisting", backend_options=options, writer_id="w"
    )
    await writer.put(rows(ENOUGH))
    if not wal:
        await writer.flush()
    for number in range(8):  # whichever bucket it goes to
        with pytest.raises(SchemaError, match=REFUSED.format("2 floats")):
            await put(writer, {"id": number, "v": [1.0, 2.0]})
    hits = await writer.search(vector=[1.0, 1.0, 1.0], k=1000)
    # Without a log, each bucket accepts or refuses its part of a list by itself.
    assert len([hit for hit in hits if hit["id"] < 1000]) == ENOUGH
    await writer.close()


async def test_widened_log_of_an_older_version_is_replayed(tmp_path: Path) -> None:
    """Older versions accepted any length: the option writes the same log."""
    options = {**QUIET, "enable_wal": True}
    old = PersistingBackend(0, tmp_path, **options, vectors="widen")
    await old.put_batch(rows(ENOUGH))
    await old.flush()
    await old.put({"id": 0, "v": [1.0, 2.0]})
    await old.put_batch(rows(1))
    old._bucket.abandon()
    async with PersistingBackend(0, tmp_path, **options) as backend:
        assert backend.total_count() == ENOUGH + 2
        assert (await backend.get(offset=ENOUGH))[0]["v"] == [1.0, 2.0]


async def test_describe_lists_no_index_of_a_field_that_became_a_list(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "topic": "t",
        "bucket_column": "id",
        "storage_path": str(tmp_path),
        "backend": "persisting",
    }
    async with await write_queue(**words, backend_options={"vectors": "widen"}) as writer:
        await writer.put(rows(20))
        await writer.create_index("v")
        await writer.create_index("id")
        await writer.put({"id": 1, "v": [1.0]})
        await writer.flush()
        assert [index["column"] for index in await writer.indexes()] == ["id"]
    facts = describe(find("t", tmp_path))
    assert [index.column for index in facts.indexes] == ["id"]
    async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
        with pytest.raises(InvalidArgument, match="name the vector field to search"):
            await reader.search(vector=[1.0, 1.0, 1.0])
