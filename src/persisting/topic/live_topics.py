"""The topics that are open in this process: each is open once, with a count of its handles."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from persisting.store_address import StoreAddress
from persisting.topic.address import TopicAddress
from persisting.topic.local import LocalTopic

live: dict[TopicAddress, LocalTopic] = {}
"""The open topics; those without a handle are being closed."""
guard = threading.Lock()
"""Held briefly, without I/O: event loops take it."""

_topics_of_parent: list[LocalTopic] = []
"""Kept alive in a forked process, and never closed there: they belong to the parent."""


def _reset_after_fork() -> None:
    """Forget the topics on disk: a forked process does not own its parent's buckets."""
    global live, guard
    guard = threading.Lock()
    _topics_of_parent.extend(t for t in live.values() if not t.address.is_in_memory)
    live = {key: topic for key, topic in live.items() if key.is_in_memory}


os.register_at_fork(after_in_child=_reset_after_fork)


def live_named(name: str) -> list[LocalTopic]:
    """Return the topics of this name that are open in this process."""
    with guard:
        return [topic for topic in live.values() if topic.config.topic == name]


def live_topic(folder: Path | TopicAddress) -> LocalTopic | None:
    """Return the topic in ``folder`` if it is open in this process.

    A caller that asks often passes the address: resolving a path costs several system calls.
    """
    address = folder if isinstance(folder, TopicAddress) else TopicAddress.in_folder(folder)
    with guard:
        return live.get(address)


def live_in_store(address: StoreAddress) -> LocalTopic | None:
    """Return the topic at an address of an object store if it is open in this process."""
    with guard:
        return live.get(TopicAddress.in_store(address))


def live_bucket(
    place: Path | TopicAddress, bucket: int, *, is_elsewhere: bool = False
) -> LocalTopic | None:
    """Return the topic at ``place`` if it is open in this process and a reader may use the bucket.

    If other processes share the topic, or have owned the bucket (``is_elsewhere``), reading must
    not open the bucket here.
    """
    topic = live_topic(place)
    if topic is None or topic.is_lost(bucket):
        return None
    may_open = topic.listener is None and not is_elsewhere
    return topic if may_open or topic.open_backend(bucket) is not None else None


def hold(topic: LocalTopic) -> bool:
    """Count another handle on an open topic; False if it has just been closed."""
    with guard:
        if live.get(topic.address) is not topic or topic.handles == 0:
            return False
        topic.handles += 1
        return True


def release(topic: LocalTopic) -> bool:
    """Count a handle less; return whether it was the last, so that the topic is to be closed."""
    with guard:
        topic.handles -= 1
        return topic.handles == 0


def undo_release(topic: LocalTopic) -> None:
    """Count the last handle again: the topic could not be closed."""
    with guard:
        topic.handles += 1


def forget(topic: LocalTopic) -> None:
    """Forget a topic that was closed."""
    with guard:
        if topic.handles == 0 and live.get(topic.address) is topic:
            del live[topic.address]
