"""Opening topics in an object store, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from persisting import store_address
from persisting.backends.table_backend import TableBackend
from persisting.bucket.store_ownership import look_at_an_owner
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, InvalidArgument, NoSuchTopic
from persisting.store.object_store import ObjectStore, open_store
from persisting.store.probe import is_probed, probe
from persisting.store.storage_options import StorageOptions
from persisting.topic import store_config, store_files
from persisting.topic.address import TopicAddress
from persisting.topic.bucket_client import Topic
from persisting.topic.live_topics import live_in_store
from persisting.topic.local import Listening
from persisting.topic.local_bucket import LocalBucketClient
from persisting.topic.local_handle import LocalHandle, hold_live, open_for_writing
from persisting.topic.open_local import ReaderOptions, deadline_of, open_reader, when_found
from persisting.topic.reader import QueueReader
from persisting.topic.readonly import ReadonlyBucketClient, ReadonlyTopic
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.table_calls import T, TableCall, TableRead
from persisting.topic.topic_names import check_name
from persisting.topic.writer import QueueWriter

_WAIT_STEP_SECONDS = 0.5


def store_of(
    storage_path: str, topic: str, storage_options: Mapping[str, Any] | None
) -> ObjectStore:
    """Return the store of a topic. No request is made."""
    address = store_address.parse(storage_path) / check_name("topic", topic)
    return open_store(address, StorageOptions(storage_options))


def refuse_options_of_stores(storage_options: Any) -> None:
    """Raise for ``storage_options`` of a topic that is not in an object store."""
    if storage_options is not None:
        raise InvalidArgument(
            "storage_options are for topics in an object store: "
            "storage_path='s3://bucket/prefix', gs:// or az://"
        )


async def open_store_writer(
    wanted: TopicSpec, cls: type | None, store: ObjectStore, writer_id: str | None
) -> QueueWriter:
    """Return a writer of a topic whose buckets this process owns."""
    return QueueWriter(await open_store_topic(wanted, cls, store), writer_id=writer_id)


async def open_store_topic(
    wanted: TopicSpec, cls: type | None, store: ObjectStore, listening: Listening | None = None
) -> LocalHandle:
    """Return a handle on a topic of this process, which is created if it does not exist.

    ``listening`` creates the listener of a topic that other processes may share.
    """
    if cls is not None:
        raise InvalidArgument(
            f"a topic at {store.address} needs the backend 'persisting' by its name, got {cls!r}"
        )
    wanted.check()
    if not is_probed(store):
        await asyncio.gather(in_thread(probe, store), in_thread(look_at_an_owner, store))
    return await open_for_writing(wanted, None, None, listening, store)


async def open_store_reader(
    wanted: TopicSpec, store: ObjectStore, options: ReaderOptions
) -> QueueReader:
    """Return a reader of a topic that this process owns, or of its tables."""
    deadline = deadline_of(options.wait_for_topic)
    topic = await when_found(lambda: find_in_store(wanted, store), deadline, _WAIT_STEP_SECONDS)
    return await open_reader(topic, options)


async def find_in_store(wanted: TopicSpec, store: ObjectStore) -> Topic:
    """Return a topic that this process owns, or its tables."""
    live = live_in_store(store.address)
    if live is not None:
        wanted.applied_to(live.config)
        handle = hold_live(live)
        if handle is not None:
            return handle
    config = await in_thread(store_config.load, store)
    if config is None:
        raise NoSuchTopic(
            f"there is no topic {store.address.name!r} at {store.address.parent}. To wait for it, "
            "pass wait_for_topic=True"
        )
    return StoreReadTopic(store, wanted.applied_to(config))


class StoreReadTopic(ReadonlyTopic):
    """A topic in an object store, opened for reading."""

    def __init__(self, store: ObjectStore, config: TopicConfig) -> None:
        self._store, self._config = store, config
        self._clients: dict[int, ReadonlyBucketClient] = {}

    folder = None  # type: ignore[assignment]

    @property
    def store(self) -> ObjectStore:
        return self._store

    def bucket(self, bucket: int) -> ReadonlyBucketClient:
        if bucket not in self._clients:
            self._clients[bucket] = StoreBucketClient(self, self._config, bucket)
        return self._clients[bucket]

    async def open_to_change(self) -> Topic:
        """Open the topic for a call that only the owner of a bucket can carry out."""
        wanted = TopicSpec(topic=self._config.topic)
        return await open_for_writing(wanted, None, None, store=self._store)


class StoreBucketClient(ReadonlyBucketClient):
    """A bucket in an object store, or the live bucket while this process owns it."""

    may_be_behind = True

    def __init__(self, topic: StoreReadTopic, config: TopicConfig, bucket: int) -> None:
        self._topic, self._config, self._bucket = topic, config, bucket
        self._address = TopicAddress.in_store(topic.store.address)
        self._reader: TableBackend | None = None

    def _open(self) -> TableBackend:
        return TableBackend(store_files.open_reader(self._topic.store, self._config, self._bucket))

    async def call(self, call: TableCall[T]) -> T:
        source = await self._source()
        if isinstance(source, LocalBucketClient) or isinstance(call, TableRead):
            return await super().call(call)
        return await self._as_owner(call)

    async def _as_owner(self, call: TableCall[T]) -> T:
        """Own the bucket for the duration of a call, or ask its owner; raise if a live process
        owns it that cannot be asked."""
        owner = await self._topic.open_to_change()
        try:
            return await owner.bucket(self._bucket).call(call)
        except BucketLocked as exc:
            raise BucketLocked(
                exc.summary, owner=exc.owner, hint=f"call {call.op}() in that process"
            ) from exc
        finally:
            await owner.close()
            if self._reader is not None:
                self._reader.bucket.expire_view()
