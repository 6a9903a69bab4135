"""Write the fixture of this version: ``python write_fixture.py FOLDER``; exits as if killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import support.compat_topic as kept

from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.topic_files import TopicFolder

OPTIONS = {
    "enable_wal": True,
    "wal_sync_interval": 0.0,
    "flush_interval": None,
    "keep_versions": 0.001,
    "compression": "zstd",
}


async def write(folder: Path) -> None:
    where = {"topic": kept.TOPIC, "storage_path": str(folder)}
    writer = await write_queue(
        **where,
        num_buckets=kept.BUCKETS,
        backend="persisting",
        backend_options=OPTIONS,
        writer_id="writer",
    )
    await writer.put(kept.FLUSHED[:20], sequence=1)
    await writer.tag(kept.TAG)
    await writer.put(kept.FLUSHED[20:], sequence=2)
    await writer.flush()
    async with await read_queue(**where, group=kept.GROUP) as reader:
        await reader.get(kept.READ_BY_GROUP)
        await reader.commit()
    await writer.put(kept.LATER, sequence=3)
    await writer.create_index("n", "scalar")
    await writer.create_index("text")
    await writer.flush()
    await writer.compact()
    await asyncio.sleep(0.1)
    await writer.compact()
    await writer.put(kept.IN_THE_LOG, sequence=4)


async def write_backup(folder: Path) -> None:
    writer = await write_queue(
        topic="copied",
        storage_path=str(folder),
        num_buckets=1,
        backend="persisting",
        backend_options=OPTIONS,
    )
    await writer.put(kept.COPIED[:2])
    await writer.flush()
    await writer.put(kept.COPIED[2:])
    backup.create(TopicFolder.open(folder / "copied"), folder / "backup")
    await writer.close()
    shutil.rmtree(folder / "copied")


if __name__ == "__main__":
    fixture = Path(sys.argv[1])
    asyncio.run(write_backup(fixture))
    asyncio.run(write(fixture))
    os._exit(0)
