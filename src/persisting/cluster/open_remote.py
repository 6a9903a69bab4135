"""Opening writers and readers of topics on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting import store_address
from persisting.cluster import store_access
from persisting.cluster.cluster_topic import ClusterTopic
from persisting.cluster.host import host_on, serve
from persisting.cluster.placement import ranked
from persisting.cluster.pulsing_transport import PulsingTransport
from persisting.cluster.transport import HOST_ENDPOINT, Transport, Unreachable
from persisting.cluster.wire import Request
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.store.object_store import ObjectStore
from persisting.store.probe import probe
from persisting.store_address import is_store_address
from persisting.topic import spec as topics
from persisting.topic import store_config
from persisting.topic.address import TopicAddress
from persisting.topic.local_handle import agreed_config
from persisting.topic.open_local import ReaderOptions, deadline_of, open_reader, when_found
from persisting.topic.reader import QueueReader
from persisting.topic.registry import register_backend
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.topic_names import check_name
from persisting.topic.writer import QueueWriter

_ASK_SECONDS = 3.0
_WAIT_STEP_SECONDS = 0.2


async def open_remote_writer(
    system: Any, wanted: TopicSpec, cls: type | None, storage_path: Any, writer_id: str | None
) -> QueueWriter:
    """Return a writer of a topic on the nodes of ``system``."""
    transport = await ready_transport(system, wanted, cls)
    topic = await _already_open(transport, wanted, storage_path)
    if topic is None:
        folder, config, changed = await in_thread(agreed_config, wanted, storage_path)
        if folder is None:
            topic = await _in_memory(transport, wanted)
        else:
            topic = ClusterTopic(transport, str(folder), str(folder.parent), config, None)
            if changed:
                await topic.reopen()
    return QueueWriter(topic, writer_id=writer_id)


async def open_remote_store_writer(
    system: Any,
    wanted: TopicSpec,
    cls: type | None,
    storage_path: str,
    storage_options: Mapping[str, Any] | None,
    writer_id: str | None,
) -> QueueWriter:
    """Return a writer of a topic in an object store, whose buckets the nodes of ``system`` own."""
    if cls is not None:
        raise InvalidArgument(
            f"a topic at {storage_path} needs the backend 'persisting' by its name, got {cls!r}"
        )
    wanted.check()
    store = _store_at(storage_path, wanted.topic, storage_options)
    await in_thread(probe, store)
    config, changed = await in_thread(store_config.agreed, wanted, store)
    transport = await ready_transport(system, wanted, cls)
    topic = ClusterTopic.in_store(transport, store, config)
    if changed:
        await topic.reopen()
    return QueueWriter(topic, writer_id=writer_id)


def _store_at(
    storage_path: str, topic: str, storage_options: Mapping[str, Any] | None
) -> ObjectStore:
    """Return the store of a topic; the host of this process reaches it in the same way."""
    address = store_address.parse(storage_path) / check_name("topic", topic)
    store_access.remember(storage_path, storage_options)
    return store_access.topic_store(address)


async def _already_open(
    transport: Transport, wanted: TopicSpec, storage_path: Any
) -> ClusterTopic | None:
    """Return the open topic that is meant when no storage_path is given, or one in memory."""
    if wanted.backend == "memory":
        candidates = [t for t in await _open_topics(transport, wanted.topic) if _in_ram(t)]
    elif wanted.backend is None and storage_path is None:
        candidates = await _open_topics(transport, wanted.topic)
    else:
        return None
    return _remote(transport, wanted, _the_only(candidates, wanted.topic)) if candidates else None


def _in_ram(known: dict[str, Any]) -> bool:
    return TopicAddress.parse(known["place"]).is_in_memory


def _the_only(candidates: list[dict[str, Any]], topic: str) -> dict[str, Any]:
    """Return the only topic of several answers, or raise if they mean different ones."""
    places = sorted({candidate["place"] for candidate in candidates})
    if len(places) > 1:
        raise InvalidArgument(
            f"there are several open topics {topic!r} ({', '.join(places)}); choose one with "
            "storage_path"
        )
    return candidates[0]


async def open_remote_reader(
    system: Any,
    wanted: TopicSpec,
    cls: type | None,
    storage_path: Any,
    options: ReaderOptions,
    storage_options: Mapping[str, Any] | None = None,
) -> QueueReader:
    """Return a reader of a topic on the nodes of ``system``."""
    deadline = deadline_of(options.wait_for_topic)
    if is_store_address(storage_path):
        store_access.remember(storage_path, storage_options)
    transport = await ready_transport(system, wanted, cls)
    topic = await when_found(
        lambda: find_remote_topic(transport, wanted, storage_path), deadline, _WAIT_STEP_SECONDS
    )
    return await open_reader(topic, options)


async def open_reader_of_others(
    transport: Transport,
    wanted: TopicSpec,
    storage_path: str,
    options: ReaderOptions,
    storage_options: Mapping[str, Any] | None = None,
) -> QueueReader:
    """Return a reader of a topic on other nodes; this node never becomes a storage node."""
    if is_store_address(storage_path):
        store_access.remember(storage_path, storage_options)
    return await open_reader(await find_remote_topic(transport, wanted, storage_path), options)


async def ready_transport(system: Any, wanted: TopicSpec, cls: type | None) -> Transport:
    """Return the way to a system's nodes; if none of them hosts buckets, this one does."""
    transport = PulsingTransport(system)
    if cls is not None and wanted.backend is not None:
        register_backend(wanted.backend, cls)
    if host_on(transport.node) is None and not await transport.hosts():
        await serve(system)
    return transport


async def find_remote_topic(
    transport: Transport, wanted: TopicSpec, storage_path: Any
) -> ClusterTopic:
    """Return a topic that is open on the cluster, or the one on disk or in an object store."""
    if is_store_address(storage_path):
        return await _find_in_store(transport, wanted, storage_path)
    if storage_path is None:
        candidates = await _open_topics(transport, wanted.topic)
        if candidates:
            return _remote(transport, wanted, _the_only(candidates, wanted.topic))
    folder = topics.topic_folder(storage_path, wanted.topic)
    config = await in_thread(topics.load, folder.resolve(), filesystem.current())
    if config is None:
        in_memory = [t for t in await _open_topics(transport, wanted.topic) if _in_ram(t)]
        if in_memory:
            return _remote(transport, wanted, in_memory[0])
        raise NoSuchTopic(
            f"{topics.no_such_topic(folder)} It is not open on the cluster either; to wait for it, "
            "pass wait_for_topic=True"
        )
    place = folder.resolve()
    return ClusterTopic(transport, str(place), str(place.parent), wanted.applied_to(config), None)


async def _find_in_store(
    transport: Transport, wanted: TopicSpec, storage_path: str
) -> ClusterTopic:
    store = _store_at(storage_path, wanted.topic, None)
    config = await in_thread(store_config.load, store)
    if config is None:
        raise NoSuchTopic(
            f"there is no topic {wanted.topic!r} at {storage_path}. To wait for it, pass "
            "wait_for_topic=True"
        )
    return ClusterTopic.in_store(transport, store, wanted.applied_to(config))


def _remote(transport: Transport, wanted: TopicSpec, known: dict[str, Any]) -> ClusterTopic:
    """Return the topic that a host described."""
    config = wanted.applied_to(msgspec.convert(known["config"], TopicConfig))
    place = known["place"]
    address = TopicAddress.parse(place).store
    if address is not None:
        return ClusterTopic.in_store(transport, store_access.topic_store(address), config)
    if _in_ram(known):
        return ClusterTopic(transport, place, None, config, known["node"])
    return ClusterTopic(transport, place, place.rsplit("/", 1)[0], config, None)


async def _in_memory(transport: Transport, wanted: TopicSpec) -> ClusterTopic:
    """Create a topic in the memory of a node."""
    place = str(TopicAddress.in_memory(wanted.topic))
    here = host_on(transport.node)
    hosts = await transport.hosts() or ([here.node] if here is not None else [])
    topic = ClusterTopic(transport, place, None, wanted.new(), ranked(place, hosts)[0])
    await topic.bucket(0).stats()
    return topic


async def _open_topics(transport: Transport, name: str) -> list[dict[str, Any]]:
    """Return the open topics of this name, as their hosts describe them."""
    descriptions: list[dict[str, Any]] = []
    here = host_on(transport.node)
    if here is not None:
        descriptions += here.topics_named(name)
    for node in await transport.hosts():
        if here is not None and node == here.node:
            continue
        try:
            connection = await transport.connect(HOST_ENDPOINT, node, _ASK_SECONDS)
            reply = await connection.ask(Request("topics", {"topic": name}), _ASK_SECONDS)
        except Unreachable:
            continue
        descriptions += reply.value
    return descriptions
