"""Retention in this process, and for readers of the files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.retention_contract import (
    ROWS,
    SMALL,
    RetentionContract,
    SlowContract,
    in_fragments,
    in_steps,
)
from support.topic_homes import BUCKETS, flat
from support.topic_places import drained, ids

from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import read_queue, write_queue

_NIGHTLY = pytest.mark.nightly


async def test_get_overtaken_by_retention_returns_what_it_has_read(tmp_path: Path) -> None:
    where: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path)}
    writer = await write_queue(**where, num_buckets=2, backend="lance")
    for first in range(0, 100, 10):
        await writer.put([{"id": str(n)} for n in range(first, first + 10)])
        await writer.flush()
    reader = await read_queue(**where)
    client, offsets = reader._topic.bucket(0), []
    read = client.read

    async def read_then_retain(offset: int, limit: int | None) -> Any:
        offsets.append(offset)
        page = await read(offset, limit)
        if len(offsets) == 1:
            await writer.retain(rows=10)  # as automatic retention might do here
        return page

    client.read = read_then_retain
    assert len(await reader.get(limit=60)) > 30
    assert len(offsets) == 2
    with pytest.raises(OffsetOutOfRange, match="removed by retention"):
        await reader.get(limit=60)
    await reader.close()
    await writer.close()


class TestRetention(RetentionContract):
    pass


class TestSlow(SlowContract):
    pass


class TestStored:
    async def test_retention_applies_to_readers_of_the_files_as_well(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("persisting")
        writer = await in_steps(home)
        starts = (await writer.retain(rows=12))["start_offsets"]
        left = flat(await home.content())
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        assert await reader.query() == left
        assert sorted(ids(await reader.get(None))) == sorted(ids(left))
        stats = await reader.stats()
        assert [b["start_offset"] for b in stats["buckets"]] == [starts[b] for b in range(BUCKETS)]
        assert (stats["lag"], stats["total_count"]) == (0, len(left))
        await reader.set_offset(1)
        with pytest.raises(OffsetOutOfRange):
            await reader.get()
        assert await reader.seek(timestamp=0) == starts
        assert len(await drained(reader)) == len(left)
        again = await reader.retain(rows=0)
        assert again["dropped"] == len(left)
        await reader.reset()
        assert await reader.query() == []
        await reader.close()

    async def test_slow_stream_of_the_files_survives_cleaning_by_the_owner(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("lance")
        writer = await home.write(num_buckets=1, backend_options={**SMALL, "keep_versions": 0.1})
        await in_fragments(writer)
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        found: list[int] = []
        async for record in reader.get_stream():
            found.append(record["id"])
            if len(found) == 10:
                async with await read_queue(topic=home.topic, storage_path=str(tmp_path)) as other:
                    read = max(version["version"] for version in await other.versions())
                    assert (await other.compact())["fragments_after"] == 1
                    await asyncio.sleep(0.15)
                    await other.create_index("id")
                    await other.compact()
                    assert read not in {v["version"] for v in await other.versions()}
        assert found == list(range(ROWS))
        await reader.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention_rows": 0},
        {"retention_bytes": -1},
        {"retention_seconds": "1"},
        {"keep_versions": 0},
        {"retention_waits_for": "groups"},
        {"retention_waits_for": ["readers"]},
        {"compaction": 1},
    ],
    ids=str,
)
async def test_invalid_retention_options_are_refused_before_the_topic_is_created(
    tmp_path: Path, wrong: dict[str, Any], make_home: Any
) -> None:
    home = make_home("persisting")
    with pytest.raises(StorageError, match=next(iter(wrong))):
        await home.open(**wrong)
    assert not (tmp_path / home.topic).exists()
