"""Spark's writes to topics in an object store, with the calls that Spark makes.

Credentials are in the environment, as for Spark's workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, environment_of, url
from support.spark.writes import DirectPipe, DirectStore, sink_source
from support.store_buckets import is_free

from persisting.bucket import bulk_import
from persisting.bucket.store_notes import StoreHandovers
from persisting.errors import (
    BucketLocked,
    InvalidArgument,
    SchemaError,
    StorageError,
    TableError,
)
from persisting.queue import read_queue, write_queue
from persisting.spark import write_task
from persisting.spark.source_options import read_options, write_options
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress, parse
from persisting.table import bulk_write
from persisting.table.fenced_commit import FencedCommitter
from persisting.table.store_bulk_files import StoreBulkFiles

LEASE = 1.0


@pytest.fixture
def home(server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch) -> StoreAddress:
    """An address for topics, with credentials in the environment."""
    for name, value in environment_of(server.options()).items():
        monkeypatch.setenv(name, value)
    return parse(url(prefix))


def rows(count: int, first: int = 0, **more: Any) -> pa.Table:
    ids = range(first, first + count)
    columns = {name: [value] * count for name, value in more.items()}
    return pa.table({"id": ids, "text": [f"row {number}" for number in ids], **columns})


def records(home: StoreAddress, topic: str = "t") -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with await read_queue(topic=topic, storage_path=str(home)) as reader:
            return await reader.get(limit=10_000)

    return sorted(asyncio.run(read()), key=lambda record: record["id"])


def ids(home: StoreAddress, topic: str = "t") -> list[int]:
    return [record["id"] for record in records(home, topic)]


def store_of(home: StoreAddress, topic: str = "t") -> ObjectStore:
    return open_store(home / topic, StorageOptions())


def data_objects(home: StoreAddress, topic: str = "t") -> set[str]:
    return {key for key in store_of(home, topic).list("") if "/data.lance/data/" in key}


def stored_rows(home: StoreAddress, **options: str) -> int:
    """Return how many rows a batch read of Spark finds."""
    source = sink_source(home / "t", options)  # type: ignore[arg-type]
    reader = source.reader(source.schema())
    return sum(
        batch.num_rows for partition in reader.partitions() for batch in reader.read(partition)
    )


def logs(home: StoreAddress, topic: str = "t") -> list[str]:
    return store_of(home, topic).list("log")


class TestBatches:
    def test_topic_that_spark_creates_is_continued_by_a_queue_and_by_spark(
        self, home: StoreAddress
    ) -> None:
        DirectStore(home).save(rows(20), parts=2, numBuckets=2)

        async def put() -> None:
            async with await write_queue(topic="t", storage_path=str(home)) as writer:
                await writer.put({"id": 20, "text": "row 20"})

        asyncio.run(put())
        DirectStore(home).save(rows(2, 21, score=0.5))
        expected = [{"id": n, "text": f"row {n}", "score": None} for n in range(21)]
        expected += [{"id": n, "text": f"row {n}", "score": 0.5} for n in (21, 22)]
        assert records(home) == expected
        assert logs(home) == []
        assert all(is_free(store_of(home), bucket) for bucket in range(2))

    def test_overwrite_replaces_all_rows(self, home: StoreAddress) -> None:
        DirectStore(home).save(rows(10), numBuckets=2)
        DirectStore(home).save(rows(3, 100), mode="overwrite", writeId="again")
        DirectStore(home).save(rows(1, 103))
        DirectStore(home).save(rows(3, 100), mode="overwrite", writeId="again")
        assert ids(home) == [100, 101, 102, 103]

    def test_repeated_write_completes_the_buckets_that_lack_it(
        self, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DirectStore(home).save(rows(5), numBuckets=2)
        adopt = bulk_import.adopt

        def fail(bucket: Any, *args: Any, **kwargs: Any) -> int:
            if bucket.number == 1:
                raise StorageError("the store is full")
            return adopt(bucket, *args, **kwargs)

        before = data_objects(home)
        with monkeypatch.context() as patch:
            patch.setattr(bulk_import, "adopt", fail)
            with pytest.raises(StorageError, match="1 of 2 buckets have stored their rows before"):
                DirectStore(home).save(rows(20, 5), parts=2, writeId="w")
        kept = data_objects(home) - before
        assert kept, "the first bucket has its rows"
        assert all(key.startswith("bucket_0/") for key in kept)
        for _ in range(2):
            DirectStore(home).save(rows(20, 5), parts=3, writeId="w")
            assert ids(home) == list(range(25))
        assert {key for key in data_objects(home) if key.startswith("bucket_0/")} >= {
            key for key in kept if key.startswith("bucket_0/")
        }

    def test_commit_whose_answer_was_lost_is_stored_once(
        self, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = FencedCommitter.commit
        lost = []

        def lose(self: FencedCommitter, action: str, *args: Any, **kwargs: Any) -> None:
            commit(self, action, *args, **kwargs)
            if action == "append to":
                self._must_fence = True
                lost.append(action)
                raise TableError("the answer was lost")

        monkeypatch.setattr(FencedCommitter, "commit", lose)
        DirectStore(home).save(rows(8), numBuckets=2)
        assert lost == ["append to"] * 2
        assert ids(home) == list(range(8))

    def test_failed_task_leaves_no_object(
        self, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(write_task, "_FRAGMENT_ROWS", 100)
        wrote = []
        write = bulk_write.write_files
        monkeypatch.setattr(
            bulk_write, "write_files", lambda *args: wrote.append(write(*args)) or wrote[-1]
        )
        # Spark passes 1,000 rows at once: those of the first batch are written before the failure.
        vectors = pa.array([[1.0, 2.0]] * 1500 + [[1.0]])
        with pytest.raises(SchemaError, match="vectors of 2 floats"):
            DirectStore(home).save(
                rows(1501).append_column("v", vectors), numBuckets=2, vectors="v:2"
            )
        assert len(wrote) >= 2
        assert data_objects(home) == set()

    def test_missing_files_are_detected_before_the_commit(
        self, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DirectStore(home).save(rows(5), numBuckets=1)
        check = StoreBulkFiles.check

        def remove_first(self: StoreBulkFiles, fragments: list[dict[str, Any]]) -> None:
            self.remove([fragments[0]["files"][0]["path"]])
            check(self, fragments)

        with monkeypatch.context() as patch:
            patch.setattr(StoreBulkFiles, "check", remove_first)
            with pytest.raises(StorageError, match="was removed before it was committed"):
                DirectStore(home).save(rows(5, 5))
        assert ids(home) == list(range(5))


class TestRequests:
    @pytest.mark.parametrize("tasks", [1, 4])
    def test_requests_of_an_append_are_those_of_the_price_table(
        self, home: StoreAddress, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tasks: int
    ) -> None:
        buckets = 4
        DirectStore(home).save(rows(40), numBuckets=buckets)
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
        DirectStore(home).save(rows(40, 40))  # probes the store
        before = data_objects(home)
        proxy.reset_counts()
        DirectStore(home).save(rows(40, 80), parts=tasks)
        beats = [kind for kind in proxy.seen if kind.startswith("PUT-if-match") and "/log/" in kind]
        counts = Counter(kind.partition(" ")[0].partition("-")[0] for kind in proxy.seen)
        counts["PUT"] -= len(beats)  # as many as the commit has thirds of a lease
        assert ids(home) == list(range(120))
        files = len(data_objects(home) - before) // 2  # each has one with the times of arrival
        assert files >= buckets
        assert counts.pop("GET") <= 10 * buckets + 6 + files  # threads share what one has just read
        assert counts == {
            "PUT": 7 * buckets + 1 + 2 * files,
            "LIST": 8 * buckets + 1,
            "HEAD": files,
            "DELETE": 1,
        }

    def test_requests_beside_a_living_owner_are_those_of_the_price_table(
        self, home: StoreAddress, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without heartbeats, and without the GET of both sides while they wait."""
        buckets = files = 4
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
        options = {"lease": 30.0, "flush_interval": None}

        async def write() -> Counter[str]:
            where: dict[str, Any] = {"topic": "t", "storage_path": str(home)}
            async with await write_queue(
                **where, num_buckets=buckets, durable=True, backend_options=options
            ) as writer:
                await writer.put([{"id": n, "text": f"row {n}"} for n in range(40)])
                await writer.flush()
                save = DirectStore(home).save
                await asyncio.to_thread(save, rows(40, 40))
                before = data_objects(home)
                proxy.reset_counts()
                await asyncio.to_thread(save, rows(40, 80))
                seen = [kind for kind in proxy.seen if not kind.endswith("/lease.json")]
                assert len(data_objects(home) - before) == 2 * files
                return Counter(kind.partition(" ")[0].partition("-")[0] for kind in seen)

        counts = asyncio.run(write())
        assert counts["PUT"] == 3 + 7 * buckets + 2 * files
        assert counts["LIST"] == 4 + 5 * buckets
        assert counts["DELETE"] == 6


class TestOwners:
    def test_rows_are_handed_over_to_a_living_owner(self, home: StoreAddress) -> None:
        async def write() -> None:
            where: dict[str, Any] = {"topic": "t", "storage_path": str(home), "num_buckets": 2}
            options = {"lease": LEASE, "flush_interval": None}
            async with await write_queue(**where, durable=True, backend_options=options) as writer:
                await writer.put([{"id": n, "text": f"row {n}"} for n in range(10)])
                for _ in range(2):
                    save = DirectStore(home).save
                    await asyncio.to_thread(save, rows(5, 10, score=1.0), parts=2, writeId="w")
                await writer.put({"id": 15, "text": "row 15", "score": 2.0})
                with pytest.raises(SchemaError, match="'score'"):
                    await asyncio.to_thread(save, rows(5, 16, score=[1]))
                await asyncio.to_thread(save, rows(0, 16), mode="overwrite", writeId="empty")
                await writer.put({"id": 99})
                await asyncio.to_thread(save, rows(2, 100))

        asyncio.run(write())
        assert ids(home) == [99, 100, 101]
        assert store_of(home).list("handover") == []

    def test_micro_batches_are_handed_over_to_a_living_owner(self, home: StoreAddress) -> None:
        DirectStore(home).save(rows(20), topic="in", numBuckets=2)

        async def write() -> None:
            where: dict[str, Any] = {"topic": "out", "storage_path": str(home), "num_buckets": 2}
            options = {"lease": LEASE, "flush_interval": None}
            async with await write_queue(**where, durable=True, backend_options=options) as writer:
                await writer.put({"id": 100, "text": "row 100"})
                pipe = DirectPipe(home)  # type: ignore[arg-type]
                await asyncio.to_thread(pipe.run, {"maxOffsetsPerTrigger": 8})
                pipe.forget_last_commit()
                await asyncio.to_thread(pipe.run)
                await writer.put({"id": 101, "text": "row 101"})

        asyncio.run(write())
        assert ids(home, "out") == [*range(20), 100, 101]

    def test_owner_that_does_not_answer_is_named_before_any_task_runs(
        self, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(StoreHandovers, "called", lambda self: None)

        async def write() -> None:
            where: dict[str, Any] = {"topic": "t", "storage_path": str(home), "num_buckets": 2}
            async with await write_queue(**where, durable=True) as writer:
                await writer.put([{"id": n, "text": f"row {n}"} for n in range(10)])
                save = DirectStore(home).save
                await asyncio.to_thread(save, rows(5, 10, score=1.0), ownerTimeout=1)

        with pytest.raises(
            BucketLocked, match=f"process {os.getpid()} on .* did not answer within"
        ):
            asyncio.run(write())
        assert records(home) == [{"id": n, "text": f"row {n}"} for n in range(10)]

    def test_flushing_read_sees_what_a_living_owner_has_acknowledged(
        self, home: StoreAddress
    ) -> None:
        async def read() -> list[int]:
            where: dict[str, Any] = {"topic": "t", "storage_path": str(home), "num_buckets": 2}
            options = {"lease": LEASE, "flush_interval": None}
            async with await write_queue(**where, durable=True, backend_options=options) as writer:
                await writer.put([{"id": n} for n in range(10)])
                return [
                    await asyncio.to_thread(stored_rows, home, **given)
                    for given in ({}, {"flush": "true"})
                ]

        assert asyncio.run(read()) == [0, 10]

    def test_log_of_a_killed_owner_is_replayed_before_the_rows_are_stored(
        self, home: StoreAddress
    ) -> None:
        command = [sys.executable, "-c", _OWNER, str(home), str(LEASE)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"acknowledged\n"
            child.send_signal(signal.SIGKILL)
        DirectStore(home).save(rows(5, 20))
        found = records(home)
        assert [record["id"] for record in found] == list(range(25))
        assert {record["from_log"] for record in found[:20]} == {True}

    def test_writes_at_the_same_time_wait_for_each_other(self, home: StoreAddress) -> None:
        DirectStore(home).save(rows(1), numBuckets=2)
        with ThreadPoolExecutor(3) as threads:
            saved = [threads.submit(DirectStore(home).save, rows(5, first)) for first in (1, 6, 11)]
            for one in saved:
                one.result()
        assert ids(home) == list(range(16))
        assert logs(home) == []


class TestStreams:
    def test_every_row_is_streamed_once_although_micro_batches_are_repeated(
        self, home: StoreAddress
    ) -> None:
        DirectStore(home).save(rows(20), topic="in", numBuckets=2)
        pipe = DirectPipe(home)  # type: ignore[arg-type]
        pipe.run({"maxOffsetsPerTrigger": 8}, numBuckets=2)
        assert ids(home, "out") == list(range(20))
        pipe.forget_last_commit()
        DirectStore(home).save(rows(4, 20, score=1.5), topic="in")
        pipe.run()
        assert ids(home, "out") == list(range(24))
        assert records(home, "out")[-1] == {"id": 23, "text": "row 23", "score": 1.5}

    def test_recreated_source_is_refused(self, home: StoreAddress) -> None:
        DirectStore(home).save(rows(5), topic="in", numBuckets=1)
        pipe = DirectPipe(home)  # type: ignore[arg-type]
        pipe.run(numBuckets=1)
        store = store_of(home, "in")
        store.delete(store.list(""))
        DirectStore(home).save(rows(9), topic="in", numBuckets=1)
        with pytest.raises(StorageError, match="was recreated"):
            pipe.run()


def test_options_that_cannot_work_in_an_object_store_are_refused() -> None:
    path = {"path": "s3://bucket/orders"}
    assert read_options({**path, "flush": "true"}).flush
    for name in ("aws_secret_access_key", "storage_options", "fs.s3a.secret.key", "sessionToken"):
        for parse_options in (read_options, write_options):
            with pytest.raises(InvalidArgument, match="are not options") as refused:
                parse_options({**path, name: "not-to-be-shown"})
            assert "not-to-be-shown" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="at s3://, gs:// or az://; not under hdfs:"):
        write_options({"path": "hdfs://host/orders"})


_OWNER = """
import asyncio, sys
from persisting.queue import write_queue

async def main(path, lease):
    writer = await write_queue(
        topic="t", storage_path=path, durable=True, num_buckets=2,
        backend_options={"lease": float(lease), "flush_interval": None},
    )
    await writer.put([{"id": n, "text": f"row {n}", "from_log": True} for n in range(20)])
    print("acknowledged", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""
