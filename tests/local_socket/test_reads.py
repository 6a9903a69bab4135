"""Reads through the socket that take several messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.owner_process import OwnerProcess
from support.topic_places import ids

from persisting.cluster.client import RemoteBucketClient
from persisting.errors import BucketLocked
from persisting.queue import QueueWriter, read_queue, write_queue

FRAGMENTS = 4
ROWS = 300
"""Rows of a fragment, 3 MB together: a message takes 4 MiB."""
OPTIONS: dict[str, Any] = {"enable_wal": True, "flush_interval": None, "compaction": False}


async def filled(folder: Path, owner: OwnerProcess) -> QueueWriter:
    """Return a writer of a topic whose bucket another process owns."""
    given = {"backend": "persisting", "backend_options": OPTIONS, "num_buckets": 1}
    await owner.own(folder, **given)
    writer = await write_queue(topic="t", storage_path=str(folder))
    for first in range(0, FRAGMENTS * ROWS, ROWS):
        await writer.put([{"id": n, "text": "x" * 10_000} for n in range(first, first + ROWS)])
        await writer.flush()
    return writer


@pytest.mark.parametrize("change", ["retain", "restore"])
async def test_get_of_all_records_is_whole_if_the_bucket_changes_between_two_messages(
    tmp_path: Path, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async with await filled(tmp_path, owner) as writer:
        await writer.tag("before")
        last = {"id": FRAGMENTS * ROWS}
        await writer.put(last)
        ask, changes = RemoteBucketClient._ask, []

        async def changed_after_the_first(client: Any, op: str, args: Any) -> Any:
            reply = await ask(client, op, args)
            if op == "get" and not changes:
                changes.append(change)
                if change == "retain":
                    await writer.retain(rows=ROWS)
                else:
                    await writer.restore("before")
            return reply

        monkeypatch.setattr(RemoteBucketClient, "_ask", changed_after_the_first)
        async with await read_queue(topic="t", storage_path=str(tmp_path)) as reader:
            found = ids(await reader.get(None))
            rest = ids(await reader.get(None))
    assert changes == [change]
    assert rest == [], "the first call has returned all there is"
    if change == "retain":
        assert found == list(range((FRAGMENTS - 1) * ROWS, FRAGMENTS * ROWS + 1))
    else:
        assert found == list(range(FRAGMENTS * ROWS))


async def test_reader_beside_a_writer_without_a_socket_reads_buckets_of_another_process(
    tmp_path: Path, owner: OwnerProcess
) -> None:
    """The writer of this process cannot open the bucket; the reader reads the files."""
    await owner.own(tmp_path, backend="persisting", backend_options=OPTIONS, num_buckets=1)
    await owner.ask("put", args=[[{"id": n} for n in range(10)]])
    here: dict[str, Any] = {"topic": "t", "storage_path": str(tmp_path), "local_socket": False}
    async with await read_queue(**here) as reader, await write_queue(**here) as writer:
        with pytest.raises(BucketLocked):
            await writer.put({"id": 10})
        assert sorted(record["id"] for record in await reader.get(None)) == list(range(10))
        assert len([record async for record in reader.get_stream(0)]) == 10
        assert await reader.count() == 10
