"""The topics below a prefix of an object store. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from persisting import store_address
from persisting.bucket.store_ownership import is_removed
from persisting.errors import NoSuchTopic
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import is_store_address
from persisting.topic import spec as topics
from persisting.topic import store_inspect
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_names import check_name
from persisting.ui.storage_view import Signature, StorageView, TopicsView

_BEATS = ("/lease.json", "/members/")
"""Objects that change although nothing has happened."""


def view_of(place: str) -> TopicsView:
    """Return the topics of a folder, or below an address."""
    return StoreView(place) if is_store_address(place) else StorageView(Path(place))


class StoreView(TopicsView):
    """Finds topics below one address."""

    poll_seconds = 1.0
    sample_seconds = 30.0

    def __init__(self, place: str) -> None:
        super().__init__()
        self._address = store_address.parse(place)
        self.place = str(self._address)
        self._store = open_store(self._address, StorageOptions(None))

    def names(self) -> list[str]:
        return sorted(store_inspect.topic_names(self.place))

    def check(self, topic: str) -> None:
        self._identity(topic)

    def open(self, topic: str) -> StoreTopic:
        return StoreTopic.find(topic, self.place)

    def signature(self, topic: str) -> Signature:
        versions: list[Any] = []
        others: list[Any] = []
        for key, entry in sorted(self._store.entries(check_name("topic", topic)).items()):
            if not any(part in key for part in _BEATS):
                target = versions if "/_versions/" in key else others
                target.append((key, entry.e_tag, entry.size))
        return Signature(versions, others)

    def _identity(self, topic: str) -> object:
        found = self._store.get(f"{check_name('topic', topic)}/{topics.FILE}")
        if found is None or is_removed(found.data):
            raise NoSuchTopic(f"there is no topic {topic!r} at {self.place}")
        return found.data  # each definition has a number that no other has
