"""The tags of a topic in an object store: ``tags/<name>.json``, changed by compare-and-swap."""

from __future__ import annotations

import logging

import msgspec

from persisting import json_files
from persisting.errors import InvalidArgument
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore, StoredObject
from persisting.suggestions import choices
from persisting.table.versions import check_tag
from persisting.topic.tags import FOLDER, DamagedTag, TagFiles, TopicTag

log = logging.getLogger("persisting")


class StoreTags(TagFiles):
    """The tags of one topic. Blocking. A tag's pin is unique, so no two objects are equal."""

    def __init__(self, store: ObjectStore) -> None:
        """``store`` is that of the topic."""
        self._store = store

    def save(self, tag: TopicTag) -> TopicTag | None:
        key, data = _key(tag.name), msgspec.json.encode(tag)
        found = self._store.get(key)
        while True:
            try:
                if found is None:
                    self._store.create(key, data)
                    return None
                self._store.swap(key, data, found.version)
                return self._decoded_or_none(tag.name, found)
            except (ObjectExists, ObjectChanged) as exc:
                found = exc.found

    def load(self, name: str) -> TopicTag:
        found = self._store.get(_key(check_tag(name)))
        if found is None:
            raise InvalidArgument(f"there is no tag {name!r}; {choices(name, self.names())}")
        return self._decoded(name, found)

    def all(self) -> list[TopicTag]:
        tags = []
        for name in self.names():
            found = self._store.get(_key(name))
            tag = None if found is None else self._decoded_or_none(name, found)
            if tag is not None:
                tags.append(tag)
        return tags

    def remove(self, name: str) -> TopicTag | None:
        """Delete a tag; of two callers at the same time both may return it."""
        key = _key(check_tag(name))
        found = self._store.get(key)
        if found is None:
            return None
        self._store.delete([key])
        return self._decoded_or_none(name, found)

    def pins(self) -> set[str]:
        pins = set()
        for name in self.names():
            found = self._store.get(_key(name))
            if found is not None:  # else it was deleted since it was listed
                pins.add(self._decoded(name, found).pin)
        return pins

    def names(self) -> list[str]:
        keys = [key.rpartition("/")[2] for key in self._store.list(FOLDER)]
        return [key.removesuffix(".json") for key in keys]

    def _decoded(self, name: str, found: StoredObject) -> TopicTag:
        try:
            return json_files.decode(found.data, TopicTag)
        except msgspec.DecodeError as exc:
            raise DamagedTag(
                f"the tag {self._store.address / _key(name)} is damaged ({exc}); restore it from "
                "a copy, or tag again"
            ) from exc

    def _decoded_or_none(self, name: str, found: StoredObject) -> TopicTag | None:
        try:
            return self._decoded(name, found)
        except DamagedTag as exc:
            log.warning("%s", exc)
            return None


def _key(name: str) -> str:
    return f"{FOLDER}/{name}.json"
