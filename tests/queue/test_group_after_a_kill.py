"""An open member of a group reads everything that a killed producer had acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_runner import files_in
from support.following import owner
from support.waiting import SECONDS

from persisting.queue import read_queue


def stored(topic: Path) -> dict[str, bytes]:
    """Every file of a topic except those of its groups, which the member itself writes."""
    return {name: data for name, data in files_in(topic).items() if not name.startswith("groups/")}


@pytest.mark.parametrize("buckets", [1, 4])
async def test_open_member_reads_all_acknowledged_records_without_a_new_owner(
    tmp_path: Path, buckets: int
) -> None:
    with owner(tmp_path, buckets=buckets) as producer:
        await producer.does("put", 0, 100)
        await producer.does("flush")
        async with await read_queue("t", storage_path=str(tmp_path), group="g") as member:
            first = await member.get(limit=10, wait=True, timeout=SECONDS)
            await producer.does("put", 100, 100)
            producer.kill()
            before = stored(tmp_path / "t")
            seen = [record["id"] for record in first]
            while len(seen) < 200:
                page = await member.get(wait=True, timeout=SECONDS)
                assert page, f"the member got only {len(seen)} records"
                seen += [record["id"] for record in page]
            await member.commit()
            assert sorted(seen) == list(range(200))
            assert (await member.stats())["group_lag"] == 0
        # Nobody has opened a bucket: locks, logs and tables are as the killed owner left them.
        assert stored(tmp_path / "t") == before
        assert any(name.endswith(".wal") for name in before)
