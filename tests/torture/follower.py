"""A process that follows a topic which others own, and notes what it is shown.

    python -m torture.follower QUEUES

It reads all buckets with blocking streams and takes no lock. Owners come, go and are killed
meanwhile. Every note is one line of JSON on standard output. The process ends when its standard
input is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from contextlib import aclosing
from typing import Any

from persisting.bucket.group_offsets import Committed
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.queue import read_queue
from persisting.topic.table_calls import Restores
from torture.worker import TOPIC, note

_PAUSE_SECONDS = 0.05


async def follow(topic: Any, bucket: int) -> None:
    """Follow a bucket forever, and continue after retention and restores as a topic's reader
    does."""
    offset, epoch = 0, None
    while True:
        try:
            async with aclosing(topic.bucket(bucket).pages(offset, None, True, epoch)) as pages:
                async for page in pages:
                    if page.rows:
                        seen = {"bucket": bucket, "first": page.first, "epoch": page.epoch}
                        note(seen=page.rows, **seen)
                        offset, epoch = page.first + len(page.rows), page.epoch
                    else:
                        ends = await topic.bucket(bucket).call(Restores())
                        offset = Committed(offset, epoch=epoch or 0).now(ends)
                        epoch = page.epoch
                        note(restored=bucket, epoch=epoch, offset=offset)
        except OffsetOutOfRange:
            offset = 0  # the earliest row that retention has left
            note(skipped=bucket)
        except StorageError as exc:  # a call of the owner failed, which reads for this process
            note(failed=bucket, error=repr(exc))
            await asyncio.sleep(_PAUSE_SECONDS)


async def follow_topic(queues: str) -> None:
    asyncio.get_running_loop().add_reader(0, os._exit, 0)
    where = {"topic": TOPIC, "storage_path": queues}
    async with await read_queue(**where, wait_for_topic=True) as reader:
        await asyncio.gather(*(follow(reader._topic, bucket) for bucket in reader.buckets))


def main() -> None:
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    try:
        asyncio.run(follow_topic(sys.argv[1]))
    except BaseException as exc:
        note(crashed=repr(exc), trace=traceback.format_exc())
        os._exit(1)


if __name__ == "__main__":
    main()
