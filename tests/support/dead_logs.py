"""Topics whose owner died: copies of an open topic, with a log that its buckets share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persisting.queue import read_queue, write_queue
from persisting.topic.topic_files import TopicFolder

LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}


async def dead_topic(
    home: Path,
    *puts: Sequence[dict[str, Any]],
    flush_after: int = 0,
    flush_buckets: Sequence[int] = (),
    buckets: int = 2,
    keep_released: bool = False,
) -> Path:
    """Return the folder of a topic ``t`` below ``home`` whose owner died after these puts.

    Each put is in a segment of its own. After the first ``flush_after`` puts everything was
    flushed, and at the end the buckets in ``flush_buckets``. With ``keep_released`` the segments
    that were released then are there again, as after power loss.
    """
    released: dict[Path, bytes] = {}
    live = home.parent / f"{home.name}-live"
    writer = await write_queue(
        topic="t",
        storage_path=str(live),
        num_buckets=buckets,
        backend="persisting",
        backend_options=LOGGED,
    )
    async with writer:
        local = writer._topic._local
        for number, records in enumerate(puts, start=1):
            await writer.put(list(records))
            local._log.group_commit.seal()
            if number == flush_after:
                paths = segments_of(live / "t") if keep_released else []
                released = {path.relative_to(live): path.read_bytes() for path in paths}
                await writer.flush()
        for bucket in flush_buckets:
            (await local.backend(bucket)).bucket.flusher.flush()
        shutil.copytree(live, home, ignore=shutil.ignore_patterns(".sockets"))
    for path, data in released.items():
        (home / path).write_bytes(data)
    shutil.rmtree(live)
    return home / "t"


def segments_of(topic: Path) -> list[Path]:
    """Return the segments of the only log of a topic."""
    (log,) = logs_of(topic)
    return sorted(log.glob("*.wal"))


def logs_of(topic: Path) -> list[Path]:
    return sorted(path for path in (topic / "log").glob("*") if path.name != "trimmed")


async def numbers_in(topic: Path, **options: Any) -> list[int]:
    """Own the buckets of a topic once, which replays its logs; return the field ``n`` of all
    records, sorted."""
    await asyncio.to_thread(TopicFolder.open(topic).recover)
    reader = await read_queue(topic=topic.name, storage_path=str(topic.parent))
    async with reader:
        return sorted(record["n"] for record in await reader.get(limit=None, **options))
