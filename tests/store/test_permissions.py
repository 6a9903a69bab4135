"""What a user may do in an object store who may read and list its objects, and change none."""

from __future__ import annotations

from typing import Any

import pytest
from support.object_stores import READER_KEY, SECRET, SeaweedFS, fresh_prefix, url
from support.topic_places import ids, numbered

from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import StoreError, open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse


@pytest.fixture
def place(server: SeaweedFS) -> dict[str, Any]:
    return {
        "topic": "t",
        "storage_path": url(fresh_prefix()),
        "storage_options": server.options(),
    }


@pytest.fixture
def read_only(server: SeaweedFS, place: dict[str, Any]) -> dict[str, Any]:
    """The same place, as the user who may only read."""
    return place | {"storage_options": server.options(aws_access_key_id=READER_KEY)}


async def test_reader_needs_no_permission_to_write(
    place: dict[str, Any], read_only: dict[str, Any]
) -> None:
    async with await write_queue(**place, durable=True, num_buckets=2) as writer:
        await writer.put(numbered(20))
    async with await read_queue(**read_only) as reader:
        assert sorted(ids(await reader.get(None))) == list(range(20))


async def test_errors_of_a_group_member_and_a_writer_name_what_was_refused(
    place: dict[str, Any], read_only: dict[str, Any]
) -> None:
    async with await write_queue(**place, durable=True, num_buckets=1) as writer:
        await writer.put(numbered(5))
    with pytest.raises(StorageError) as group:
        async with await read_queue(**read_only, group="g") as reader:
            await reader.get(None)
    with pytest.raises(StorageError) as owner:
        async with await write_queue(**read_only, durable=True) as other:
            await other.put({"id": 6})
    for refused in (group, owner):
        assert "403" in str(refused.value)
        assert place["storage_path"] in str(refused.value)
        assert SECRET not in str(refused.value)
    async with await write_queue(**place, durable=True) as writer:
        await writer.put(numbered(5, 5))
    async with await read_queue(**place) as reader:
        assert ids(await reader.get(None)) == list(range(10))


def test_refused_deletion_is_not_repeated(server: SeaweedFS) -> None:
    """S3 answers it with success, and names the refusal for each object."""
    address = parse(url(fresh_prefix()))
    store = open_store(
        address, StorageOptions(server.options(aws_access_key_id=READER_KEY)), retry_seconds=600
    )
    with pytest.raises(StoreError, match=r"refuses to delete .*check the credentials"):
        store.delete(["a", "b"])
