"""Topics that are deleted, and created again, while readers of a work group are open."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.work_places import WorkPlace

from persisting.errors import BucketLocked, NoSuchTopic, StorageError
from persisting.local_socket import socket_groups
from persisting.queue import WorkReader
from persisting.topic import deletion

pytestmark = pytest.mark.asyncio


def folder_of(place: WorkPlace) -> Path:
    return place.folder / place.topic


async def member_without_keeper(place: WorkPlace) -> WorkReader:
    """Return a member whose keeper has ended, as if that had been in another process."""
    writer = await place.writer(2, num_buckets=1)
    member = await place.member()
    assert len(await member.fetch(1)) == 1
    await writer.close()
    local = place.kept_here()
    await socket_groups._give_up(local)
    return member


async def test_a_deleted_topic_does_not_come_back_with_its_group(place: WorkPlace) -> None:
    member = await member_without_keeper(place)
    await asyncio.to_thread(deletion.delete, folder_of(place))
    with pytest.raises(NoSuchTopic, match="was deleted since this reader was opened"):
        await member.fetch(1)
    assert not folder_of(place).exists()


async def test_a_reader_of_a_deleted_topic_does_not_read_its_successor(place: WorkPlace) -> None:
    member = await member_without_keeper(place)
    await asyncio.to_thread(deletion.delete, folder_of(place))
    await place.writer(2, num_buckets=1)
    with pytest.raises(NoSuchTopic, match="deleted and created again"):
        await member.fetch(1)
    other = await place.member()
    assert len(await other.fetch(2)) == 2
    with pytest.raises(StorageError, match="created again since this reader was opened"):
        await member.fetch(1)


async def test_a_topic_whose_group_is_kept_is_not_deleted(
    place: WorkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await place.writer(1, num_buckets=1)
    await place.member()
    await writer.close()
    with pytest.raises(BucketLocked, match="is being read by group 'solvers'"):
        await asyncio.to_thread(deletion.delete, folder_of(place))
    # The keeper may also start between the check and the deletion.
    monkeypatch.setattr(deletion, "check_deletable", lambda folder: None)
    with pytest.raises(BucketLocked, match="is being read by group 'solvers'"):
        await asyncio.to_thread(deletion.delete, folder_of(place))
    assert folder_of(place).exists()


async def test_nothing_is_acknowledged_in_a_folder_that_was_removed(place: WorkPlace) -> None:
    writer = await place.writer(2, num_buckets=1)
    member = await place.member()
    first, second = await member.fetch(2)
    await first.ack()
    await writer.close()
    while folder_of(place).exists():  # its keeper may write a file meanwhile
        await asyncio.to_thread(shutil.rmtree, folder_of(place), ignore_errors=True)
    with pytest.raises(StorageError, match="was removed while the group was in use"):
        await second.ack()
    with pytest.raises(NoSuchTopic, match="was deleted since this reader was opened"):
        await second.ack()
    assert not folder_of(place).exists()
