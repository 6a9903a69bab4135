"""Files handed over to the owner of a topic in an object store, with real processes that are killed
at every named point: every row is stored once, whoever dies."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.fault_proxy import FaultProxy
from support.handover import (
    COMMON_POINTS,
    DRIVER_POINTS,
    OWNER_POINTS,
    PUTS,
    check_ids,
    texts,
)
from support.handover_kills import kill_any, kill_driver, kill_owner
from support.held_process import HeldProcess
from support.object_stores import SeaweedFS, environment_of, storage_options, url
from support.store_handover import Owner, content, create_topic, hand_over, handovers, ids
from support.waiting import until_true

from persisting.store.object_store import ObjectStore, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LEASE = 2.0

POINTS = f"""{COMMON_POINTS}
from persisting.bucket.store_notes import StoreNotes
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.topic import store_handover
from persisting.topic.store_handover import StoreExchange

held(StoreBulkFiles, "with_arrivals", after="owner-wrote-times")
done = lambda self, name, answer: answer.state == "done" and answer.table is None
held(StoreNotes, "write_answer", before="owner-answers", after="owner-answered", when=done)
held(StoreExchange, "send", before="driver-sends", after="driver-sent",
     when=lambda self, notes: any(note.kind == "adopt" for note in notes.values()))
held(store_handover, "decide", before="driver-decides", after="driver-decided")
held(StoreExchange, "remove", before="driver-has-answers", after="driver-removed-notes",
     when=lambda self, buckets: self.is_decided())
"""

OWNER = """
import asyncio, sys
from persisting.queue import write_queue
from support.handover import put_forever

async def main(folder, root, number):
    queue = await write_queue(topic="t", storage_path=root)
    await put_forever(queue, number, 0.05)

asyncio.run(main(*sys.argv[1:3], int(sys.argv[3])))
"""

DRIVER = """
import sys
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from support.handover import texts
from support.store_handover import hand_over

root, first, count, name = sys.argv[2:]
store = open_store(parse(root) / "t", StorageOptions())
print(hand_over(store, texts(int(first), int(count)), name), flush=True)
"""


@pytest.fixture
def root(server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a new topic's parent, with credentials in the environment."""
    for name, value in environment_of(server.options()).items():
        monkeypatch.setenv(name, value)
    options = {"lease": LEASE, "flush_interval": 0.5}
    create_topic(url(prefix), server.options(), backend_options=options)
    return url(prefix)


@pytest.fixture
def topic(root: str) -> ObjectStore:
    return open_store(parse(root) / "t", StorageOptions())


def held_process(
    folder: Path, code: str, *args: object, hold: str = "", **environ: str
) -> HeldProcess:
    """Run an owner or a driver that waits at the point ``hold``."""
    variables = {**os.environ, **environ}
    return HeldProcess(folder, code, *args, points=POINTS, hold=hold, environ=variables)


def check(topic: ObjectStore, written: int, acknowledged: int) -> None:
    """Assert that every row handed over and every acknowledged record is stored once, and that the
    records of the owner are in order."""
    check_ids(content(topic), written, acknowledged, old=10)


@pytest.mark.parametrize("point", OWNER_POINTS)
def test_owner_killed_during_a_hand_over_loses_and_duplicates_nothing(
    root: str, topic: ObjectStore, tmp_path: Path, point: str
) -> None:
    """The driver takes over the buckets once the lease expires, and completes the write."""
    with held_process(tmp_path, OWNER, root, PUTS, hold=point) as owner:
        acknowledged = kill_owner(owner, point, lambda: hand_over(topic, texts(0, 300)))
    check(topic, 300, acknowledged)
    assert hand_over(topic, texts(0, 300)) == 0
    check(topic, 300, acknowledged)
    assert handovers(topic) == []


@pytest.mark.parametrize("point", DRIVER_POINTS)
def test_driver_killed_during_a_hand_over_loses_and_duplicates_nothing(
    root: str, topic: ObjectStore, tmp_path: Path, point: str
) -> None:
    """The owner drops what was not decided, and completes what was."""
    owner = Owner(topic)
    owner.put(25)
    with held_process(tmp_path, DRIVER, root, 0, 300, "w", hold=point) as driver:
        driver.until_held(point)
    owner.put(25)
    decided = DRIVER_POINTS.index(point) >= DRIVER_POINTS.index("driver-decided")
    assert hand_over(topic, texts(0, 300)) == (0 if decided else 300)
    until_true(lambda: handovers(topic) == [])
    acknowledged = owner.put(25)
    owner.close()
    check(topic, 300, acknowledged)


@pytest.mark.parametrize("driver_point", DRIVER_POINTS[3:])
@pytest.mark.parametrize("owner_point", OWNER_POINTS)
def test_driver_and_owner_killed_lose_and_duplicate_nothing(
    root: str, topic: ObjectStore, tmp_path: Path, driver_point: str, owner_point: str
) -> None:
    """Both die, in the order in which they reach their points; another driver repeats the write."""
    with held_process(tmp_path, OWNER, root, PUTS, hold=owner_point) as owner:
        owner.until(lambda: owner.acknowledged > PUTS + 50)
        with held_process(tmp_path, DRIVER, root, 0, 300, "w", hold=driver_point) as driver:
            kill_driver(driver, driver_point, owner, owner_point)
        owner.kill()
        acknowledged = owner.acknowledged
    hand_over(topic, texts(0, 300))
    until_true(lambda: _cleared(topic))
    check(topic, 300, acknowledged)


def _cleared(topic: ObjectStore) -> bool:
    """Whether nothing is left of hand-overs, after an owner has polled."""
    if handovers(topic):
        owner = Owner(topic)
        time.sleep(LEASE + 1)
        owner.close()
    return handovers(topic) == []


@pytest.mark.parametrize("seed", range(3))
def test_processes_killed_at_random_times_over_a_bad_network_lose_and_duplicate_nothing(
    root: str, topic: ObjectStore, tmp_path: Path, proxy: FaultProxy, seed: int
) -> None:
    """Writes that are repeated until they succeed, beside owners that are killed and replaced."""
    chance = random.Random(seed)
    proxied = environment_of(storage_options(proxy.port))
    proxy.random = random.Random(seed)
    proxy.add("PUT-if", share=0.05, lose=True)
    proxy.add("", share=0.02, drop=True)
    proxy.add("", share=0.02, answer=503)
    acknowledged, written = PUTS, 0
    for turn in range(6):
        done = False
        while not done:
            # Puts that were not acknowledged may be stored: continue after them.
            acknowledged = max(acknowledged, *(n + 1 for n in ids(topic)))
            with held_process(tmp_path, OWNER, root, acknowledged, **proxied) as owner:
                owner.until(lambda: owner.acknowledged > 0)
                args = root, written, 100, f"w{turn}"
                with held_process(tmp_path, DRIVER, *args, **proxied) as driver:
                    time.sleep(chance.uniform(1.0, 6.0))
                    done = kill_any(owner, driver, chance, 300)
                owner.kill()
                acknowledged = max(acknowledged, owner.acknowledged)
        written += 100
    proxy.heal()
    until_true(lambda: _cleared(topic))
    check(topic, written, acknowledged)
