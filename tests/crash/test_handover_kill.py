"""Files handed over to a live queue, with the owner or the driver killed at every named point:
every row is stored once, whoever dies."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
from support.handover import (
    DRIVER,
    DRIVER_POINTS,
    OWNER,
    OWNER_POINTS,
    PUTS,
    files_of_handovers,
    hand_over,
    held_process,
    texts,
)
from support.handover_kills import kill_any, kill_driver, kill_owner, points
from support.spark.topics import content, is_sound, put, stored, unreferenced, writer
from support.waiting import until_true

from persisting.bucket import producer_sequences
from persisting.bucket.handover_notes import LEFT_SECONDS

BUCKETS = 2
BY_DAY = (
    "owner-commits",
    "owner-committed",
    "owner-answers",
    "driver-sent",
    "driver-decides",
    "driver-decided",
    "driver-has-answers",
)
LEAVES_FILES = ("driver-wrote-a-file", "driver-sends")
"""Points after which files are left that no note names."""


def check(folder: Path, written: int, acknowledged: int) -> None:
    """Assert that every row handed over and every acknowledged record is stored once, complete, and
    that records of the owner are in order."""
    found = content(folder)
    everything = [record for records in found.values() for record in records]
    numbers = sorted(record["id"] for record in everything)
    assert numbers == sorted(set(numbers))
    assert [n for n in numbers if n < PUTS] == list(range(written))
    put_to = [n for n in numbers if n >= PUTS]
    assert put_to[: acknowledged - PUTS] == list(range(PUTS, acknowledged))
    assert put_to == list(range(PUTS, PUTS + len(put_to)))  # an unacknowledged put may be stored
    assert all(record["text"] == f"row {record['id']}" for record in everything)
    for records in found.values():
        own = [record["id"] for record in records if record["id"] >= PUTS]
        assert own == sorted(own)
    assert is_sound(folder)
    assert unreferenced(folder) == []


def new_topic(folder: Path) -> Path:
    return put(folder, [], buckets=BUCKETS, enable_wal=True, flush_threshold=40)


def sweep(folder: Path) -> None:
    """Assert that compaction removes the files that dead processes left, but no recent ones."""
    with writer(folder, local_socket=False) as queue:
        queue.put_batch([])
        queue.compact()
        assert unreferenced(folder)  # they may be of a write that runs
        for path in (folder / "t").glob("bucket_*/data.lance/data/*"):
            os.utime(path, (time.time() - LEFT_SECONDS - 60,) * 2)
        queue.compact()


@pytest.mark.parametrize("point", points(OWNER_POINTS, BY_DAY))
def test_owner_killed_during_a_hand_over_loses_and_doubles_nothing(
    tmp_path: Path, point: str
) -> None:
    """The driver takes the lock of the dead owner, and completes the write."""
    topic = new_topic(tmp_path)
    with held_process(tmp_path, OWNER, PUTS, hold=point) as owner:
        acknowledged = kill_owner(owner, point, lambda: hand_over(topic, texts(0, 300)))
    if unreferenced(tmp_path):  # of this bucket, or of the other one, which is killed anywhere
        sweep(tmp_path)
    check(tmp_path, 300, acknowledged)
    assert hand_over(topic, texts(0, 300)) == 0
    check(tmp_path, 300, acknowledged)
    assert files_of_handovers(topic) == []


OWNER_OF_MANY_PRODUCERS = """
import asyncio, sys
from persisting.bucket import producer_sequences
from persisting.queue import write_queue

async def main():
    producer_sequences.MAX_PRODUCERS = 2
    queue = await write_queue(topic="t", storage_path=sys.argv[1], local_socket=False)
    number = int(sys.argv[2])
    while True:
        records = [{"id": number + i, "text": f"row {number + i}"} for i in range(5)]
        await queue.put(records, delay=0.001)  # each put has a producer sequence of its own
        await queue.compact()
        number += 5
        print(number, flush=True)

asyncio.run(main())
"""


def test_owner_killed_before_its_answer_doubles_nothing_with_a_full_producer_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have been compacted, and the log holds puts of producers that are not remembered
    any more: its successor still knows that the note is adopted."""
    monkeypatch.setattr(producer_sequences, "MAX_PRODUCERS", 2)
    topic = new_topic(tmp_path)
    for name in ("first", "second"):
        with writer(tmp_path, writer_id=name) as queue:
            queue.put_batch(texts(PUTS - 100 if name == "first" else PUTS - 50, 50))
    with held_process(tmp_path, OWNER_OF_MANY_PRODUCERS, PUTS, hold="owner-answers") as owner:
        owner.until(lambda: owner.acknowledged > PUTS)
        driver = threading.Thread(target=hand_over, args=(topic, texts(0, 100), "~anonymous"))
        driver.start()
        owner.until_held("owner-answers")
        first = owner.acknowledged
        owner.until(lambda: owner.acknowledged > first + 20)
        owner.kill()
        driver.join()
    numbers = [record["id"] for record in stored(tmp_path)]
    assert len(numbers) == len(set(numbers))
    assert set(range(100)) < set(numbers)
    assert is_sound(tmp_path)


@pytest.mark.parametrize("point", points(DRIVER_POINTS, BY_DAY))
def test_driver_killed_during_a_hand_over_loses_and_doubles_nothing(
    tmp_path: Path, point: str
) -> None:
    """The owner drops what was not decided, and completes what was."""
    topic = new_topic(tmp_path)
    with writer(tmp_path, local_socket=False) as queue:
        queue.put_batch(texts(PUTS, 50))
        with held_process(tmp_path, DRIVER, 0, 300, "w", hold=point) as driver:
            driver.until_held(point)
        until_true(lambda: files_of_handovers(topic) == [])
        queue.put_batch(texts(PUTS + 50, 50))
        decided = DRIVER_POINTS.index(point) >= DRIVER_POINTS.index("driver-decided")
        assert len(stored(tmp_path)) == (400 if decided else 100)
        assert hand_over(topic, texts(0, 300)) == (0 if decided else 300)
        queue.put_batch(texts(PUTS + 100, 50))
    if point in LEAVES_FILES:
        sweep(tmp_path)
    check(tmp_path, 300, PUTS + 150)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver_point", DRIVER_POINTS[3:])
@pytest.mark.parametrize("owner_point", OWNER_POINTS)
@pytest.mark.parametrize("successor", [True, False])
def test_driver_and_owner_killed_lose_and_double_nothing(
    tmp_path: Path, driver_point: str, owner_point: str, successor: bool
) -> None:
    """Both die, in the order in which they reach their points; another driver repeats the write."""
    topic = new_topic(tmp_path)
    with held_process(tmp_path, OWNER, PUTS, hold=owner_point) as owner:
        owner.until(lambda: owner.acknowledged > PUTS + 50)
        with held_process(tmp_path, DRIVER, 0, 300, "w", hold=driver_point) as driver:
            kill_driver(driver, driver_point, owner, owner_point)
        if owner.process.poll() is None:
            until_true(lambda: owner.is_held(owner_point) or files_of_handovers(topic) == [])
        owner.kill()
        acknowledged = owner.acknowledged
    if successor:
        with writer(tmp_path, local_socket=False) as queue:
            queue.put_batch([])
            hand_over(topic, texts(0, 300))
    else:
        hand_over(topic, texts(0, 300))
    if unreferenced(tmp_path):
        sweep(tmp_path)
    check(tmp_path, 300, acknowledged)
    assert files_of_handovers(topic) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_processes_killed_at_random_times_lose_and_double_nothing(
    tmp_path: Path, seed: int
) -> None:
    """Ten writes, each repeated until it succeeds, beside owners that are killed and replaced."""
    chance = random.Random(seed)
    new_topic(tmp_path)
    acknowledged = PUTS
    written = 0
    for turn in range(10):
        done = False
        while not done:
            # Puts that were not acknowledged may be stored: continue behind them.
            last = max(
                (r["id"] + 1 for some in content(tmp_path).values() for r in some), default=0
            )
            acknowledged = max(acknowledged, last)
            with held_process(tmp_path, OWNER, acknowledged) as owner:
                owner.until(lambda: owner.acknowledged > 0)
                with held_process(tmp_path, DRIVER, written, 100, f"w{turn}") as driver:
                    time.sleep(chance.uniform(0.8, 2.5))
                    done = kill_any(owner, driver, chance, 60)
                owner.kill()
                acknowledged = max(acknowledged, owner.acknowledged)
        written += 100
    if unreferenced(tmp_path):
        sweep(tmp_path)
    check(tmp_path, written, acknowledged)
