"""Failed and short writes and failed syncs of a shared log, at every call.

Puts raise or wait, no acknowledged record is lost, and all buckets of the log continue afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.crash.disk_model import LOSE_UNSYNCED, UNDO_REMOVALS
from support.crash.failing_disk import ERRORS, FaultyFileSystem
from support.crash.failing_syncs import FailingSyncs
from support.crash.topics import (
    INTERVAL,
    CrashableTopic,
    ExpectedTopic,
    RecordedTopic,
    TopicExplorer,
    Unrecorded,
    check_topic,
)
from support.faults import FaultyFileSystem as NamedFaults

from persisting import fs
from persisting.bucket import log_note
from persisting.errors import StorageError, WALError

BUCKETS = 3
PATIENCE = 30


class FaultyStory:
    """Works on a topic while a call fails; repeats what failed."""

    def __init__(self, root: Path, disk: Any, heal: Callable[[], None], **options: Any) -> None:
        self.topic = CrashableTopic(root, BUCKETS, **options)
        self.expected = ExpectedTopic(BUCKETS)
        self.disk, self._heal, self._numbers = disk, heal, itertools.count()

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.put(0, 1, 2)
            await self.put(0, 1)
            await self.repeat(lambda: self.flush(1))
            await self.put(2)
            await self.put(0, 1, 2)
            await self.repeat(lambda: self.topic.topic.close_bucket(0))
            await self.put(0, 2)

    async def put(self, *buckets: int) -> None:
        """Put a numbered list until it is acknowledged."""
        number = next(self._numbers)
        parts = {b: [{"id": f"{number}.{b}", "n": number}] for b in buckets}
        await self.repeat(lambda: self.topic.put(parts, ("writer", number)))
        self.expected.add(str(number), parts)
        if hasattr(self.disk, "promise"):
            self.disk.promise(str(number))

    async def flush(self, bucket: int) -> None:
        await (await self.topic.backend(bucket)).flush()

    async def repeat(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Repeat a call until it succeeds; the fault ends after the first failure."""
        for _ in range(5):
            try:
                await call()
                return
            except StorageError:
                self._heal()
        raise AssertionError("it still fails")


async def run_with_fault(
    root: Path, index: int, code: int, *, lasting: bool, **options: Any
) -> bool:
    """Fail one call; return whether it was reached. Everything put must be there afterwards."""
    root.mkdir()
    disk = FaultyFileSystem()
    with fs.use(disk):
        story = FaultyStory(root, disk, disk.heal, **options)
        disk.arm(index, code, lasting=lasting)
        await story.run()
        fired = disk.fired
        if index % 2:
            await story.repeat(story.topic.close)
        disk.heal()
    if not index % 2:
        await story.topic.drop()
    await check_topic(root, story.expected, story.expected.puts, **options)
    return fired


async def check_faults(tmp_path: Path, *, step: int, first: int = 0, **options: Any) -> None:
    codes = itertools.cycle(ERRORS.values())
    for index in range(first, 2000, step):
        code, lasting = next(codes), index // step % 3 == 0
        try:
            if not await run_with_fault(
                tmp_path / str(index), index, code, lasting=lasting, **options
            ):
                assert index > 40
                return
        except BaseException as exc:
            name = errno.errorcode[code]
            raise AssertionError(f"call {index} failed ({name}, lasting={lasting}): {exc}") from exc
    raise AssertionError("the fault was hit in every run")


@pytest.mark.parametrize("options", [{}, INTERVAL], ids=["synced", "interval"])
async def test_failed_call_loses_nothing_and_all_buckets_continue(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    await check_faults(tmp_path, step=7, **options)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{}, INTERVAL], ids=["synced", "interval"])
@pytest.mark.parametrize("turn", range(12))
async def test_any_failed_call_loses_nothing_and_all_buckets_continue(
    tmp_path: Path, options: dict[str, Any], turn: int
) -> None:
    """The turns combine every call with every error, lasting and not."""
    codes = list(ERRORS.values())
    for index in range(2000):
        code, lasting = codes[(index + turn) % 4], (index + turn) % 3 == 0
        folder = tmp_path / str(index)
        if not await run_with_fault(folder, index, code, lasting=lasting, **options):
            return


async def check_failed_syncs(tmp_path: Path, *, step: int) -> None:
    """Fail one sync, then lose power wherever something was promised, and in between."""
    for index in range(0, 2000, step):
        root, states = tmp_path / str(index), tmp_path / f"states-{index}"
        root.mkdir()
        states.mkdir()
        disk = FailingSyncs(root)
        with fs.use(disk):

            def heal(disk: FailingSyncs = disk) -> None:
                disk.lasting = False

            story = FaultyStory(root, disk, heal)
            disk.index, disk.syncs, disk.lasting = index, 0, index % 2 == 0
            await story.run()
            fired = disk.syncs > index
            heal()
            await story.repeat(story.topic.close)
        if not fired:
            assert index > 20
            return
        explorer = TopicExplorer(
            disk.recording, story.expected, states, losses=[LOSE_UNSYNCED, UNDO_REMOVALS], samples=0
        )
        try:
            await explorer.explore(every=11, first=index % 11)
        except Exception as exc:
            raise AssertionError(f"sync {index} failed: {exc}") from exc
    raise AssertionError("the fault was hit in every run")


async def test_failed_sync_of_a_shared_log_loses_nothing_with_the_power(tmp_path: Path) -> None:
    await check_failed_syncs(tmp_path, step=13)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_any_failed_sync_of_a_shared_log_loses_nothing_with_the_power(tmp_path: Path) -> None:
    await check_failed_syncs(tmp_path, step=1)


# Single faults


@pytest.fixture
def faults() -> Any:
    disk = NamedFaults()
    with fs.use(disk):
        yield disk


async def new_topic(tmp_path: Path, **options: Any) -> RecordedTopic:
    return RecordedTopic(tmp_path, buckets=BUCKETS, recorder=Unrecorded(), **options)


async def opened(tmp_path: Path, **options: Any) -> RecordedTopic:
    """A topic with a record in every bucket."""
    topic = await new_topic(tmp_path, **options)
    await topic.put()
    return topic


def note_of(topic: RecordedTopic, bucket: int) -> Path:
    return topic.topic.folder / f"bucket_{bucket}" / log_note.FILE


async def test_failed_log_blocks_no_bucket_for_longer_than_the_fault(
    tmp_path: Path, faults: NamedFaults
) -> None:
    topic = await opened(tmp_path)
    faults.fail_always("write", error=errno.ENOSPC)
    with pytest.raises(WALError):
        await topic.topic.put({0: [{"id": "failed", "n": 0}], 1: [{"id": "failed", "n": 0}]})
    faults.heal()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(topic.single(bucket) for bucket in range(BUCKETS)))
        await topic.put()
    await topic.topic.drop()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)


async def test_bucket_whose_note_could_not_be_synced_opens_in_a_later_process(
    tmp_path: Path, faults: NamedFaults
) -> None:
    """The note names a log that held nothing for the bucket and was removed."""
    topic = await new_topic(tmp_path)
    await topic.put(0)
    await topic.topic.backend(1)
    await topic.topic.topic.close_bucket(1)
    before = len(faults.calls)
    await topic.topic.backend(1)
    writes_note = faults.calls[before:].index("rename") + 1
    assert faults.calls[before + writes_note] == "sync_folder"
    await topic.topic.topic.close_bucket(1)
    faults.fail_once_at(writes_note)
    with pytest.raises(StorageError):
        await topic.topic.backend(1)
    faults.heal()
    await topic.close()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)


async def test_close_retried_after_a_failure_leaves_the_note_of_the_next_owner(
    tmp_path: Path, faults: NamedFaults
) -> None:
    topic = await opened(tmp_path)
    faults.fail_always("remove")
    await asyncio.gather(topic.topic.topic.close_bucket(1), return_exceptions=True)
    faults.heal()
    other = CrashableTopic(tmp_path, BUCKETS)
    topic.expected.add("other's", {1: [{"id": "other's", "n": 1}]})
    await other.put(topic.expected.puts["other's"])
    await topic.close()  # closes the rest, and what failed before
    assert note_of(topic, 1).exists()
    await other.drop()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)


async def test_bucket_whose_note_cannot_be_removed_closes_and_opens_again(
    tmp_path: Path, faults: NamedFaults
) -> None:
    topic = await opened(tmp_path)
    faults.fail_always("remove", "sync_folder")
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(topic.topic.topic.close_bucket(1), return_exceptions=True)
        faults.heal()
        await topic.put()
    await topic.topic.drop()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)


async def test_failed_flush_of_one_bucket_keeps_the_failed_log(
    tmp_path: Path, faults: NamedFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may only start over when the tables of all its buckets hold everything."""
    topic = await opened(tmp_path)
    broken = (await topic.topic.backend(2)).bucket
    monkeypatch.setattr(broken.table, "append", _raise_no_space)
    faults.fail_always("sync", error=errno.EIO)
    with pytest.raises(WALError):
        await topic.topic.put({0: [{"id": "failed", "n": 0}]})
    faults.heal()
    for _ in range(3):
        with pytest.raises(StorageError):
            await topic.topic.put({1: [{"id": "failed too", "n": 0}]})
    del broken
    await topic.topic.drop()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)


def _raise_no_space(*_: Any) -> None:
    raise StorageError("no space left")


async def test_log_stays_bounded_while_a_bucket_is_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 1000)
    topic = await opened(tmp_path, max_wal_size=5000)
    log = (await topic.topic.backend(0)).bucket.group_commit
    cold = await topic.topic.backend(2)
    sizes = []
    for _ in range(150):
        await topic.put(0, 1, text="x" * 100)
        sizes.append(log.size)
    assert max(sizes) <= 2 * 5000 + 1500
    assert cold.bucket.counts == (1, 0)  # flushed without a call of flush
    del log, cold
    await topic.topic.drop()
    await check_topic(tmp_path, topic.expected, topic.expected.puts)
