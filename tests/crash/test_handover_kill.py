"""Files handed over to a live queue, with the owner or the driver killed at every named point:
every row is stored once, whoever dies. If the files replace the content, every bucket is replaced
once, and keeps what was put after that."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.handover import (
    DRIVER,
    DRIVER_POINTS,
    OWNER,
    OWNER_POINTS,
    PUTS,
    check_ids,
    files_of_handovers,
    hand_over,
    held_process,
    texts,
)
from support.handover_kills import kill_any, kill_driver, kill_owner, points
from support.held_process import HeldProcess
from support.spark.topics import content, is_sound, put, reader, stored, unreferenced, writer
from support.waiting import until_true

from persisting.bucket import producer_sequences
from persisting.bucket.handover_notes import LEFT_SECONDS
from persisting.topic.routing import bucket_of
from persisting.topic.topic_files import TopicFolder

BUCKETS = 2
NOT_NIGHTLY = (
    "owner-commits",
    "owner-committed",
    "owner-answers",
    "driver-sends",
    "driver-sent",
    "driver-decides",
    "driver-decided",
    "driver-has-answers",
)
OVERWRITES_NOT_NIGHTLY = ("owner-committed", "owner-answers", "driver-decided")
PUTS_GO_ON = ("owner-checks", "owner-answers", "owner-answered")
"""Points of an owner at which it takes puts. At the others it holds them back."""
OLD = 5_000
"""Records that an overwrite replaces have ids from here on."""
LEAVES_FILES = ("driver-wrote-a-file", "driver-sends")
"""Points after which files are left that no note names."""


def check(folder: Path, written: int, acknowledged: int) -> None:
    """Assert that every row handed over and every acknowledged record is stored once, complete, and
    that records of the owner are in order."""
    found = content(folder)
    numbers = {bucket: [record["id"] for record in records] for bucket, records in found.items()}
    own = check_ids(numbers, written, acknowledged)
    assert own == list(range(PUTS, PUTS + len(own)))  # an unacknowledged put may be stored
    for records in found.values():
        assert all(record["text"] == f"row {record['id']}" for record in records)
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


def topic_to_replace(folder: Path) -> Path:
    """Make a topic with old records, which the group "g" has read."""
    topic = new_topic(folder)
    put(folder, texts(OLD, 100))
    with reader(folder, group="g") as group:
        assert len(group.get(None)) == 100
        group.commit()
    return topic


def replacements(folder: Path) -> dict[int, int]:
    """Return how many times the content of each bucket was replaced, as its table says."""
    topic = TopicFolder.open(folder / "t")
    return {bucket: len(topic.table(bucket).restores) for bucket in topic.buckets}


def first_kept(folder: Path, owner: HeldProcess) -> dict[int, int]:
    """Return by bucket the first put of a living owner that must not be lost, if there is one: it
    began after the bucket was replaced."""
    replaced = [bucket for bucket, times in replacements(folder).items() if times]
    following = owner.acknowledged + 5  # the one before may be under way, and has begun before
    return dict.fromkeys(replaced, following)


def check_replaced(
    folder: Path, rows: range, acknowledged: int, kept: dict[int, int], times: int = 1
) -> None:
    """Assert that every bucket was replaced ``times`` times, holds its part of the last rows, and
    after them all that was put since: ``kept`` names puts of which that is known. Earlier records
    are gone, and a group that has read them reads the new ones from the beginning."""
    found = content(folder)
    own = {b: [r["id"] for r in records if r["id"] >= PUTS] for b, records in found.items()}
    end = max([acknowledged, *(numbers[-1] + 1 for numbers in own.values() if numbers)])
    for bucket, records in found.items():
        handed = [i for i in rows if bucket_of(i, BUCKETS) == bucket]
        assert [record["id"] for record in records] == handed + own[bucket]
        puts = [i for i in range(PUTS, end) if bucket_of(i, BUCKETS) == bucket]
        assert own[bucket] == puts[len(puts) - len(own[bucket]) :]
        needed = [i for i in puts if kept.get(bucket, end) <= i < acknowledged]
        assert set(needed) <= set(own[bucket])
        assert all(record["text"] == f"row {record['id']}" for record in records)
    assert replacements(folder) == dict.fromkeys(range(BUCKETS), times)
    with reader(folder, group="g") as group:
        read = group.get(None)
    everything = [record["id"] for records in found.values() for record in records]
    assert sorted(record["id"] for record in read) == sorted(everything)
    assert is_sound(folder)
    assert unreferenced(folder) == []


@pytest.mark.parametrize("point", points(OWNER_POINTS, NOT_NIGHTLY))
def test_owner_killed_during_a_hand_over_loses_and_duplicates_nothing(
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


@pytest.mark.parametrize("point", points(OWNER_POINTS, OVERWRITES_NOT_NIGHTLY))
def test_owner_killed_during_an_overwrite_has_every_bucket_replaced_once(
    tmp_path: Path, point: str
) -> None:
    """The driver takes the lock of the dead owner, and completes the write. What the owner had
    acknowledged after it had replaced a bucket stays."""
    topic = topic_to_replace(tmp_path)
    kept: dict[int, int] = {}

    def put_more() -> None:
        kept.update(first_kept(tmp_path, owner))
        before = owner.acknowledged
        if point in PUTS_GO_ON:
            owner.until(lambda: owner.acknowledged > before + 20)

    with held_process(tmp_path, OWNER, PUTS, hold=point) as owner:
        acknowledged = kill_owner(
            owner, point, lambda: hand_over(topic, texts(0, 300), overwrite=True), put_more
        )
    if OWNER_POINTS.index(point) >= OWNER_POINTS.index("owner-committed"):
        assert kept
    if unreferenced(tmp_path):
        sweep(tmp_path)
    check_replaced(tmp_path, range(300), acknowledged, kept)
    assert hand_over(topic, texts(0, 300), overwrite=True) == 0
    check_replaced(tmp_path, range(300), acknowledged, kept)
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


def test_owner_killed_before_its_answer_duplicates_nothing_with_a_full_producer_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have been compacted, and the log holds puts of producers that are no longer
    remembered: its successor still knows that the note is adopted."""
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


@pytest.mark.parametrize("point", points(DRIVER_POINTS, NOT_NIGHTLY))
def test_driver_killed_during_a_hand_over_loses_and_duplicates_nothing(
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


@pytest.mark.parametrize("point", points(DRIVER_POINTS, OVERWRITES_NOT_NIGHTLY))
def test_driver_killed_during_an_overwrite_replaces_every_bucket_once_or_none(
    tmp_path: Path, point: str
) -> None:
    """The owner drops what was not decided, and completes what was. The repeated write replaces
    nothing that was put since."""
    topic = topic_to_replace(tmp_path)
    decided = DRIVER_POINTS.index(point) >= DRIVER_POINTS.index("driver-decided")
    answered = DRIVER_POINTS.index(point) >= DRIVER_POINTS.index("driver-has-answers")
    with writer(tmp_path, local_socket=False) as queue:
        queue.put_batch(texts(PUTS, 50))
        with held_process(tmp_path, DRIVER, 0, 300, "w", "overwrite", hold=point) as driver:
            driver.until_held(point)
            queue.put_batch(texts(PUTS + 50, 50))
        until_true(lambda: files_of_handovers(topic) == [])
        queue.put_batch(texts(PUTS + 100, 50))
        first = PUTS + 50 if answered else PUTS + 100
        if not decided:
            old = [*range(OLD, OLD + 100), *range(PUTS, PUTS + 150)]
            assert sorted(record["id"] for record in stored(tmp_path)) == old
            assert set(replacements(tmp_path).values()) == {0}
            first = PUTS + 150
        assert hand_over(topic, texts(0, 300), overwrite=True) == (0 if decided else 300)
        queue.put_batch(texts(PUTS + 150, 50))
    if point in LEAVES_FILES:
        sweep(tmp_path)
    check_replaced(tmp_path, range(300), PUTS + 200, dict.fromkeys(range(BUCKETS), first))


def repeat(folder: Path, *, overwrite: bool, beside_an_owner: bool) -> None:
    """Repeat a write, with or without a new owner of the buckets; sweep the files of the first."""
    with ExitStack() as stack:
        if beside_an_owner:
            stack.enter_context(writer(folder, local_socket=False)).put_batch([])
        hand_over(folder / "t", texts(0, 300), overwrite=overwrite)
    if unreferenced(folder):
        sweep(folder)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver_point", DRIVER_POINTS[3:])
@pytest.mark.parametrize("owner_point", OWNER_POINTS)
@pytest.mark.parametrize("successor", [True, False])
def test_driver_and_owner_killed_lose_and_duplicate_nothing(
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
    repeat(tmp_path, overwrite=False, beside_an_owner=successor)
    check(tmp_path, 300, acknowledged)
    assert files_of_handovers(topic) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver_point", DRIVER_POINTS[3:])
@pytest.mark.parametrize("owner_point", OWNER_POINTS)
@pytest.mark.parametrize("successor", [True, False])
def test_driver_and_owner_killed_during_an_overwrite_replace_every_bucket_once(
    tmp_path: Path, driver_point: str, owner_point: str, successor: bool
) -> None:
    """Both die, in the order in which they reach their points; another driver repeats the write."""
    topic = topic_to_replace(tmp_path)
    kept: dict[int, int] = {}
    with held_process(tmp_path, OWNER, PUTS, hold=owner_point) as owner:
        owner.until(lambda: owner.acknowledged > PUTS + 50)
        given = (0, 300, "w", "overwrite")
        with held_process(tmp_path, DRIVER, *given, hold=driver_point) as driver:
            kill_driver(driver, driver_point, owner, owner_point)
        if owner.process.poll() is None:
            until_true(lambda: owner.is_held(owner_point) or files_of_handovers(topic) == [])
            kept = first_kept(tmp_path, owner)
            before = owner.acknowledged
            if owner_point in PUTS_GO_ON or not owner.is_held(owner_point):
                owner.until(lambda: owner.acknowledged > before + 20)
        owner.kill()
        acknowledged = owner.acknowledged
    repeat(tmp_path, overwrite=True, beside_an_owner=successor)
    check_replaced(tmp_path, range(300), acknowledged, kept)
    assert files_of_handovers(topic) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_processes_killed_at_random_times_lose_and_duplicate_nothing(
    tmp_path: Path, seed: int, overwrite: bool
) -> None:
    """Ten writes, each repeated until it succeeds, beside owners that are killed and replaced."""
    chance = random.Random(seed)
    if overwrite:
        topic_to_replace(tmp_path)
    else:
        new_topic(tmp_path)
    mode = "overwrite" if overwrite else "append"
    acknowledged = PUTS
    written = 0
    for turn in range(10):
        done = False
        while not done:
            # Puts that were not acknowledged may be stored: continue after them.
            last = max(
                (r["id"] + 1 for some in content(tmp_path).values() for r in some), default=0
            )
            acknowledged = max(acknowledged, last)
            with held_process(tmp_path, OWNER, acknowledged) as owner:
                owner.until(lambda: owner.acknowledged > 0)
                with held_process(tmp_path, DRIVER, written, 100, f"w{turn}", mode) as driver:
                    time.sleep(chance.uniform(0.8, 2.5))
                    done = kill_any(owner, driver, chance, 60)
                owner.kill()
                acknowledged = max(acknowledged, owner.acknowledged)
        written += 100
    if unreferenced(tmp_path):
        sweep(tmp_path)
    if overwrite:
        check_replaced(tmp_path, range(written - 100, written), acknowledged, {}, times=10)
    else:
        check(tmp_path, written, acknowledged)
