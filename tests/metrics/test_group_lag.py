"""The exported lag of a consumer group."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import REGISTRY

from persisting.queue import read_queue, write_queue

NAME = "persisting_group_lag_records"


def lag() -> float | None:
    return REGISTRY.get_sample_value(NAME, {"topic": "lagging", "group": "g", "bucket": "0"})


async def test_group_lag_counts_uncommitted_records(tmp_path: Path) -> None:
    place = {"topic": "lagging", "storage_path": str(tmp_path)}
    async with await write_queue(**place, backend="lance", num_buckets=1) as writer:
        await writer.put([{"id": n} for n in range(10)])
        reader = await read_queue(**place, group="g", enable_metrics=True)
        assert lag() is None
        await reader.get(limit=4)
        await reader.commit()
        assert lag() == 6
        await reader.get()
        await reader.commit()
        assert lag() == 0
        await reader.close()
        assert lag() is None


async def test_group_lag_is_reported_by_the_current_reader_of_a_bucket(tmp_path: Path) -> None:
    place = {"topic": "lagging", "storage_path": str(tmp_path)}
    async with await write_queue(**place, backend="lance", num_buckets=1) as writer:
        await writer.put([{"id": n} for n in range(10)])
        first = await read_queue(**place, group="g", enable_metrics=True)
        second = await read_queue(**place, group="g", enable_metrics=True)
        for reader in (first, second):
            await reader.get(limit=1)
        holder, other = (first, second) if first.buckets else (second, first)
        await holder.commit()
        assert lag() == 9
        await other.close()
        assert lag() == 9
        await holder.close()
        assert lag() is None
