"""Spark's writes to object stores, killed at each step and repeated: every row is stored once.

The calls are those of Spark, in a process of their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.fault_proxy import FaultProxy
from support.held_process import HeldProcess
from support.object_stores import SeaweedFS, environment_of, url
from support.spark.writes import DirectStore
from support.store_buckets import is_free

from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress, parse
from persisting.topic import store_config
from persisting.topic.store_owner import StoreOwner

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

POINTS = """
from persisting.bucket import bulk_import
from persisting.bucket.store_owner_log import StoreOwnerLog
from persisting.table import bulk_write
from persisting.table.fenced_commit import FencedCommitter
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.topic.store_owner import StoreOwner

held(bulk_write, "write_files", after="written")
held(StoreOwner, "own", after="owns")
held(bulk_import, "adopt", before=lambda bucket, *args: f"commit{bucket.number}")
held(StoreBulkFiles, "with_arrivals", after="times")
held(FencedCommitter, "commit", after="committed")
held(StoreOwner, "_close", before="closes")
held(StoreOwnerLog, "retire", before="retires")
"""

WRITER = """
import sys
from support.spark.writes import DirectStore
from persisting.store_address import parse
import pyarrow as pa

home, mode = sys.argv[2:]
ids = range(100, 140)
rows = pa.table({"id": ids, "text": [f"row {n}" for n in ids]})
DirectStore(parse(home)).save(rows, mode=mode, parts=2, writeId="w")
print("done", flush=True)
"""

STEPS = ("written", "owns", "commit0", "times", "committed", "commit1", "closes", "retires")


@pytest.fixture
def home(server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch) -> StoreAddress:
    for name, value in environment_of(server.options()).items():
        monkeypatch.setenv(name, value)
    return parse(url(prefix))


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": ids, "text": [f"row {number}" for number in ids]})


def ids(home: StoreAddress) -> list[int]:
    async def read() -> list[Any]:
        async with await read_queue(topic="t", storage_path=str(home)) as reader:
            return await reader.get(limit=10_000)

    return sorted(record["id"] for record in asyncio.run(read()))


def create(home: StoreAddress) -> None:
    async def put() -> None:
        options = {"lease": 1.0}
        where: dict[str, Any] = {"topic": "t", "storage_path": str(home), "num_buckets": 2}
        async with await write_queue(**where, durable=True, backend_options=options) as queue:
            await queue.put([{"id": n, "text": f"row {n}"} for n in range(10)])

    asyncio.run(put())


def writer(home: StoreAddress, folder: Path, step: str, mode: str = "append") -> HeldProcess:
    """Start a write of ids 100 to 139 that waits at a step."""
    return HeldProcess(
        folder,
        WRITER,
        home,
        mode,
        points=POINTS,
        hold=step,
        environ={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("mode", ["append", "overwrite"])
@pytest.mark.parametrize("step", STEPS)
def test_write_that_is_killed_and_repeated_is_stored_once(
    home: StoreAddress, tmp_path: Path, step: str, mode: str
) -> None:
    create(home)
    killed = writer(home, tmp_path, step, mode)
    try:
        killed.until_held(step)
    finally:
        killed.kill()
    DirectStore(home).save(rows(100, 40), mode=mode, parts=3, writeId="w")
    before = [] if mode == "overwrite" else list(range(10))
    assert ids(home) == [*before, *range(100, 140)]
    DirectStore(home).save(rows(200, 5))
    assert ids(home) == [*before, *range(100, 140), *range(200, 205)]
    store = open_store(home / "t", StorageOptions())
    config = store_config.load(store)
    assert config is not None
    assert all(is_free(store, bucket) for bucket in range(2))
    with StoreOwner(store, config) as owner:
        owner.own(0)  # a bucket that was given back is taken immediately


@pytest.mark.parametrize("step", ["commit0", "times", "commit1"])
@pytest.mark.parametrize("same_id", [True, False])
def test_driver_that_was_paused_and_replaced_stores_nothing_twice(
    home: StoreAddress, tmp_path: Path, step: str, same_id: bool
) -> None:
    """It wakes after the fence of another owner, in the middle of its commits."""
    create(home)
    paused = writer(home, tmp_path, step)
    try:
        paused.until_held(step)
        paused.stop()
        first = 100 if same_id else 200
        DirectStore(home).save(rows(first, 40), writeId="w" if same_id else "other")
        seen = ids(home)
        os.kill(paused.process.pid, signal.SIGCONT)
        paused.let_go(step)
        paused.process.wait(300)
        failed = paused.process.returncode != 0
    finally:
        paused.kill()
    if same_id:
        assert ids(home) == seen == [*range(10), *range(100, 140)]
        return
    # A bucket that it had not committed is refused to it; it may have one of two before.
    assert failed, paused.output
    assert "OwnershipLost" in paused.output or "onflict" in paused.output, paused.output
    assert ids(home) == seen
    DirectStore(home).save(rows(100, 40), writeId="w")
    assert ids(home) == [*range(10), *range(100, 140), *range(200, 240)]


def test_writes_over_a_bad_network_are_stored_once(
    server: SeaweedFS, proxy: FaultProxy, home: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are lost, requests dropped and refused; every write is repeated until it succeeds."""
    create(home)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    proxy.add("PUT-if-absent", also="/_versions/", share=0.4, lose=True)
    proxy.add("", share=0.08, lose=True)
    proxy.add("", share=0.08, drop=True)
    proxy.add("", share=0.08, answer=503)
    failures: list[StorageError] = []
    for number in range(12):
        stored = False
        while not stored and len(failures) < 100:
            try:
                DirectStore(home).save(rows(100 + 10 * number, 10), parts=2, writeId=f"w{number}")
                stored = True
            except StorageError as exc:
                failures.append(exc)
    proxy.heal()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.port}")
    assert ids(home) == [*range(10), *range(100, 220)]
    print(f"{len(failures)} writes failed and were repeated")
