"""Metrics of one bucket, in a real scrape over HTTP."""

from __future__ import annotations

import shutil
import socket

import pytest
from support.faults import FaultyFileSystem

from persisting import metrics
from persisting.errors import SchemaError, StorageError
from persisting.queue import PersistingBackend

SPECIFIED = {
    "persisting_records": "counter",
    "persisting_buffer_size": "gauge",
    "persisting_flush_duration_seconds": "histogram",
    "persisting_wal_size_bytes": "gauge",
}


async def test_specified_metrics_have_their_types(open_bucket, scrape):
    async with open_bucket("types"):
        assert SPECIFIED.items() <= scrape().types.items()


async def test_record_counter_counts_acknowledged_records(open_bucket, scrape):
    async with open_bucket("counted") as backend:
        await backend.put({"n": 1})
        await backend.put_batch([{"n": n} for n in range(10)])
        with pytest.raises(SchemaError):
            await backend.put({"n": "text"})
        assert scrape().value("persisting_records_total", "counted") == 11


async def test_failed_put_is_not_counted(open_bucket, scrape, faults: FaultyFileSystem):
    async with open_bucket("refused", wal_sync_interval=0.0) as backend:
        await backend.put({"n": 1})
        faults.fail_always("sync")
        with pytest.raises(StorageError):
            await backend.put({"n": 2})
        faults.heal()
        found = scrape()
        assert found.value("persisting_records_total", "refused") == 1
        assert found.value("persisting_wal_errors_total", "refused") == 1


async def test_gauges_match_stats(open_bucket, scrape):
    async with open_bucket("gauges", wal_sync_interval=0.0) as backend:
        for n in range(3):
            await backend.put_batch([{"n": n}] * 100)
            stats, found = await backend.stats(), scrape()
            assert found.value("persisting_buffer_size", "gauges") == stats["buffer_count"] > 0
            assert found.value("persisting_wal_size_bytes", "gauges") == stats["wal_size"] > 0
            assert found.value("persisting_wal_unsynced_frames", "gauges") == 0
        await backend.flush()
        found = scrape()
        assert found.value("persisting_buffer_size", "gauges") == 0
        assert found.value("persisting_wal_size_bytes", "gauges") == 0


async def test_unsynced_frames_are_exported(open_bucket, scrape):
    async with open_bucket("lag", wal_sync_interval=60.0) as backend:
        await backend.put({"n": 1})
        assert scrape().value("persisting_wal_unsynced_frames", "lag") > 0


async def test_flush_histogram_ranges_from_1_ms_to_10_s(open_bucket, scrape):
    async with open_bucket("flushes") as backend:
        for n in range(3):
            await backend.put({"n": n})
            await backend.flush()
        await backend.flush()
        found, name = scrape(), "persisting_flush_duration_seconds"
        bounds = [
            float(s.labels["le"])
            for s in found.samples
            if s.name == f"{name}_bucket" and s.labels["topic"] == "flushes"
        ]
        assert (bounds[0], bounds[-2], bounds[-1]) == (0.001, 10.0, float("inf"))
        assert found.value(f"{name}_count", "flushes") == 3
        assert 0 < found.value(f"{name}_sum", "flushes") < 60


async def test_sync_histogram_counts_syncs(open_bucket, scrape):
    async with open_bucket("syncs", wal_sync_interval=0.0) as backend:
        for n in range(4):
            await backend.put({"n": n})
        assert scrape().value("persisting_wal_sync_duration_seconds_count", "syncs") == 4


async def test_failed_flush_is_counted_as_an_error(open_bucket, scrape, faults: FaultyFileSystem):
    async with open_bucket("failing") as backend:
        await backend.put({"n": 1})
        faults.fail_always("sync_file")
        with pytest.raises(StorageError):
            await backend.flush()
        faults.heal()
        assert scrape().value("persisting_flush_errors_total", "failing") >= 1
        assert scrape().value("persisting_flush_duration_seconds_count", "failing") == 0


async def test_two_buckets_in_one_process_have_separate_series(open_bucket, scrape):
    async with open_bucket("pair", 0) as first, open_bucket("pair", 1) as second:
        await first.put({"n": 1})
        await second.put_batch([{"n": n} for n in range(5)])
        found = scrape()
        assert found.value("persisting_records_total", "pair", 0) == 1
        assert found.value("persisting_records_total", "pair", 1) == 5
        await first.close()
        found = scrape()
        assert found.value("persisting_records_total", "pair", 0) is None
        assert found.value("persisting_records_total", "pair", 1) == 5


async def test_closing_a_bucket_removes_its_series(open_bucket, scrape):
    backend = open_bucket("closing")
    await backend.put({"n": 1})
    assert "closing" in scrape().topics()
    await backend.close()
    assert "closing" not in scrape().topics()


async def test_closing_a_reader_keeps_the_series_of_the_writer(open_bucket, scrape):
    async with open_bucket("shared") as writer:
        await writer.put({"n": 1})
        await open_bucket("shared", read_only=True).close()
        assert scrape().value("persisting_records_total", "shared") == 1


async def test_failed_open_leaves_no_series(open_bucket, scrape):
    async with open_bucket("locked") as owner:
        with pytest.raises(StorageError):
            open_bucket("locked")
        await owner.put({"n": 1})
        assert scrape().value("persisting_records_total", "locked") == 1
    assert "locked" not in scrape().topics()


async def test_nothing_is_exported_without_enable_metrics(open_bucket, scrape):
    async with open_bucket("silent", enable_metrics=False) as backend:
        await backend.put({"n": 1})
        assert "silent" not in scrape().topics()


async def test_recovery_is_counted_and_sets_the_gauges(open_bucket, scrape, tmp_path):
    async with open_bucket("left") as backend:
        await backend.put_batch([{"n": n} for n in range(50)])
        shutil.copytree(tmp_path / "left", tmp_path / "found")
    async with open_bucket("found") as backend:
        stats, found = await backend.stats(), scrape()
        assert found.value("persisting_recoveries_total", "found") == 1
        assert found.value("persisting_recovered_records_total", "found") == 50
        assert found.value("persisting_records_total", "found") == 0
        assert found.value("persisting_buffer_size", "found") == stats["buffer_count"] == 50
        assert found.value("persisting_wal_size_bytes", "found") == stats["wal_size"] > 0


async def test_bucket_without_a_topic_folder_is_labelled_with_its_own_folder(tmp_path, scrape):
    async with PersistingBackend(7, str(tmp_path / "alone"), enable_metrics=True) as backend:
        await backend.put({"n": 1})
        assert scrape().value("persisting_records_total", "alone", 7) == 1


def test_metrics_server_listens_on_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5):
        pass


def test_metrics_server_can_be_shut_down():
    server = metrics.serve(0)
    port = server.server_port
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
