"""Topics that tests fill and read through queues and through Spark."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic.synchronous import SyncQueue
from support.children import python, wait_for_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUIET: dict[str, Any] = {"flush_interval": None, "compaction": False}
"""Options with which the table changes only on demand."""


def writer(
    folder: Path,
    topic: str = "t",
    *,
    buckets: int | None = None,
    column: str | None = None,
    backend: str | None = None,
    writer_id: str | None = None,
    local_socket: bool = True,
    **options: Any,
) -> SyncQueue:
    """Return a queue that owns the topic until it is closed; a new topic has two buckets."""
    new = not (folder / topic / "topic.json").exists()
    opening = write_queue(
        topic=topic,
        storage_path=str(folder),
        num_buckets=buckets or (2 if new else None),
        bucket_column=column,
        backend=backend or ("persisting" if new else None),
        backend_options={**QUIET, **options} if new else (options or None),
        writer_id=writer_id,
        local_socket=local_socket,
    )
    return _sync(opening)


def reader(folder: Path, topic: str = "t", **given: Any) -> SyncQueue:
    return _sync(read_queue(topic=topic, storage_path=str(folder), **given))


def _sync(opening: Any) -> SyncQueue:
    async def opened() -> SyncQueue:
        found: SyncQueue = (await opening).sync()
        return found

    return asyncio.run(opened())


def put(
    folder: Path, records: Iterable[dict[str, Any]] | pa.Table, topic: str = "t", **given: Any
) -> Path:
    """Put records to the topic in one flush and close it; return its folder."""
    with writer(folder, topic, **given) as queue:
        if isinstance(records, pa.Table):
            queue.put_arrow(records)
        else:
            queue.put_batch(list(records))
    return folder / topic


def put_in_flushes(queue: SyncQueue, count: int, each: int) -> None:
    """Put ``count`` rows, ``each`` of them in a flush."""
    for first in range(0, count, each):
        queue.put_batch(rows(each, first))
        queue.flush()


def content(folder: Path, topic: str = "t") -> dict[int, list[dict[str, Any]]]:
    """Return all records of the topic by bucket, as ``read_queue`` returns them."""
    found = {}
    with reader(folder, topic) as whole:
        buckets = list(whole.buckets)
    for bucket in buckets:
        with reader(folder, topic, bucket_id=bucket) as queue:
            found[bucket] = queue.get(None)
    return found


def stored(folder: Path, topic: str = "t") -> list[dict[str, Any]]:
    """Return all records of the topic, bucket by bucket."""
    return [record for records in content(folder, topic).values() for record in records]


def ids(folder: Path, topic: str = "t") -> list[Any]:
    """Return the ids of all records, sorted."""
    return sorted(record["id"] for record in stored(folder, topic))


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` records with ids from ``first`` on."""
    return [
        {"id": i, "text": f"row {i}", "score": i / 4, "even": i % 2 == 0}
        for i in range(first, first + count)
    ]


def load(spark: SparkSession, folder: Path, topic: str = "t", **options: Any) -> DataFrame:
    """Load the topic with Spark."""
    return spark.read.format("persisting").options(**texts(options)).load(str(folder / topic))


def save(df: DataFrame, folder: Path, topic: str = "t", mode: str = "append", **given: Any) -> Path:
    """Write a DataFrame to the topic; return the folder."""
    df.write.format("persisting").mode(mode).options(**texts(given)).save(str(folder / topic))
    return folder / topic


def texts(options: dict[str, Any]) -> dict[str, str]:
    """Return options as text, as Spark passes them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def records(df: DataFrame) -> list[dict[str, Any]]:
    """Return the rows as records in Spark's order, converted by Arrow."""
    return df.toArrow().to_pylist()


_OWN_ERROR = re.compile(r"^persisting\.errors\.(\w+): (.*)$", re.MULTILINE)


@contextmanager
def refused(error: str, words: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect our error of this name and wording inside the block, directly or through Spark."""
    from pyspark.errors import PySparkException

    with pytest.raises((PySparkException, StorageError)) as raised:
        yield raised
    if isinstance(raised.value, StorageError):
        found = [(type(raised.value).__name__, str(raised.value))]
    else:
        found = _OWN_ERROR.findall(str(raised.value))
    assert found, f"no error of ours: {raised.value}"
    name, text = found[-1]
    assert name == error, f"{name}: {text}"
    assert re.search(words, text), f"{words!r} is not in {text!r}"


def unreferenced(folder: Path, topic: str = "t") -> list[str]:
    """Return the data files to which no version of their table refers."""
    import lance

    found = []
    for root in sorted((folder / topic).glob("bucket_*/data.lance")):
        named = set()
        for version in lance.dataset(str(root)).versions():
            dataset = lance.dataset(str(root), version=version["version"])
            for fragment in dataset.get_fragments():
                named |= {file.path for file in fragment.metadata.files}
        found += [f.name for f in (root / "data").glob("*") if f.name not in named]
    return found


def is_sound(folder: Path, topic: str = "t") -> bool:
    """Whether every file of the topic has a checksum, and matches it."""
    with writer(folder, topic) as queue:
        found = queue.verify()
    return bool(found["ok"]) and not found["unchecked"]


def crashed_owner(folder: Path) -> None:
    """Make a topic of 50 records whose owner was killed: 20 are flushed, 30 only in its log."""
    with python(OWNER_OF_50_RECORDS, folder) as child:
        assert wait_for_line(child) == "put"
        child.send_signal(signal.SIGKILL)
        child.wait()


OWNER_OF_50_RECORDS = """
import asyncio, sys, time
from persisting.queue import write_queue

async def main():
    queue = await write_queue(
        topic="t", storage_path=sys.argv[1], num_buckets=2, backend="persisting",
        backend_options={"enable_wal": True, "flush_interval": None, "compaction": False},
    )
    await queue.put_batch([{"id": i, "new": None} for i in range(20)])
    await queue.flush()
    await queue.put_batch([{"id": i, "new": i / 2} for i in range(20, 50)])
    print("put", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
