"""A backend with only the protocol's methods gets the interface of a table backend."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pyarrow as pa
import pytest
from support.protocol_only_backend import OnlyProtocol
from support.topic_places import ids, numbered

from persisting.errors import StorageError
from persisting.queue import LanceBackend, MemoryBackend, write_queue
from persisting.topic.backend_adapter import AdaptedBackend, adapt
from persisting.topic.table_calls import Compact


def adapted(folder: Path, batch_size: int = 10) -> AdaptedBackend:
    backend = adapt(OnlyProtocol(0, str(folder)), batch_size)
    assert isinstance(backend, AdaptedBackend)
    return backend


async def test_table_backend_is_not_wrapped(tmp_path: Path) -> None:
    async with LanceBackend(0, str(tmp_path)) as backend:
        assert adapt(backend, 10) is backend


@pytest.mark.parametrize("batch_size", [1, 10, 64, 5000])
async def test_pages_of_an_adapted_backend_have_batch_size_rows(
    tmp_path: Path, batch_size: int
) -> None:
    backend = adapted(tmp_path, batch_size)
    await backend.put_batch(numbered(2500))
    async with aclosing(backend.get_pages(100, 2345, False)) as stream:
        pages = [page async for page in stream]
    assert [n for page in pages for n in ids(page.rows)] == list(range(100, 2445))
    assert all(len(page.rows) <= batch_size for page in pages)
    assert [page.first for page in pages] == [page.rows[0]["id"] for page in pages]


async def test_arrow_data_is_put_and_read_as_records(tmp_path: Path) -> None:
    backend = adapted(tmp_path)
    await backend.put_arrow(pa.table({"id": [1, 2]}))
    assert (await backend.read(0, None)).rows == [{"id": 1}, {"id": 2}]
    assert (await backend.read_arrow(1, None)).rows.to_pylist() == [{"id": 2}]


async def test_sequences_of_an_adapted_backend_are_remembered(tmp_path: Path) -> None:
    backend = adapted(tmp_path)
    for number in (3, 3, 2, 4):
        await backend.put_once(numbered(1, number), "w", number)
    assert ids((await backend.read(0, None)).rows) == [3, 4]
    assert (backend.last_number("w"), backend.last_number("other")) == (4, -1)


async def test_sequences_of_an_adapted_backend_survive_reopening_its_bucket(
    tmp_path: Path,
) -> None:
    where = {"topic": "t", "storage_path": str(tmp_path), "num_buckets": 1}
    async with await write_queue(**where, backend=OnlyProtocol, writer_id="w") as writer:  # type: ignore[arg-type]
        await writer.put({"id": 1}, sequence=5)
        await writer._topic.close_bucket(0)  # type: ignore[attr-defined]
        await writer.put({"id": 1}, sequence=5)
        assert (await writer.stats())["total_count"] == 1


async def test_missing_abilities_of_a_backend_are_named(tmp_path: Path) -> None:
    backend = adapted(tmp_path)
    with pytest.raises(StorageError, match="OnlyProtocol has no table"):
        await backend.call(Compact())
    with pytest.raises(StorageError, match="OnlyProtocol stores no arrival times"):
        await backend.offset_at(0)
    assert (backend.epoch(), backend.end_offset()) == (0, 0)


async def test_methods_that_a_backend_has_are_used(tmp_path: Path) -> None:
    memory = MemoryBackend()
    backend = adapt(memory, 10)
    await backend.put_once(numbered(3), "w", 7)
    assert memory.last_number("w") == backend.last_number("w") == 7
    assert await backend.offset_at(0) == 0
    await backend.wait_beyond(2)
    await backend.close()
    with pytest.raises(StorageError):
        await backend.put({"id": 1})


async def test_backend_without_close_is_flushed_instead(tmp_path: Path) -> None:
    backend = adapted(tmp_path)
    await backend.put({"id": 1})
    await backend.close()
    assert OnlyProtocol(0, str(tmp_path)).total_count() == 1
