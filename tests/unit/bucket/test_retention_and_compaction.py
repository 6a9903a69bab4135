"""Retention and compaction of one backend: limits, disk space, and the option that turns it off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from persisting.errors import InvalidArgument
from persisting.queue import LanceBackend


def rows(first: int, count: int) -> list[dict[str, int]]:
    return [{"id": n} for n in range(first, first + count)]


async def filled(folder: Path, flushes: int = 10, **options: Any) -> LanceBackend:
    """Return a backend whose table has ``flushes`` fragments of ten rows."""
    backend = LanceBackend(0, str(folder), **options)
    for n in range(flushes):
        await backend.put_batch(rows(n * 10, 10))
        await backend.flush()
    return backend


async def test_retain_drops_records_beyond_any_limit(tmp_path):
    async with await filled(tmp_path) as backend:
        size = (await backend.stats())["table_bytes"]
        assert (await backend.retain(rows=95, bytes=size * 10, seconds=1000))["dropped"] == 0
        assert (await backend.retain(rows=1000, bytes=size // 2))["dropped"] == 50
        assert (await backend.retain(rows=1000, seconds=0))["dropped"] == 50
        with pytest.raises(InvalidArgument, match="retain needs"):
            await backend.retain()


async def test_maintenance_drops_nothing_within_the_limits(tmp_path):
    async with await filled(tmp_path / "none", flushes=3) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert backend.total_count() == 30
    async with await filled(tmp_path / "rows", retention_rows=25) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert backend.total_count() == 30


async def test_dropped_records_free_disk_space_when_their_versions_are_removed(tmp_path):
    def data(folder: Path) -> int:
        return sum(file.stat().st_size for file in (folder / "data.lance" / "data").iterdir())

    for keep, freed in ((0.001, True), (None, False)):
        folder = tmp_path / str(keep)
        async with await filled(folder, keep_versions=keep, compaction=False) as backend:
            before = data(folder)
            await backend.retain(rows=10)
            await backend.compact()
            assert (data(folder) < before / 5) == freed


async def test_compaction_keeps_offsets_and_can_be_disabled(tmp_path):
    async with await filled(tmp_path / "on", flushes=40) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert (await backend.stats())["fragments"] < 40
        assert await backend.get() == rows(0, 400)
        assert await backend.take([0, 399, 57]) == [{"id": 0}, {"id": 399}, {"id": 57}]
    async with await filled(tmp_path / "off", flushes=40, compaction=False) as backend:
        await asyncio.to_thread(backend._bucket.maintenance._run)
        assert (await backend.stats())["fragments"] == 40
        report = await backend.compact()
        assert (report["fragments_before"], report["fragments_after"]) == (40, 1)
