"""A topic's owner in another process, and readers that follow its log and check what they see."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from persisting.queue import read_queue
from support.children import python, wait_for_line
from support.waiting import SECONDS, until

OWNER = """
import asyncio, json, sys
from persisting.queue import write_queue
async def main():
    root, words = sys.argv[1], json.loads(sys.argv[2])
    writer = await write_queue(topic="t", storage_path=root, writer_id="w",
        local_socket=False, **words)
    for line in sys.stdin:
        word, *given = line.split()
        if word == "put":
            start, count = map(int, given)
            records = [{"id": n, "text": f"word{n}"} for n in range(start, start + count)]
            await writer.put(records if count > 1 else records[0], sequence=start)
        elif word == "drop":
            await writer._topic.close_bucket(int(given[0]))
        elif word in ("tag", "restore"):
            await getattr(writer, word)(given[0])
        elif word == "retain":
            await writer.retain(rows=int(given[0]))
        else:
            await getattr(writer, word)()
        print("done", flush=True)
asyncio.run(main())
"""


class Owner:
    """A process that owns a topic of records with the fields ``id`` and ``text``."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def tell(self, *words: object) -> None:
        """Have it do something, and return when it has: ``put 0 10``, ``flush``, ``close``, …"""
        self.send(*words)
        assert wait_for_line(self.child) == "done"

    def send(self, *words: object) -> None:
        """Like :meth:`tell`, but without waiting for the answer."""
        assert self.child.stdin is not None
        self.child.stdin.write(" ".join(map(str, words)) + "\n")
        self.child.stdin.flush()

    async def does(self, *words: object) -> None:
        """Like :meth:`tell`, while readers of this process continue."""
        await asyncio.to_thread(self.tell, *words)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


@contextmanager
def owner(
    root: Path, *, buckets: int = 1, interval: float = 0.0, **options: object
) -> Iterator[Owner]:
    """Own the topic ``t`` in another process, which flushes only on demand by default."""
    settings = {
        "enable_wal": True,
        "wal_sync_interval": interval,
        "flush_interval": None,
        **options,
    }
    words = {
        "backend": "persisting",
        "num_buckets": buckets,
        "bucket_column": "id",
        "backend_options": settings,
    }
    with python(OWNER, root, json.dumps(words)) as child:
        yield Owner(child)


class Seen(NamedTuple):
    """A record that a reader was shown."""

    offset: int
    epoch: int
    record: dict[str, Any]


class Following:
    """What a reader that follows all buckets of a topic was shown, in order."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.by_bucket: defaultdict[int, list[Seen]] = defaultdict(list)

    @property
    def ids(self) -> list[int]:
        """The ids of all records, sorted."""
        return sorted(seen.record["id"] for rows in self.by_bucket.values() for seen in rows)

    async def reaches(self, count: int, seconds: float = SECONDS) -> None:
        """Wait until that many records were shown."""

        async def enough() -> bool:
            return sum(map(len, self.by_bucket.values())) >= count

        await until(enough, seconds)

    def check_against(self, stored: dict[int, list[dict[str, Any]]]) -> None:
        """Fail unless each bucket was shown from its first record on, each record once, in order,
        and at the offset where it is stored."""
        for bucket, rows in self.by_bucket.items():
            assert [seen.offset for seen in rows] == list(range(len(rows)))
            assert [seen.record for seen in rows] == stored[bucket][: len(rows)]

    async def follow(self, topic: Any, bucket: int) -> None:
        async with aclosing(topic.bucket(bucket).pages(0, None, True)) as pages:
            async for first, rows, epoch in pages:
                self.by_bucket[bucket] += [Seen(first + n, epoch, r) for n, r in enumerate(rows)]


@asynccontextmanager
async def following(root: Path, topic: str = "t") -> AsyncIterator[Following]:
    """Follow all buckets of a topic that another process owns, or will own."""
    async with await read_queue(
        topic=topic, storage_path=str(root), wait_for_topic=60, local_socket=False
    ) as reader:
        seen = Following(len(reader.buckets))
        tasks = [
            asyncio.create_task(seen.follow(reader._topic, bucket)) for bucket in reader.buckets
        ]
        try:
            yield seen
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def stored(root: Path, topic: str = "t") -> dict[int, list[dict[str, Any]]]:
    """Return the records of each bucket, as a new reader sees them."""
    async with await read_queue(topic=topic, storage_path=str(root)) as reader:
        return {
            bucket: (await reader._topic.bucket(bucket).read(0, None)).rows
            for bucket in reader.buckets
        }
