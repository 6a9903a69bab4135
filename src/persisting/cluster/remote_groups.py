"""Members of work groups on a cluster: the owner of a topic's bucket 0 keeps its groups."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any

from persisting.cluster import store_access
from persisting.cluster.cluster_topic import ClusterTopic
from persisting.cluster.locator import LOST, Patience
from persisting.cluster.open_remote import find_remote_topic, ready_transport
from persisting.cluster.transport import Transport
from persisting.cluster.wire import Request
from persisting.cluster.work_host import topic_at
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, NoSuchTopic
from persisting.store_address import is_store_address
from persisting.topic.bucket_client import Topic
from persisting.topic.open_local import deadline_of, when_found
from persisting.topic.spec import TopicSpec
from persisting.work.dead_letters import SUFFIX
from persisting.work.group_place import GroupPlace, place_of
from persisting.work.open_group import check_backend
from persisting.work.work_reader import WorkOptions, WorkReader

_WAIT_STEP_SECONDS = 0.2
_LONG = frozenset({"fail", "look", "redrive", "reject"})
"""Calls that may take longer than an answer may."""


class RemoteGroup:
    """The way to the keeper of a group on a cluster."""

    def __init__(self, transport: Transport, topic: ClusterTopic, group: str) -> None:
        self._transport, self._topic, self._group = transport, topic, group
        self._key = transport, str(place_of(topic)), group

    @property
    def key(self) -> Hashable:
        return self._key

    async def call(self, op: str, args: dict[str, Any]) -> Any:
        streamed = op in _LONG or args.get("wait", 0) > 0
        request = Request(
            "work_stream" if streamed else "work", {"group": self._group, "op": op, "args": args}
        )
        locator = self._topic.locator(0)
        patience = Patience()
        while True:
            try:
                if not streamed:
                    return (await locator.ask(request)).value
                stream = locator.stream(request, patience)
                try:
                    async for reply in stream:
                        if reply.value != "alive":
                            return reply.value[0]
                finally:
                    await stream.aclose()
            except LOST as exc:
                await locator.lost(exc, patience)
            except BucketLocked:  # the node before has not released the group yet
                if patience.exhausted:
                    raise
                await asyncio.sleep(locator.pause_seconds)

    async def close(self) -> None:
        """Nothing to release: the topic is closed by its reader."""


async def open_remote_work_reader(
    system: Any,
    wanted: TopicSpec,
    cls: type | None,
    storage_path: Any,
    options: WorkOptions,
    wait_for_topic: bool | float,
    storage_options: Mapping[str, Any] | None = None,
) -> WorkReader:
    """Return a member of a work group on the nodes of ``system``."""
    deadline = deadline_of(wait_for_topic)
    if is_store_address(storage_path):
        store_access.remember(storage_path, storage_options)
    transport = await ready_transport(system, wanted, cls)
    topic = await when_found(
        lambda: find_remote_topic(transport, wanted, storage_path), deadline, _WAIT_STEP_SECONDS
    )
    return await _open(transport, topic, options)


async def open_work_reader_of_others(
    transport: Transport, wanted: TopicSpec, storage_path: str, options: WorkOptions
) -> WorkReader:
    """Return a member of a work group on other nodes; this node never becomes a storage node."""
    topic = await find_remote_topic(transport, wanted, storage_path)
    return await _open(transport, topic, options)


async def _open(transport: Transport, topic: ClusterTopic, options: WorkOptions) -> WorkReader:
    try:
        options.check_topic(topic)
        check_backend(topic.config)
        place = place_of(topic)
        await in_thread(place.check_mode, options.group)
        client = RemoteGroup(transport, topic, options.group)
        return await WorkReader.open(
            topic, client, options, lambda: _read_dead_letters(transport, place)
        )
    except BaseException:
        await topic.close()
        raise


async def _read_dead_letters(transport: Transport, place: GroupPlace) -> Topic:
    config = await in_thread(place.load_letters)
    if config is None:
        raise NoSuchTopic(f"there is no topic {place.config.topic + SUFFIX!r} beside {place}")
    return topic_at(transport, place.letters_place(config))
