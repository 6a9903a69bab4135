"""What docs/guide/retention.md says about dropping, joining and cleaning."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with
from support.waiting import until

from persisting.backends import table_backend as backends
from persisting.bucket import maintenance
from persisting.errors import InvalidArgument, OffsetOutOfRange, TableError
from persisting.options import MIB, BucketOptions
from persisting.queue import LanceBackend, read_queue, write_queue
from persisting.table import compaction
from persisting.table.retention import Limits
from persisting.topic.groups import group_folder

pages = pytest.mark.parametrize("page", both("guide/retention.md"), ids=["en", "zh"])


def rows(first: int, count: int) -> list[dict[str, int]]:
    return [{"id": n} for n in range(first, first + count)]


async def filled(folder: Path, flushes: int = 10, **options: Any) -> LanceBackend:
    """A backend whose table has so many fragments of ten rows."""
    backend = LanceBackend(0, str(folder), **options)
    for n in range(flushes):
        await backend.put_batch(rows(n * 10, 10))
        await backend.flush()
    return backend


@pages
def test_the_options_are_listed_with_their_defaults(page: Path):
    listed = {
        code(row[0]): eval(code(row[1]))  # noqa: S307
        for row in table_with(page, "retention_rows", "keep_versions")
    }
    kept = ("retention", "compaction", "keep_versions")
    fields = {f.name: f.default for f in dataclasses.fields(BucketOptions)}
    assert listed == {k: v for k, v in fields.items() if k.startswith(kept)}


@pages
def test_the_numbers_are_those_of_the_code(page: Path):
    text = page.read_text("utf-8")
    assert f"{compaction.FULL_ROWS:,}" in text
    assert f"{compaction.FULL_BYTES // MIB} MiB" in text
    assert re.search(rf"\b{compaction._MANY} ", text)
    assert f"{maintenance._LEAST_FULL_ROWS:,}" in text
    assert maintenance._SHARE_OF_KEPT == 8
    assert re.search(rf" {maintenance._RARELY:.0f}\b", text)
    assert re.search(rf" {backends._SNAPSHOT_SECONDS:.0f} ", text)
    assert maintenance._pause(600.0, None) == maintenance._pause(6000.0, None) == 60.0
    assert maintenance._pause(None, None) <= 60.0
    assert (maintenance._pause(None, 10.0), maintenance._pause(None, 0.01)) == (1.0, 0.2)


async def test_whole_fragments_go_and_offsets_stay(tmp_path):
    async with await filled(tmp_path) as backend:
        assert await backend.retain(rows=25) == {"dropped": 70, "start_offset": 70}
        assert await backend.get() == rows(70, 30)
        assert await backend.get(75, 1) == rows(75, 1)
        stats = await backend.stats()
        assert (stats["start_offset"], stats["end_offset"]) == (70, 100)
        assert stats["total_count"] == backend.total_count() == 30
        for offset in (1, 69):
            with pytest.raises(OffsetOutOfRange, match="the first one left is 70"):
                await backend.get(offset)
        assert await backend.get(1000) == []


async def test_a_record_goes_if_it_lies_beyond_any_of_the_limits(tmp_path):
    async with await filled(tmp_path) as backend:
        size = (await backend.stats())["table_bytes"]
        assert (await backend.retain(rows=95, bytes=size * 10, seconds=1000))["dropped"] == 0
        assert (await backend.retain(rows=1000, bytes=size // 2))["dropped"] == 50
        assert (await backend.retain(rows=1000, seconds=0))["dropped"] == 50
        with pytest.raises(InvalidArgument, match="retain needs"):
            await backend.retain()


@pytest.mark.parametrize("limit", [{"retention_rows": 20}, {"retention_seconds": 0.001}])
async def test_an_option_drops_by_itself(tmp_path, limit):
    async with await filled(tmp_path, **limit) as backend:

        async def few() -> bool:
            return backend.total_count() <= 30

        await until(few)
        found = await backend.get()
        assert found == rows(100 - len(found), len(found))


async def test_without_limits_nothing_goes_and_nothing_below_a_limit_does(tmp_path):
    async with await filled(tmp_path / "none", flushes=3) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert backend.total_count() == 30
    async with await filled(tmp_path / "rows", retention_rows=25) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert backend.total_count() == 30


def test_with_a_limit_fragments_become_an_eighth_of_it_at_most():
    assert maintenance._fragment_limit(Limits(rows=80_000)).rows == 10_000
    assert maintenance._fragment_limit(Limits(rows=100)).rows == 1024
    assert maintenance._fragment_limit(Limits(nbytes=8 * MIB)).nbytes == MIB
    assert maintenance._fragment_limit(Limits()) == (compaction.FULL_ROWS, compaction.FULL_BYTES)


async def test_a_reader_that_fell_behind_the_start_raises_until_it_is_reset(tmp_path):
    options = {"num_buckets": 1, "backend": "lance", "storage_path": str(tmp_path)}
    async with (
        await write_queue(topic="t", **options) as writer,
        await read_queue(topic="t", storage_path=str(tmp_path), group="g") as member,
    ):
        for n in range(10):
            await writer.put(rows(n * 10, 10))
            await writer.flush()
        await member.get(limit=5)
        await member.commit()
        await writer.retain(rows=10)
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange, match="the first one left is 90"):
                await member.get()
        await member.reset()
        assert await member.get(limit=3) == rows(90, 3)
        assert await member.commit() == {0: 93}


async def test_groups_and_tags_hold_back_only_if_told(tmp_path):
    for waits, dropped in (([], 90), (["groups"], 30), (["tags"], 0), (["groups", "tags"], 0)):
        folder = tmp_path / "-".join(["t", *waits])
        options = {"num_buckets": 1, "backend": "lance", "storage_path": str(folder)}
        async with await write_queue(
            "t", **options, backend_options={"retention_waits_for": waits}
        ) as writer:
            for n in range(10):
                await writer.put(rows(n * 10, 10))
                await writer.flush()
                if n == 4:
                    await writer.tag("half")
            async with await read_queue("t", storage_path=str(folder), group="g") as member:
                await member.get(limit=35)
                await member.commit()
                assert (await writer.retain(rows=10))["dropped"] == dropped
                found = await member.get(limit=None, version="half")
                assert found == rows(0, 50)
            if waits == ["groups"]:
                for file in group_folder(folder / "t", "g").iterdir():
                    file.unlink()
                group_folder(folder / "t", "g").rmdir()
                assert (await writer.retain(rows=10))["dropped"] == 60


async def test_dropped_records_free_their_space_when_their_versions_go(tmp_path):
    def data(folder: Path) -> int:
        return sum(file.stat().st_size for file in (folder / "data.lance" / "data").iterdir())

    for keep, freed in ((0.001, True), (None, False)):
        folder = tmp_path / str(keep)
        async with await filled(folder, keep_versions=keep, compaction=False) as backend:
            before = data(folder)
            await backend.retain(rows=10)
            await backend.compact()
            assert (data(folder) < before / 5) == freed


async def test_a_version_without_a_tag_goes_and_one_with_a_tag_stays(tmp_path):
    async with await filled(tmp_path, flushes=3, keep_versions=0.001) as backend:
        await backend.tag("x")
        await backend.put_batch(rows(30, 10))
        assert (await backend.compact())["versions_removed"] > 0
        with pytest.raises(InvalidArgument, match="is not there"):
            await backend.get(version=1)
        assert await backend.get(version="x") == rows(0, 30)


async def test_readers_go_on_when_their_version_is_cleaned_up(tmp_path):
    async with await filled(tmp_path, flushes=40, keep_versions=0.001) as backend:
        stream = backend.get_stream()
        seen = [await anext(stream) for _ in range(15)]
        snapshot = backend._bucket.snapshot()
        await backend.compact()
        await backend.put_batch(rows(400, 10))
        await backend.compact()
        with pytest.raises(TableError):
            snapshot.records(0, None)  # its files are gone indeed
        seen += [record async for record in stream]
        assert seen[:400] == rows(0, 400)
        assert await backend.get(limit=400) == rows(0, 400)


async def test_compaction_keeps_every_offset_and_can_be_switched_off(tmp_path):
    async with await filled(tmp_path / "on", flushes=40) as backend:

        async def joined() -> bool:
            return (await backend.stats())["fragments"] < 40

        await until(joined)
        assert await backend.get() == rows(0, 400)
        assert await backend.take([0, 399, 57]) == [{"id": 0}, {"id": 399}, {"id": 57}]
    async with await filled(tmp_path / "off", flushes=40, compaction=False) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert (await backend.stats())["fragments"] == 40
        report = await backend.compact()
        assert (report["fragments_before"], report["fragments_after"]) == (40, 1)


async def test_upkeep_that_fails_is_told_and_loses_nothing(tmp_path, faults, caplog):
    await (await filled(tmp_path, flushes=40, compaction=False)).close()
    async with LanceBackend(0, str(tmp_path)) as backend:
        faults.fail_always("rename")
        await asyncio.to_thread(backend._bucket.maintenance._run)
        faults.heal()
        stats = await backend.stats()
        assert "injected fault" in stats["upkeep_error"]
        assert stats["fragments"] == 40
        assert "maintenance of" in caplog.text
        assert await backend.get() == rows(0, 400)
        await asyncio.to_thread(backend._bucket.maintenance._run)
        stats = await backend.stats()
        assert stats["upkeep_error"] is None
        assert stats["fragments"] < 40
        assert await backend.get() == rows(0, 400)
