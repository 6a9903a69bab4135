"""The consumer groups of a stored topic, in a folder or in an object store. Blocking."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from persisting import fs as filesystem
from persisting.fs import FileSystem
from persisting.store.object_store import ObjectStore
from persisting.topic import group_admin, store_group_admin
from persisting.topic.group_admin import GroupProgress, ReadSpans, Span
from persisting.topic.spec import TopicConfig
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder


class GroupControl:
    """The groups of a topic in a folder; see :mod:`persisting.topic.group_admin`."""

    def __init__(self, folder: Path, fs: FileSystem) -> None:
        self._folder, self._fs = folder, fs

    def groups(self, buckets: Iterable[int], spans: ReadSpans) -> list[GroupProgress]:
        return group_admin.groups(self._folder, buckets, spans, self._fs)

    def progress(self, group: str, buckets: Iterable[int], spans: ReadSpans) -> GroupProgress:
        return group_admin.progress(self._folder, group, buckets, spans, self._fs)

    def after_reset(
        self, group: str, offsets: dict[int, int], buckets: Iterable[int], spans: ReadSpans
    ) -> GroupProgress:
        return group_admin.after_reset(self._folder, group, offsets, buckets, spans, self._fs)

    def reset(self, group: str, offsets: dict[int, int], spans: dict[int, Span]) -> None:
        group_admin.reset(self._folder, group, offsets, spans, self._fs)

    def delete(self, group: str, buckets: list[int]) -> None:
        group_admin.delete(self._folder, group, buckets, self._fs)


class StoreGroupControl(GroupControl):
    """The groups of a topic in an object store."""

    def __init__(self, store: ObjectStore, config: TopicConfig) -> None:
        self._store, self._config = store, config

    def groups(self, buckets: Iterable[int], spans: ReadSpans) -> list[GroupProgress]:
        return store_group_admin.groups(self._store, buckets, spans)

    def progress(self, group: str, buckets: Iterable[int], spans: ReadSpans) -> GroupProgress:
        return store_group_admin.progress(self._store, group, buckets, spans)

    def after_reset(
        self, group: str, offsets: dict[int, int], buckets: Iterable[int], spans: ReadSpans
    ) -> GroupProgress:
        return store_group_admin.after_reset(self._store, group, offsets, buckets, spans)

    def reset(self, group: str, offsets: dict[int, int], spans: dict[int, Span]) -> None:
        store_group_admin.reset(self._store, self._config, group, offsets, spans)

    def delete(self, group: str, buckets: list[int]) -> None:
        store_group_admin.delete(self._store, self._config, group)


def control_of(source: TopicFolder) -> GroupControl:
    """Return the groups of a topic."""
    if isinstance(source, StoreTopic):
        return StoreGroupControl(source.store, source.config)
    return GroupControl(source.folder, filesystem.current())
