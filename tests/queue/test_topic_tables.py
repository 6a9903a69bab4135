"""The topic as a table, in this process and on files without an owner."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.table_contract import (
    QUERY,
    TableContract,
    nearest,
    one_per_bucket,
    vectors,
)
from support.topic_homes import BUCKETS, Home, flat, home_in
from support.topic_places import Place, drained, ids, numbered

from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import read_queue

_NIGHTLY = pytest.mark.nightly


@pytest.fixture(params=["here-persisting", pytest.param("one-persisting", marks=_NIGHTLY)])
async def evolving_home(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Home]:
    async for made in home_in(*request.param.split("-"), tmp_path / "queues"):
        yield made


class TestTable(TableContract):
    pass


@pytest.mark.parametrize("kind", ["memory", "custom"])
async def test_table_methods_of_a_backend_without_a_table_name_the_backends_to_use(
    kind: str, tmp_path: Path
) -> None:
    place = Place(kind, tmp_path / "queues")
    writer = await place.filled(20)
    reader = await place.read()
    for handle in (writer, reader):
        for use in (
            handle.versions(),
            handle.tag("t"),
            handle.delete_tag("t"),
            handle.restore({0: 1}),
            handle.search(vector=QUERY),
            handle.create_index("id"),
            handle.drop_index("id"),
            handle.indexes(),
            handle.take([(0, 0)]),
            handle.query("id > 1"),
            handle.lookup("id", 1),
            handle.compact(),
            handle.retain(rows=1),
            handle.verify(),
        ):
            with pytest.raises(StorageError, match="'lance' or 'persisting'"):
                await use
    now = dt.datetime.now()
    for use in (reader.get(version={0: 1}), reader.get_arrow(version=now)):
        with pytest.raises(StorageError, match="'lance' or 'persisting'"):
            await use
    assert len(await drained(reader)) == 20
    await place.close()


class TestStored:
    """A topic without an owner: a reader owns it for the duration of a change."""

    async def test_reader_of_an_unowned_topic_can_use_every_table_method(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("lance")
        writer = await home.open()
        for start in (0, 20, 40):
            await writer.put(vectors(20, start))
            await writer.flush()
        content = await home.content()
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        records = flat(content)
        assert await reader.query() == records
        assert ids(await reader.search(vector=QUERY, k=8)) == nearest(records, QUERY, 8)
        assert ids(await reader.lookup("id", 33)) == [33]
        assert await reader.take([(2, 1)]) == [content[2][1]]
        assert (await reader.create_index("id"))["rows"] == 60
        assert (await reader.tag("t"))["rows"] == 60
        assert (await reader.compact())["fragments_after"] == BUCKETS
        assert await reader.get(None, version="t") == records
        assert (await reader.verify())["ok"]
        assert (await reader.retain(rows=1))["dropped"] == 0
        assert (await reader.restore("t"))["removed"] == 0
        assert await reader.drop_index("id") == 1
        assert await reader.delete_tag("t") is True
        # The bucket is free again: a writer can open it.
        writer = await home.write(backend_options={})
        await writer.put(vectors(5, 60))
        assert len(await reader.query()) == 65
        await reader.close()
        await home.close()

    @pytest.mark.filterwarnings("error::UserWarning")
    @pytest.mark.parametrize("kind", ["lance", "persisting"])
    async def test_changes_by_a_reader_of_an_unowned_topic_do_not_warn(
        self, kind: str, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home(kind)
        await (await home.open()).put(numbered(20))
        await home.close()
        async with await read_queue(topic=home.topic, storage_path=str(tmp_path)) as reader:
            await reader.tag("t")
            await reader.compact()

    async def test_index_created_by_another_reader_is_used(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("persisting")
        await (await home.open()).put(vectors(20))
        await home.close()
        first = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        second = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        assert await first.indexes() == await second.indexes() == []
        assert ids(await second.search(vector=QUERY, k=3)) == nearest(vectors(20), QUERY, 3)
        await first.create_index("v", metric="cosine")
        assert [one["metric"] for one in await second.indexes()] == ["cosine"]
        found = ids(await second.search(vector=QUERY, k=3))
        assert found == nearest(vectors(20), QUERY, 3, "cosine")
        await first.close()
        await second.close()

    async def test_bucket_that_was_never_created_is_empty(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("persisting")
        writer = await home.open()
        number = one_per_bucket()[0]
        await writer.put({"id": number, "v": QUERY, "text": "word"})
        await home.close()
        async with await read_queue(topic=home.topic, storage_path=str(tmp_path)) as reader:
            assert not (tmp_path / home.topic / "bucket_1").exists()
            with pytest.raises(OffsetOutOfRange):
                await reader.take([(1, 0)])
            assert ids(await reader.search(vector=QUERY)) == [number]
            assert ids(await reader.search(text="word", vector=QUERY)) == [number]
            assert ids(await reader.query("id >= 0")) == [number]
            assert {v["bucket"] for v in await reader.versions()} == {0}
            assert (await reader.verify())["ok"]
            assert (await reader.tag("t"))["rows"] == 1
            assert ids(await reader.get(version="t")) == [number]

    async def test_table_calls_continue_while_this_process_opens_and_closes_the_topic(
        self, tmp_path: Path, spawned: Any, make_home: Any
    ) -> None:
        home = make_home("persisting")
        await (await home.open()).put(numbered(30))
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        stop = asyncio.Event()

        async def owners() -> None:
            while not stop.is_set():
                async with await home.write(backend_options={}) as writer:
                    await writer.flush()
                    await asyncio.sleep(0.005)

        opening = spawned(owners())
        for _ in range(20):
            assert len(await reader.query("id >= 0")) == 30
            assert len(await reader.versions()) >= BUCKETS
        stop.set()
        await opening
        await reader.close()
