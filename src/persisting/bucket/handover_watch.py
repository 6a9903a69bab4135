"""Wakes the owners of buckets when something is handed over to their topic.

inotify wakes them immediately, where it is available and the other process is on this machine. In
any case they poll, because notes may come from other machines.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

from persisting.bucket import handover_notes
from persisting.bucket.handover_notes import Wakeable
from persisting.bucket.path_watch import ENTRIES, path_watch
from persisting.concurrency import timer

POLL_SECONDS = 1.0
"""How often an owner looks for notes."""


class _TopicWatch:
    """The owners in this process of buckets of one topic."""

    def __init__(self, topic: Path) -> None:
        self._topic = topic
        self._guard = threading.Lock()
        self._owners: weakref.WeakSet[Wakeable] = weakref.WeakSet()

    def add(self, owner: Wakeable) -> None:
        with self._guard:
            self._owners.add(owner)

    def discard(self, owner: Wakeable) -> None:
        with self._guard:
            self._owners.discard(owner)

    @property
    def is_waiting(self) -> bool:
        return bool(self._owners)

    def on_change(self, *, gone: bool) -> bool:
        self.watch()
        return self.look()

    def watch(self) -> None:
        """Watch the folder of notes; while it does not exist, its parent."""
        watch = path_watch()
        folder = self._topic / handover_notes.FOLDER
        if not folder.is_dir():
            watch.add(self._topic, ENTRIES, self)
        watch.add(folder, ENTRIES, self)

    def look(self) -> bool:
        """Wake the owners if there may be notes for them."""
        if not handover_notes.has_any(self._topic):
            return False
        with self._guard:
            owners = list(self._owners)
        for number, owner in enumerate(owners):
            owner.wake(always=not number)  # it also removes what is left of old hand-overs
        return True


class _Topics:
    """All topics that this process owns buckets of."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._topics: dict[Path, _TopicWatch] = {}
        self._ticking = False

    def add(self, topic: Path, owner: Wakeable) -> None:
        with self._guard:
            watch = self._topics.get(topic)
            if watch is None:
                watch = self._topics[topic] = _TopicWatch(topic)
            watch.add(owner)
            start = not self._ticking
            self._ticking = True
        watch.watch()
        if start:
            timer.after(POLL_SECONDS, self._tick)

    def remove(self, topic: Path, owner: Wakeable) -> None:
        with self._guard:
            watch = self._topics.get(topic)
            if watch is not None:
                watch.discard(owner)

    def _tick(self) -> None:
        with self._guard:
            for topic in [t for t, watch in self._topics.items() if not watch.is_waiting]:
                del self._topics[topic]
            watches = list(self._topics.values())
            self._ticking = bool(watches)
        if watches:
            timer.after(POLL_SECONDS, self._tick)
        for watch in watches:
            watch.look()


_topics = _Topics()


def add(topic: Path, owner: Wakeable) -> None:
    """Wake an owner from now on; it is not kept alive."""
    _topics.add(topic, owner)


def remove(topic: Path, owner: Wakeable) -> None:
    """Stop waking an owner."""
    _topics.remove(topic, owner)


def _reset_after_fork() -> None:
    """A forked process owns no buckets, and has no timer."""
    global _topics
    _topics = _Topics()


os.register_at_fork(after_in_child=_reset_after_fork)
