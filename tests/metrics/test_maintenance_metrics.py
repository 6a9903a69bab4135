"""Metrics of maintenance, search and integrity, in a real scrape over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyFileSystem
from support.waiting import until

from persisting.errors import InvalidArgument, StorageError
from persisting.queue import read_queue, write_queue

KINDS = {
    "persisting_compaction_duration_seconds": "histogram",
    "persisting_compacted_records": "counter",
    "persisting_fragments": "gauge",
    "persisting_dropped_records": "counter",
    "persisting_start_offset": "gauge",
    "persisting_unindexed_records": "gauge",
    "persisting_search_duration_seconds": "histogram",
    "persisting_damaged_files": "gauge",
    "persisting_upkeep_errors": "counter",
}


def records(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": n, "v": [float(n), 1.0], "text": f"word{n}"} for n in range(start, start + count)
    ]


async def in_steps(backend: Any, steps: int, count: int = 10) -> None:
    for step in range(steps):
        await backend.put_batch(records(count, step * count))
        await backend.flush()


async def becomes(get: Callable[[], float | None], value: float) -> None:
    """Wait until a value is reached."""

    async def is_reached() -> bool:
        return get() == value

    await until(is_reached, explain=lambda: f"it is {get()}, not {value}")


async def test_every_maintenance_metric_exists_when_a_bucket_opens(open_bucket, scrape):
    async with open_bucket("types"):
        found = scrape()
        assert KINDS.items() <= found.types.items()
        for name, kind in KINDS.items():
            suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[kind]
            assert found.value(name + suffix, "types") == 0, name


async def test_explicit_compaction_is_measured_and_counted(open_bucket, scrape):
    async with open_bucket("compacted", compaction=False) as backend:
        await in_steps(backend, 5)
        found = scrape()
        assert found.value("persisting_compaction_duration_seconds_count", "compacted") == 0
        await backend.compact()
        found = scrape()
        assert found.value("persisting_compaction_duration_seconds_count", "compacted") == 1
        assert found.value("persisting_compaction_duration_seconds_sum", "compacted") > 0
        assert found.value("persisting_compacted_records_total", "compacted") == 50
        assert found.value("persisting_fragments", "compacted") == 1
        await backend.compact()
        assert scrape().value("persisting_compacted_records_total", "compacted") == 50


async def test_background_compaction_is_counted(open_bucket, scrape):
    async with open_bucket("own") as backend:
        await in_steps(backend, 40, 2)

        def compacted() -> float:
            return float(scrape().value("persisting_compacted_records_total", "own") >= 64)

        await becomes(compacted, 1.0)
        assert scrape().value("persisting_compaction_duration_seconds_count", "own") > 0
        assert scrape().value("persisting_upkeep_errors_total", "own") == 0


async def test_fragment_gauge_matches_stats(open_bucket, scrape):
    async def exported() -> float | None:
        found = scrape().value("persisting_fragments", "fragments")
        assert found == (await backend.stats())["fragments"]
        return found

    async with open_bucket("fragments", compaction=False) as backend:
        for _ in range(3):
            await in_steps(backend, 4)
            assert await exported() >= 4
            await backend.compact()
            assert await exported() == 1
        await in_steps(backend, 2)
        await backend.retain(rows=15)
        assert await exported() == 2
    async with open_bucket("fragments", compaction=False) as backend:
        assert await exported() == 2


async def test_retention_counts_dropped_records_and_moves_the_start_offset(open_bucket, scrape):
    async with open_bucket("dropped", compaction=False) as backend:
        await in_steps(backend, 5)
        await backend.retain(rows=15)
        found = scrape()
        assert found.value("persisting_dropped_records_total", "dropped") == 30
        assert found.value("persisting_start_offset", "dropped") == 30
        await backend.retain(rows=15)
        assert scrape().value("persisting_dropped_records_total", "dropped") == 30
        await backend.retain(rows=0)
        found = scrape()
        assert found.value("persisting_dropped_records_total", "dropped") == 50
        assert found.value("persisting_start_offset", "dropped") == 50


async def test_reopened_bucket_exports_its_start_offset(open_bucket, scrape):
    async with open_bucket("again", compaction=False) as backend:
        await in_steps(backend, 5)
        await backend.retain(rows=15)
    async with open_bucket("again", compaction=False) as backend:
        start = (await backend.stats())["start_offset"]
        found = scrape()
        assert found.value("persisting_start_offset", "again") == start == 30
        assert found.value("persisting_dropped_records_total", "again") == 0


async def test_restore_moves_the_start_offset_back(open_bucket, scrape):
    async with open_bucket("back", compaction=False) as backend:
        await in_steps(backend, 5)
        await backend.tag("t")
        await backend.retain(rows=0)
        assert scrape().value("persisting_start_offset", "back") == 50
        await backend.restore("t")
        assert (await backend.stats())["start_offset"] == 0
        assert scrape().value("persisting_start_offset", "back") == 0


async def test_background_retention_updates_the_same_metrics(open_bucket, scrape):
    async with open_bucket("option", retention_rows=10) as backend:
        await in_steps(backend, 5)

        def kept() -> float:
            found = scrape()
            start = found.value("persisting_start_offset", "option")
            assert start is not None
            return start

        await becomes(kept, 40.0)
        await becomes(lambda: scrape().value("persisting_dropped_records_total", "option"), 40.0)


async def test_search_histogram_counts_every_search(open_bucket, scrape):
    name = "persisting_search_duration_seconds_count"
    async with open_bucket("searched") as backend:
        await backend.put_batch(records(20))
        await backend.search(vector=[1.0, 1.0])
        await backend.search(text="word3")
        await backend.search(vector=[1.0, 1.0], text="word3")
        assert scrape().value(name, "searched") == 3
        assert scrape().value("persisting_search_duration_seconds_sum", "searched") > 0
        await backend.query("id = 3")
        await backend.take([1])
        assert scrape().value(name, "searched") == 3


async def test_unindexed_records_are_exported(open_bucket, scrape):
    name = "persisting_unindexed_records"
    async with open_bucket("behind", compaction=False) as backend:
        await backend.put_batch(records(50))
        await backend.create_index("id")
        assert scrape().value(name, "behind") == 0
        await backend.put_batch(records(30, 50))
        await backend.flush()
        await becomes(lambda: scrape().value(name, "behind"), 30)
        (index,) = await backend.indexes()
        assert index["behind"] == 30
        await backend.put_batch(records(20, 80))
        await backend.flush()
        await becomes(lambda: scrape().value(name, "behind"), 50)
        await backend.drop_index("id")
        await backend.put({"id": 1000, "v": [0.0, 0.0], "text": ""})
        await backend.flush()
        await becomes(lambda: scrape().value(name, "behind"), 0)


async def test_unindexed_records_return_to_zero_when_the_index_catches_up(open_bucket, scrape):
    name = "persisting_unindexed_records"
    async with open_bucket("caught", compaction=False) as backend:
        await backend.put_batch([{"id": n} for n in range(100)])
        await backend.create_index("id")
        await backend.put_batch([{"id": n} for n in range(100, 9000)])
        await backend.flush()

        def behind() -> float:
            index = scrape().value(name, "caught")
            assert index is not None
            return index

        async def is_covered() -> bool:
            return (await backend.indexes())[0]["behind"] == 0

        await until(is_covered)
        await becomes(behind, 0)


async def test_damaged_files_are_exported_until_a_clean_verify(open_bucket, scrape, tmp_path):
    name = "persisting_damaged_files"
    async with open_bucket("damaged", compaction=False) as backend:
        await in_steps(backend, 3)
        await backend.verify()
        assert scrape().value(name, "damaged") == 0
        folder = tmp_path / "damaged" / "bucket_0" / "data.lance" / "data"
        victims = sorted(folder.glob("*.lance"))[:2]
        sound = [path.read_bytes() for path in victims]
        for path, data in zip(victims, sound, strict=True):
            path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
        assert len((await backend.verify())["damaged"]) == 2
        assert scrape().value(name, "damaged") == 2
        for path, data in zip(victims, sound, strict=True):
            path.write_bytes(data)
        assert (await backend.verify())["ok"]
        assert scrape().value(name, "damaged") == 0


async def test_failed_maintenance_is_counted_reported_and_retried(
    open_bucket, scrape, faults: FaultyFileSystem
):
    name = "persisting_upkeep_errors_total"
    async with open_bucket("failing", retention_rows=5, keep_versions=None) as backend:
        await backend.put_batch(records(10))
        await backend.flush()
        assert scrape().value(name, "failing") == 0
        (indexes := Path(backend._bucket.options.storage_path) / "indexes.json").write_bytes(b"[")
        backend._bucket.maintenance._index_specs = None
        await backend.put_batch(records(10, 10))
        await backend.flush()

        def failed() -> float:
            return float((scrape().value(name, "failing") or 0) > 0)

        await becomes(failed, 1.0)
        assert "indexes.json" in (await backend.stats())["upkeep_error"]
        indexes.unlink()
        await backend.put_batch(records(10, 20))
        await backend.flush()

        async def healed() -> bool:
            return (await backend.stats())["upkeep_error"] is None

        await until(healed)
        before = scrape().value(name, "failing")
        await backend.put_batch(records(10, 30))
        await backend.flush()
        await becomes(lambda: scrape().value("persisting_start_offset", "failing"), 30)
        assert scrape().value(name, "failing") == before


async def test_failed_compaction_is_not_counted_as_done(
    open_bucket, scrape, faults: FaultyFileSystem
):
    async with open_bucket("broken", compaction=False) as backend:
        await in_steps(backend, 4)
        faults.fail_always("sync_file")
        with pytest.raises(StorageError):
            await backend.compact()
        faults.heal()
        found = scrape()
        assert found.value("persisting_compaction_duration_seconds_count", "broken") == 0
        assert found.value("persisting_compacted_records_total", "broken") == 0
        await backend.compact()
        assert scrape().value("persisting_compacted_records_total", "broken") == 40
        assert (await backend.verify())["ok"]


async def test_invalid_calls_change_no_metric(open_bucket, scrape):
    async with open_bucket("wrong") as backend:
        await in_steps(backend, 2)
        for use in (backend.retain(), backend.restore("nope"), backend.create_index("nope")):
            with pytest.raises(InvalidArgument):
                await use
        found = scrape()
        for name, kind in KINDS.items():
            suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[kind]
            expected = 2 if name == "persisting_fragments" else 0
            assert found.value(name + suffix, "wrong") == expected, name


async def test_each_bucket_of_a_topic_has_its_own_series(tmp_path: Path, scrape):
    options = {"enable_metrics": True, "flush_interval": None, "compaction": False}
    async with await write_queue(
        topic="whole",
        storage_path=str(tmp_path),
        backend="persisting",
        num_buckets=2,
        backend_options=options,
    ) as writer:
        for start in (0, 20, 40):
            await writer.put(records(20, start))
            await writer.flush()
        rows = [b["total_count"] for b in (await writer.stats())["buckets"]]
        await writer.compact()
        await writer.search(vector=[1.0, 1.0])
        await writer.verify()
        found = scrape()
        assert [found.value("persisting_fragments", "whole", b) for b in range(2)] == [1, 1]
        await writer.retain(rows=0)
        found = scrape()
        for bucket in range(2):
            assert (
                found.value("persisting_compacted_records_total", "whole", bucket) == rows[bucket]
            )
            assert found.value("persisting_fragments", "whole", bucket) == 0
            assert found.value("persisting_search_duration_seconds_count", "whole", bucket) == 1
            assert found.value("persisting_dropped_records_total", "whole", bucket) == rows[bucket]
            assert found.value("persisting_start_offset", "whole", bucket) == rows[bucket]
            assert found.value("persisting_damaged_files", "whole", bucket) == 0
    assert "whole" not in scrape().topics()


async def test_group_lag_excludes_records_that_retention_removed(tmp_path: Path, scrape):
    name = "persisting_group_lag_records"
    place = {"topic": "short", "storage_path": str(tmp_path)}
    async with await write_queue(
        **place, backend="lance", num_buckets=1, backend_options={"compaction": False}
    ) as writer:
        for start in (0, 10, 20):
            await writer.put([{"id": n} for n in range(start, start + 10)])
            await writer.flush()
        reader = await read_queue(**place, group="g", enable_metrics=True)
        await reader.get(4)
        await reader.commit()
        assert scrape().value(name, "short", group="g") == 26
        await writer.retain(rows=10)
        await reader.commit()
        assert scrape().value(name, "short", group="g") == 10
        assert (await reader.stats())["group_lag"] == 10
        await reader.close()


async def test_reader_that_briefly_owns_a_bucket_leaves_no_series(tmp_path: Path, scrape):
    place = {"topic": "moment", "storage_path": str(tmp_path)}
    options = {"enable_metrics": True, "flush_interval": None}
    async with await write_queue(**place, backend="persisting", backend_options=options) as writer:
        await writer.put(records(20))
    async with await read_queue(**place) as reader:
        await reader.tag("t")
        await reader.compact()
        await reader.search(vector=[1.0, 1.0])
        assert "moment" not in scrape().topics()
