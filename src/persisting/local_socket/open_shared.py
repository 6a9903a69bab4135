"""Opening topics that several processes of one user share."""

from __future__ import annotations

from typing import Any

from persisting.cluster.transport import Unreachable
from persisting.cluster.wire import Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed
from persisting.local_socket import frames
from persisting.local_socket.connection import Connections
from persisting.local_socket.server import TopicServer
from persisting.local_socket.shared_reader import SharedReaderTopic
from persisting.local_socket.shared_topic import SharedTopic, as_shared, notes_of
from persisting.store.object_store import ObjectStore
from persisting.topic.bucket_client import Topic
from persisting.topic.local_handle import LocalHandle, open_for_writing
from persisting.topic.open_local import (
    ReaderOptions,
    deadline_of,
    find_topic,
    open_reader,
    when_found,
)
from persisting.topic.open_store import StoreReadTopic, find_in_store, open_store_topic
from persisting.topic.reader import QueueReader
from persisting.topic.readonly import ReadonlyTopic
from persisting.topic.spec import TopicSpec
from persisting.topic.writer import QueueWriter

_WAIT_STEP_SECONDS = 0.05
_STORE_WAIT_STEP_SECONDS = 0.5


async def open_shared_writer(
    wanted: TopicSpec, cls: type | None, storage_path: Any, writer_id: str | None
) -> QueueWriter:
    """Return a writer of a topic whose buckets this process or others own."""
    handle = await open_for_writing(wanted, storage_path, cls, TopicServer)
    return await _writer_of(handle, writer_id)


async def open_shared_store_writer(
    wanted: TopicSpec, cls: type | None, store: ObjectStore, writer_id: str | None
) -> QueueWriter:
    """The same for a topic in an object store."""
    handle = await open_store_topic(wanted, cls, store, TopicServer)
    return await _writer_of(handle, writer_id)


async def _writer_of(handle: LocalHandle, writer_id: str | None) -> QueueWriter:
    topic = as_shared(handle)
    try:
        if handle.has_changed_topic and isinstance(topic, SharedTopic):
            await _reconfigure_owners(handle)
        return QueueWriter(topic, writer_id=writer_id)
    except BaseException:
        await topic.close()
        raise


async def open_shared_reader(
    wanted: TopicSpec, cls: type | None, storage_path: Any, options: ReaderOptions
) -> QueueReader:
    """Return a reader of a topic, which reads from the owners of its buckets or from its files."""
    deadline = deadline_of(options.wait_for_topic)

    async def find() -> Topic:
        topic = await find_topic(wanted, cls, storage_path)
        if isinstance(topic, ReadonlyTopic):
            return SharedReaderTopic(topic.folder, topic.config)
        return as_shared(topic) if isinstance(topic, LocalHandle) else topic

    return await open_reader(await when_found(find, deadline, _WAIT_STEP_SECONDS), options)


async def open_shared_store_reader(
    wanted: TopicSpec, store: ObjectStore, options: ReaderOptions
) -> QueueReader:
    """The same for a topic in an object store, which is read there unless this process owns it."""
    deadline = deadline_of(options.wait_for_topic)

    async def find() -> Topic:
        topic = await find_in_store(wanted, store)
        if isinstance(topic, StoreReadTopic):
            return SharedStoreReaderTopic(topic.store, topic.config)
        return as_shared(topic) if isinstance(topic, LocalHandle) else topic

    return await open_reader(await when_found(find, deadline, _STORE_WAIT_STEP_SECONDS), options)


class SharedStoreReaderTopic(StoreReadTopic):
    """A topic in an object store, opened for reading; other processes may own its buckets."""

    async def open_to_change(self) -> Topic:
        wanted = TopicSpec(topic=self.config.topic)
        return as_shared(await open_for_writing(wanted, None, None, TopicServer, self.store))


async def _reconfigure_owners(handle: LocalHandle) -> None:
    """Have the owners of the buckets reopen them as the topic file says, which has changed."""
    for path in await in_thread(_sockets_of_owners, handle):
        connections = Connections()
        try:
            owner = await connections.to(path)
            await owner.ask(frames.TOPIC, Request("reconfigure"))
        except (Unreachable, BucketClosed):
            continue  # it has just ended: the next owner reads the new file
        finally:
            connections.close()


def _sockets_of_owners(handle: LocalHandle) -> list[str]:
    """Return where the other owners of the topic's buckets on this machine listen."""
    noted = notes_of(handle)
    notes = [noted.read(bucket) or {} for bucket in range(handle.config.num_buckets)]
    sockets = {note["socket"] for note in notes if "socket" in note}
    return sorted(sockets - {handle.topic.listening_at})
