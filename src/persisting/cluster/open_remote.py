"""Writers and readers of a cluster's topics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting.cluster.client import RemoteTopic
from persisting.cluster.host import HOST_NAME, host_here, living_hosts, serve
from persisting.cluster.peers import Unreachable, ask
from persisting.cluster.placement import ranked
from persisting.cluster.wire import Request
from persisting.concurrency.pool import in_thread, within
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.topic import spec as topics
from persisting.topic.address import TopicAddress
from persisting.topic.local import agreed_config
from persisting.topic.open_local import BucketChoice, deadline_of, reader_of
from persisting.topic.reader import QueueReader
from persisting.topic.registry import register_backend
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.writer import QueueWriter

_ASK_SECONDS = 3.0
_WAIT_STEP = 0.2


async def write_there(
    system: Any, wanted: TopicSpec, cls: type | None, storage_path: Any, writer_id: str | None
) -> QueueWriter:
    """A writer of a topic on the nodes of ``system``."""
    system = await _ready(system, wanted, cls)
    topic = await _already_open(system, wanted, storage_path)
    if topic is None:
        folder, config, changed = await in_thread(agreed_config, wanted, storage_path)
        if folder is None:
            topic = await _in_memory(system, wanted)
        else:
            topic = RemoteTopic(system, str(folder), str(folder.parent), config, None)
            if changed:
                await topic.reopen()
    return QueueWriter(topic, writer_id=writer_id)


async def _already_open(system: Any, wanted: TopicSpec, storage_path: Any) -> RemoteTopic | None:
    """The open topic that a call without a place, or for one in memory, means."""
    if wanted.backend == "memory":
        known = [one for one in await _open_topics(system, wanted.topic) if _in_ram(one)]
    elif wanted.backend is None and storage_path is None:
        known = await _open_topics(system, wanted.topic)
    else:
        return None
    return _remote(system, wanted, _the_only(known, wanted.topic)) if known else None


def _in_ram(known: dict[str, Any]) -> bool:
    return TopicAddress.parse(known["place"]).is_in_memory


def _the_only(known: list[dict[str, Any]], topic: str) -> dict[str, Any]:
    places = sorted({one["place"] for one in known})
    if len(places) > 1:
        raise InvalidArgument(
            f"there are several open topics {topic!r} ({', '.join(places)}); say which with "
            "storage_path"
        )
    return known[0]


async def read_there(
    system: Any,
    wanted: TopicSpec,
    cls: type | None,
    storage_path: Any,
    buckets: BucketChoice,
    wait_for_topic: bool | float,
    group: str | None,
    auto_commit: bool,
    enable_metrics: bool,
) -> QueueReader:
    """A reader of a topic on the nodes of ``system``."""
    deadline = deadline_of(wait_for_topic)
    system = await _ready(system, wanted, cls)
    while True:
        try:
            topic = await _find(system, wanted, storage_path)
            break
        except NoSuchTopic:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_WAIT_STEP)
    return await reader_of(topic, buckets, group, auto_commit, enable_metrics)


async def _ready(system: Any, wanted: TopicSpec, cls: type | None) -> Any:
    """The system below its wrapper, with at least one node that hosts buckets."""
    system = getattr(system, "_inner", system)
    if cls is not None and wanted.backend is not None:
        register_backend(wanted.backend, cls)
    if host_here(system) is None and not await living_hosts(system):
        await serve(system)
    return system


async def _find(system: Any, wanted: TopicSpec, storage_path: Any) -> RemoteTopic:
    """An open topic of the system, else the one on disk."""
    if storage_path is None:
        known = await _open_topics(system, wanted.topic)
        if known:
            return _remote(system, wanted, _the_only(known, wanted.topic))
    folder = topics.topic_folder(storage_path, wanted.topic)
    config = await in_thread(topics.load, folder.resolve(), filesystem.current())
    if config is None:
        in_memory = [one for one in await _open_topics(system, wanted.topic) if _in_ram(one)]
        if in_memory:
            return _remote(system, wanted, in_memory[0])
        raise NoSuchTopic(
            f"there is no topic {wanted.topic!r} in {folder.parent}, nor open on the system: check "
            "the name and the storage_path, or wait for it with wait_for_topic=True"
        )
    place = folder.resolve()
    return RemoteTopic(system, str(place), str(place.parent), wanted.applied_to(config), None)


def _remote(system: Any, wanted: TopicSpec, known: dict[str, Any]) -> RemoteTopic:
    config = wanted.applied_to(msgspec.convert(known["config"], TopicConfig))
    place = known["place"]
    if _in_ram(known):
        return RemoteTopic(system, place, None, config, known["node"])
    return RemoteTopic(system, place, place.rsplit("/", 1)[0], config, None)


async def _in_memory(system: Any, wanted: TopicSpec) -> RemoteTopic:
    """A new topic in the memory of a node."""
    place = str(TopicAddress.in_memory(wanted.topic))
    here = host_here(system)
    hosts = await living_hosts(system) or ([here.node] if here is not None else [])
    topic = RemoteTopic(system, place, None, wanted.new(), ranked(place, hosts)[0])
    await topic.bucket(0).stats()
    return topic


async def _open_topics(system: Any, name: str) -> list[dict[str, Any]]:
    """What the hosts say of open topics of this name."""
    found: list[dict[str, Any]] = []
    here = host_here(system)
    if here is not None:
        found += here.topics_named(name)
    for node in await living_hosts(system):
        if here is not None and node == here.node:
            continue
        try:
            door = await within(system.resolve_named(HOST_NAME, node_id=int(node)), _ASK_SECONDS)
            reply = await ask(door, node, Request("topics", {"topic": name}), _ASK_SECONDS)
        except (Unreachable, RuntimeError, asyncio.TimeoutError):
            continue
        found += reply.value
    return found
