"""Power loss at every file call of a topic whose buckets share one log.

Acknowledged puts survive, once and in order, and a list put is in all of its buckets or in none.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.crash.disk_model import (
    FIXED_LOSSES,
    KEEP_EVERYTHING,
    LOSE_UNSYNCED,
    UNDO_REMOVALS,
    ZERO_BYTES,
    Loss,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import CrashPoint, RecordingFileSystem
from support.crash.topics import (
    INTERVAL,
    QUEUES,
    CrashableTopic,
    RecordedTopic,
    Story,
    TopicExplorer,
    random_story,
)
from support.crash.workloads import Durable

from persisting import fs
from persisting.bucket import chunk
from persisting.queue import PersistingBackend
from persisting.records import RecordEncoder
from persisting.topic.spec import bucket_folder
from persisting.wal.frame import SEGMENT_HEADER_SIZE

LOSSES = (LOSE_UNSYNCED, KEEP_EVERYTHING, ZERO_BYTES, UNDO_REMOVALS)


def _torn_at_the_start(durable: bytes, data: bytes) -> bytes:
    """Lose the first unsynced bytes, as many as a segment header has, and keep the rest."""
    start = len(durable)
    if not data.startswith(durable) or len(data) <= start:
        return data
    lost = min(SEGMENT_HEADER_SIZE, len(data) - start)
    return durable + bytes(lost) + data[start + lost :]


TORN_START = Loss("torn-at-the-start", lambda: True, lambda: True, _torn_at_the_start)


async def record(
    tmp_path: Path, story: Story, durable: Durable = Durable.ACKNOWLEDGED, **given: Any
) -> RecordedTopic:
    disk = tmp_path / "disk"
    disk.mkdir()
    topic = RecordedTopic(disk, durable, **given)
    with fs.use(topic.recorder):
        await story(topic)
    return topic


async def check_power_loss(
    tmp_path: Path,
    story: Story,
    durable: Durable = Durable.ACKNOWLEDGED,
    *,
    every: int = 1,
    samples: int = 1,
    losses: Sequence[Loss] = LOSSES,
    **given: Any,
) -> TopicExplorer:
    """Record a story, then check the states that power loss may leave."""
    topic = await record(tmp_path, story, durable, **given)
    states = tmp_path / "states"
    states.mkdir()
    explorer = TopicExplorer(
        topic.recorder.recording,
        topic.expected,
        states,
        losses=losses,
        samples=samples,
        numbers=topic.numbers,
    )
    await explorer.explore(every)
    assert explorer.checked > 12
    print(f"{explorer.checked} states of {len(topic.recorder.recording.crash_points)} crash points")
    return explorer


async def check_second_crash(
    tmp_path: Path,
    topic: RecordedTopic,
    point: CrashPoint,
    loss: Loss,
    opened: Sequence[int],
    *,
    every: int = 1,
) -> None:
    """Lose power or be killed, open some of the buckets, and lose power at every call of that."""
    states, disk = tmp_path / "states", tmp_path / "second"
    states.mkdir()
    write_tree(after_power_loss(point.disk, loss), disk)
    explorer = TopicExplorer(topic.recorder.recording, topic.expected, states)
    required = explorer.required(point)
    second = RecordingFileSystem(disk)
    with fs.use(second):
        again = CrashableTopic(disk, topic.expected.buckets)
        for bucket in opened:
            await again.backend(bucket)
        more = {bucket: [{"id": f"later-{bucket}", "n": 0}] for bucket in opened}
        await again.put(more)
        second.promise("later")
        await again.close()
    with fs.use(second):
        rest = CrashableTopic(disk, topic.expected.buckets)
        found = await rest.read()
        await rest.close()
    expected = topic.expected.holding(found)
    expected.add("later", more)
    expected.check(found, {*required, "later"})
    explorer = TopicExplorer(
        second.recording,
        expected,
        states,
        losses=LOSSES,
        samples=0,
        # What the recovered log holds is durable once one of its buckets is open.
        already_promised=frozenset(required),
    )
    await explorer.explore(every)
    shutil.rmtree(states)
    shutil.rmtree(disk)


@pytest.fixture
def several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert two rows at a time, so that a list of a few records needs several frames."""
    monkeypatch.setattr(chunk, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(
        RecordEncoder, "slice_rows", property(lambda _: 2, lambda *_: None), raising=False
    )


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a new segment with almost every put."""
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 300)


# Stories


async def lists_and_flushes(topic: RecordedTopic) -> None:
    await topic.put()
    await topic.flush(1)
    await topic.put(0, 2, rows=2)
    await topic.single(3)
    await topic.flush(0)
    await topic.put()
    await topic.close()


async def concurrent_lists(topic: RecordedTopic) -> None:
    await topic.put()
    await topic.together(5)
    await topic.flush(0, 2)
    await topic.together(4)
    await topic.close()


async def evolution(topic: RecordedTopic) -> None:
    await topic.put(v=1)
    await topic.flush(2)
    await topic.put(0, 1, v=2, name="new field")
    await topic.put(2, 3, v=2.5)
    await topic.flush(0, 3)
    await topic.put(v=3, nested={"a": 1})
    await topic.close()


async def closed_buckets(topic: RecordedTopic) -> None:
    await topic.put()
    await topic.close_bucket(1)
    await topic.put(0, 2, 3)
    await topic.put()
    await topic.close_bucket(2)
    await topic.close_bucket(1)
    await topic.single(2)
    await topic.close()


async def cold_bucket(topic: RecordedTopic) -> None:
    """With small segments: bucket 3 is written once, and the others release their segments."""
    await topic.put()
    for _ in range(3):
        await topic.put(0, 1, rows=2)
        await topic.flush(0, 1, 2)
    await topic.flush(3)
    await topic.put(0, 1)
    await topic.close()


async def kills(topic: RecordedTopic) -> None:
    await topic.put()
    await topic.flush(3)
    await topic.put(0, 1)
    await topic.reopen(cleanly=False)
    await topic.put(1, 2)  # buckets 0 and 3 are not opened: their log stays
    await topic.reopen(cleanly=False)
    await topic.put(0, 2)
    await topic.reopen(cleanly=True)
    await topic.put()
    await topic.close()


async def numbered_lists(topic: RecordedTopic) -> None:
    for number in range(4):
        await topic.put(*((), (0, 1), (1, 2), ())[number], sequence=("writer", number))
        if number == 1:
            await topic.flush(1)
    await topic.repeat("put-3", ("writer", 3))
    await topic.reopen(cleanly=False)
    await topic.repeat("put-3", ("writer", 3))
    await topic.put(sequence=("writer", 4))
    await topic.close()


async def long_lists(topic: RecordedTopic) -> None:
    await topic.put(rows=3)
    await topic.flush(2)
    await topic.put(0, 3, rows=4, sequence=("writer", 0))
    await topic.close()


STORIES = {
    story.__name__: story
    for story in (
        lists_and_flushes,
        concurrent_lists,
        evolution,
        closed_buckets,
        numbered_lists,
        kills,
    )
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_list_put_is_whole_after_power_loss(tmp_path: Path, story: Story) -> None:
    await check_power_loss(tmp_path, story, every=37)


async def test_list_put_of_several_frames_is_whole_after_power_loss(
    tmp_path: Path, several_frames: None
) -> None:
    await check_power_loss(tmp_path, long_lists, every=23)


async def test_released_segments_cost_no_record_after_power_loss(
    tmp_path: Path, small_segments: None
) -> None:
    await check_power_loss(tmp_path, cold_bucket, every=31)


@pytest.mark.parametrize("options", [{}, INTERVAL], ids=["synced", "interval"])
async def test_torn_beginning_of_a_segment_is_not_damage(
    tmp_path: Path, small_segments: None, options: dict[str, Any]
) -> None:
    """Sectors reach the disk in any order: the header of a new segment may be lost alone."""

    async def story(topic: RecordedTopic) -> None:
        await topic.put()
        await topic.flush(0, 1, 2, 3)  # releases the segment
        await topic.put(0, 1)
        await _moved_to_and_fro(topic, 2)  # skips sequences
        await topic.put(2, 3)
        await topic.put(2, 3)
        await topic.close()

    durable = Durable.FLUSHED if options else Durable.ACKNOWLEDGED
    losses = [TORN_START]
    await check_power_loss(tmp_path, story, durable, losses=losses, samples=0, every=13, **options)


async def _moved_to_and_fro(topic: RecordedTopic, bucket: int) -> None:
    """Let another owner write to a bucket, so that its sequences are far ahead of this log."""
    await topic.close_bucket(bucket)
    mine, topic.topic = topic.topic, CrashableTopic(topic.root, **topic.options)
    for _ in range(6):
        await topic.put(bucket)
    await topic.close_bucket(bucket)
    await topic.topic.close()
    topic.topic = mine


async def test_unsynced_list_put_is_whole_or_absent_after_power_loss(tmp_path: Path) -> None:
    """In interval mode the flush of one bucket syncs the parts of its puts in all buckets."""
    await check_power_loss(
        tmp_path, lists_and_flushes, Durable.FLUSHED, samples=3, every=37, **INTERVAL
    )


async def test_unsynced_list_put_in_several_segments_is_whole_or_absent_after_power_loss(
    tmp_path: Path, small_segments: None
) -> None:
    await check_power_loss(tmp_path, cold_bucket, Durable.FLUSHED, samples=3, every=37, **INTERVAL)


async def test_unsynced_list_put_of_several_frames_is_whole_or_absent_after_power_loss(
    tmp_path: Path, several_frames: None
) -> None:
    await check_power_loss(tmp_path, long_lists, Durable.FLUSHED, samples=3, every=29, **INTERVAL)


async def test_topic_with_a_log_per_bucket_survives_power_loss_while_it_is_migrated(
    tmp_path: Path,
) -> None:
    """The buckets were written by themselves, each with its own log, as before format 2."""

    async def story(topic: RecordedTopic) -> None:
        folder = bucket_folder(topic.root / QUEUES / "topic", 0).parent
        for bucket in range(topic.expected.buckets):
            own = PersistingBackend(bucket, str(bucket_folder(folder, bucket)), **OWN)
            rows = topic.parts({bucket: 2})
            name = f"own-{bucket}"
            topic.expected.add(name, rows)
            await own.put_batch(rows[bucket])
            if bucket == 1:
                await own.flush()
            topic.recorder.promise(name)
            del own  # killed
        await topic.put(0, 1)
        await topic.put()
        await topic.close()

    await check_power_loss(tmp_path, story, every=41)


OWN = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}


# A crash while a crash is being recovered from


@pytest.mark.parametrize("opened", [(0,), (1, 2), (0, 1, 2, 3)])
async def test_power_loss_while_some_buckets_recover_loses_nothing(
    tmp_path: Path, opened: tuple[int, ...]
) -> None:
    async def story(topic: RecordedTopic) -> None:
        await topic.put()
        await topic.flush(1)
        await topic.put(0, 1, rows=2)
        await topic.put()

    topic = await record(tmp_path, story)
    last = topic.recorder.recording.crash_points[-1]
    await check_second_crash(tmp_path, topic, last, LOSE_UNSYNCED, opened, every=13)


async def test_power_loss_after_a_kill_at_any_call_of_a_close_loses_nothing(
    tmp_path: Path,
) -> None:
    """Among others, a note was removed and the removal not synced when the owner was killed."""

    async def story(topic: RecordedTopic) -> None:
        await topic.put()
        await topic.close()

    topic = await record(tmp_path, story, buckets=2)
    points = topic.recorder.recording.crash_points
    closing = [p for p in points if "log.json" in p.label or ".wal" in p.label]
    assert any(p.label == "remove log.json" for p in closing)
    for point in closing[-6:]:
        await check_second_crash(tmp_path, topic, point, KEEP_EVERYTHING, (1,), every=17)


async def test_unsynced_log_of_a_killed_owner_is_durable_in_all_buckets_once_one_is_open(
    tmp_path: Path,
) -> None:
    async def story(topic: RecordedTopic) -> None:
        await topic.put()
        await topic.put(0, 1)

    topic = await record(tmp_path, story, Durable.FLUSHED, **INTERVAL)
    last = topic.recorder.recording.crash_points[-1]
    await check_second_crash(tmp_path, topic, last, KEEP_EVERYTHING, (0,), every=11)


# Nightly


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_list_put_is_whole_after_power_loss_at_every_call(
    tmp_path: Path, story: Story
) -> None:
    await check_power_loss(tmp_path, story, losses=(*FIXED_LOSSES, TORN_START), samples=3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_list_put_of_several_frames_is_whole_after_power_loss_at_every_call(
    tmp_path: Path, several_frames: None
) -> None:
    await check_power_loss(tmp_path, long_lists, losses=FIXED_LOSSES, samples=3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_released_segments_cost_no_record_after_power_loss_at_every_call(
    tmp_path: Path, small_segments: None
) -> None:
    await check_power_loss(tmp_path, cold_bucket, losses=FIXED_LOSSES, samples=3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_unsynced_list_put_in_several_segments_is_whole_or_absent_at_every_call(
    tmp_path: Path, small_segments: None
) -> None:
    await check_power_loss(
        tmp_path, cold_bucket, Durable.FLUSHED, losses=FIXED_LOSSES, samples=6, **INTERVAL
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_unsynced_list_put_is_whole_or_absent_after_power_loss_at_every_call(
    tmp_path: Path, several_frames: None
) -> None:
    await check_power_loss(
        tmp_path, long_lists, Durable.FLUSHED, losses=FIXED_LOSSES, samples=6, **INTERVAL
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
async def test_random_story_survives_power_loss(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 300)
    options = dict(INTERVAL) if seed % 4 > 1 else {}
    durable = Durable.FLUSHED if options else Durable.ACKNOWLEDGED
    story = random_story(seed, 25)
    await check_power_loss(
        tmp_path, story, durable, losses=FIXED_LOSSES, samples=3, every=2, **options
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
async def test_second_power_loss_in_a_random_story_loses_nothing(tmp_path: Path, seed: int) -> None:
    topic = await record(tmp_path, random_story(100 + seed, 15))
    rng = random.Random(seed)
    points = topic.recorder.recording.crash_points
    for index in range(seed, len(points), 12):
        opened = rng.sample(range(4), k=rng.randint(1, 4))
        loss = rng.choice([KEEP_EVERYTHING, LOSE_UNSYNCED, sampled(f"{seed}-{index}")])
        await check_second_crash(tmp_path, topic, points[index], loss, opened, every=3)
