"""Topics of 0.4.0, with a log in each bucket, are migrated to a shared log, even if it crashes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import support.compat_topic as kept
from support import TESTS
from support.comparing import equal_but_for_absent
from support.crash.checks import PromiseBroken
from support.crash.disk_model import (
    FIXED_LOSSES,
    KEEP_EVERYTHING,
    LOSE_UNSYNCED,
    UNDO_REMOVALS,
    Loss,
    after_power_loss,
    sampled,
    write_tree,
)
from support.crash.recording import RecordingFileSystem
from support.filesystems import QuickFileSystem

from persisting import fs
from persisting.queue import PersistingBackend, write_queue
from persisting.topic.local import LocalTopic
from persisting.topic.open_local import topic_spec

FIXTURE = TESTS / "compat" / "fixtures" / "0.4.0"
LATER = [{"id": f"later-{n}", "n": n} for n in range(6)]


async def work(folder: Path) -> None:
    """Open the topic of 0.4.0, put a list, and close it."""
    async with await write_queue(topic=kept.TOPIC, storage_path=str(folder)) as writer:
        await writer.put(LATER)


async def check_content(folder: Path, expected: Iterable[list[dict[str, Any]]]) -> None:
    """Open the topic; it must hold one of these lists of records."""
    async with await write_queue(topic=kept.TOPIC, storage_path=str(folder)) as writer:
        rows = []
        for bucket in range(kept.BUCKETS):
            rows += (await writer._topic.bucket(bucket).read(0, None)).rows
    found = {row["id"]: row for row in rows}
    if len(found) != len(rows):
        raise PromiseBroken("records are stored twice")
    for records in expected:
        if set(found) == {record["id"] for record in records}:
            for record in records:
                if not equal_but_for_absent(record, found[record["id"]]):
                    raise PromiseBroken(f"{record} came back as {found[record['id']]}")
            return
    raise PromiseBroken(f"found {sorted(found)}")


async def check_migration(tmp_path: Path, losses: tuple[Loss, ...], every: int) -> None:
    disk = tmp_path / "disk"
    shutil.copytree(FIXTURE, disk / "queues")
    recorder = RecordingFileSystem(disk)
    with fs.use(recorder):
        await work(disk / "queues")
    checked = set()
    points = recorder.recording.crash_points
    for index in range(0, len(points), every):
        for loss in (*losses, sampled(index)):
            tree = after_power_loss(points[index].disk, loss)
            key = hash(frozenset(tree.items()))
            if key in checked:
                continue
            checked.add(key)
            root = tmp_path / "state"
            write_tree(tree, root)
            topic = root / "queues" / kept.TOPIC
            shared = list(topic.glob("log/*/*.wal"))
            if shared and json.loads((topic / "topic.json").read_bytes())["format"] < 2:
                raise PromiseBroken("0.4.0 would open this topic and ignore its log")
            is_done = index == len(points) - 1
            contents = [[*kept.ALL, *LATER]] if is_done else [kept.ALL, [*kept.ALL, *LATER]]
            try:
                with fs.use(QuickFileSystem()):
                    await check_content(root / "queues", contents)
            except Exception as exc:
                raise PromiseBroken(f"{exc}\nat {index} ({points[index].label}), {loss}") from exc
            shutil.rmtree(root)
    assert len(checked) > 15


async def test_topic_of_0_4_0_survives_power_loss_while_it_is_migrated(tmp_path: Path) -> None:
    await check_migration(tmp_path, (LOSE_UNSYNCED, KEEP_EVERYTHING, UNDO_REMOVALS), every=8)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_topic_of_0_4_0_survives_power_loss_at_every_call_while_it_is_migrated(
    tmp_path: Path,
) -> None:
    await check_migration(tmp_path, FIXED_LOSSES, every=1)


async def test_topic_of_0_4_0_is_migrated_bucket_by_bucket(tmp_path: Path) -> None:
    """Each bucket is opened by another process; the first is killed before the second begins."""
    shutil.copytree(FIXTURE, tmp_path / "queues")
    topic = tmp_path / "queues" / kept.TOPIC
    with fs.use(QuickFileSystem()):
        for bucket in range(kept.BUCKETS):
            owner = await _opened(tmp_path / "queues")
            await owner.backend(bucket)
            assert not list(topic.glob(f"bucket_{bucket}/wal/*.wal"))
            del owner  # killed
        await check_content(tmp_path / "queues", [kept.ALL])


async def _opened(folder: Path) -> LocalTopic:
    from persisting.topic.address import TopicAddress
    from persisting.topic.local_handle import agreed_config

    spec, _ = topic_spec(kept.TOPIC)
    place, config, _ = agreed_config(spec, folder)
    assert place is not None
    return LocalTopic(TopicAddress.in_folder(place), config, PersistingBackend)


async def test_bucket_of_a_topic_may_be_opened_by_itself_with_its_own_log(tmp_path: Path) -> None:
    """A backend that is used alone replays the shared log, and writes its own; the topic replays
    that in turn."""
    shutil.copytree(FIXTURE, tmp_path / "queues")
    folder = tmp_path / "queues"
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    with fs.use(QuickFileSystem()):
        owner = await _opened(folder)
        await owner.put_parts([(0, [{"id": "a", "n": 1}]), (1, [{"id": "b", "n": 1}])])
        del owner
        alone = PersistingBackend(0, str(folder / kept.TOPIC / "bucket_0"), **options)
        await alone.put({"id": "c", "n": 2})
        del alone
        owner = await _opened(folder)
        await owner.put_parts([(0, [{"id": "d", "n": 3}]), (1, [{"id": "e", "n": 3}])])
        del owner
        added = [{"id": name, "n": n} for name, n in zip("abcde", (1, 1, 2, 3, 3), strict=True)]
        await check_content(folder, [[*kept.ALL, *added]])
