"""Opening topics that several processes of one user share."""

from __future__ import annotations

from typing import Any

from persisting import fs as filesystem
from persisting.cluster.transport import Unreachable
from persisting.cluster.wire import Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed
from persisting.local_socket import frames
from persisting.local_socket.connection import Connections
from persisting.local_socket.server import TopicServer
from persisting.local_socket.shared_reader import SharedReaderTopic
from persisting.local_socket.shared_topic import SharedTopic
from persisting.lock import owner_of
from persisting.topic import spec as topics
from persisting.topic.bucket_client import Topic
from persisting.topic.local import LocalHandle, LocalTopic, open_for_writing
from persisting.topic.open_local import (
    ReaderOptions,
    deadline_of,
    find_topic,
    open_reader,
    when_found,
)
from persisting.topic.reader import QueueReader
from persisting.topic.readonly import ReadonlyTopic
from persisting.topic.spec import TopicConfig, TopicSpec, bucket_folder
from persisting.topic.writer import QueueWriter

_WAIT_STEP_SECONDS = 0.05


async def open_shared_writer(
    wanted: TopicSpec, cls: type | None, storage_path: Any, writer_id: str | None
) -> QueueWriter:
    """Return a writer of a topic whose buckets this process or others own."""
    folder = topics.topic_folder(storage_path, wanted.topic)
    before = await in_thread(topics.load, folder, filesystem.current())
    handle = await open_for_writing(wanted, storage_path, cls, TopicServer)
    if handle.topic.listener is None:
        return QueueWriter(handle, writer_id=writer_id)
    topic = SharedTopic(handle)
    try:
        if before is not None and before != handle.config:
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
        if isinstance(topic, LocalHandle) and topic.topic.listener is not None:
            return SharedTopic(topic)
        return topic

    return await open_reader(await when_found(find, deadline, _WAIT_STEP_SECONDS), options)


async def _reconfigure_owners(handle: LocalHandle) -> None:
    """Have the owners of the buckets reopen them as the topic file says, which has changed."""
    assert handle.folder is not None
    for path in await in_thread(_sockets_of_owners, handle.topic, handle.config):
        connections = Connections()
        try:
            owner = await connections.to(path)
            await owner.ask(frames.TOPIC, Request("reconfigure"))
        except (Unreachable, BucketClosed):
            continue  # it has just ended: the next owner reads the new file
        finally:
            connections.close()


def _sockets_of_owners(topic: LocalTopic, config: TopicConfig) -> list[str]:
    assert topic.folder is not None
    folders = [bucket_folder(topic.folder, bucket) for bucket in range(config.num_buckets)]
    notes = [owner_of(folder) or {} for folder in folders]
    return sorted({note["socket"] for note in notes if "socket" in note} - {topic.listening_at})
