"""Inspect, reset and delete consumer groups of a topic in an object store. Blocking.

There are no locks that show whether a member lives: it beats in an object of its own. So a change
waits for the time of the lease if there are such objects, and is refused if one of them changes. A
member that was taken for dead cannot commit over the change: its next swap of the offset fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from persisting.bucket import store_groups
from persisting.bucket.group_offsets import Committed
from persisting.bucket.store_groups import GROUPS, NOBODY, StoredOffset, offset_register
from persisting.errors import BucketLocked, InvalidArgument
from persisting.store.object_store import Entry, ObjectStore
from persisting.suggestions import choices
from persisting.topic.group_admin import BucketProgress, GroupProgress, ReadSpans, Span
from persisting.topic.spec import TopicConfig
from persisting.topic.topic_names import check_name
from persisting.wal.lease import LEASE_SECONDS

_MARGIN_SECONDS = 0.5


def groups(
    store: ObjectStore, buckets: Iterable[int], read_spans: ReadSpans
) -> list[GroupProgress]:
    """Return every group of a topic."""
    names, numbers = store_groups.groups_in(store), list(buckets)
    committed = {name: _committed(store, name, numbers) for name in names}
    spans = read_spans() if names else {}
    return [_progress(store, name, committed[name], {}, spans) for name in names]


def progress(
    store: ObjectStore, group: str, buckets: Iterable[int], read_spans: ReadSpans
) -> GroupProgress:
    """Return one group, or raise if it does not exist."""
    _check_exists(store, group)
    return after_reset(store, group, {}, buckets, read_spans)


def after_reset(
    store: ObjectStore,
    group: str,
    offsets: dict[int, int],
    buckets: Iterable[int],
    read_spans: ReadSpans,
) -> GroupProgress:
    """Return what :func:`progress` would return after :func:`reset`."""
    committed = _committed(store, check_name("group", group), buckets)
    return _progress(store, group, committed, offsets, read_spans())


def _committed(store: ObjectStore, group: str, buckets: Iterable[int]) -> dict[int, Committed]:
    return {bucket: store_groups.read_committed(store, group, bucket) for bucket in buckets}


def _progress(
    store: ObjectStore,
    group: str,
    stored: dict[int, Committed],
    offsets: dict[int, int],
    spans: dict[int, Span],
) -> GroupProgress:
    buckets = []
    for bucket, span in spans.items():
        offset = offsets.get(bucket, stored[bucket].now(span.restores))
        lag = max(0, span.end - max(offset, span.start))
        buckets.append(BucketProgress(bucket, offset, span.end, lag))
    members = len(store.list(_members(group)))
    return GroupProgress(group, members, sum(bucket.lag for bucket in buckets), buckets)


def reset(
    store: ObjectStore,
    config: TopicConfig,
    group: str,
    offsets: dict[int, int],
    spans: dict[int, Span],
) -> None:
    """Set the committed offsets of a group, by bucket; it must have no living member.

    A group that does not exist yet is created.
    """
    _check_unread(store, config, check_name("group", group))
    for bucket, offset in offsets.items():
        epoch = len(spans[bucket].restores)
        before = offset_register(store, group, bucket).read()
        generation = 1 if before is None else before.content.generation + 1

        def change(
            last: StoredOffset | None,
            offset: int = offset,
            epoch: int = epoch,
            generation: int = generation,
        ) -> StoredOffset:
            now = generation if last is None else max(generation, last.generation)
            return StoredOffset(offset=offset, generation=now, epoch=epoch, member=NOBODY)

        offset_register(store, group, bucket).update(change)


def delete(store: ObjectStore, config: TopicConfig, group: str) -> None:
    """Delete a group that has no living member."""
    _check_exists(store, group)
    _check_unread(store, config, group)
    store.delete(store.list(f"{GROUPS}/{group}"))


def living_members(store: ObjectStore, config: TopicConfig) -> dict[str, int]:
    """Return how many members of each group live. Waits for the time of the lease, if there is any
    member."""
    before = _beats(store, GROUPS)
    if not before:
        return {}
    seconds = float(config.options.get("lease", LEASE_SECONDS))
    time.sleep(seconds + _MARGIN_SECONDS)
    living: dict[str, int] = {}
    for key, entry in _beats(store, GROUPS).items():
        if before.get(key) != entry:
            group = key.split("/")[1]
            living[group] = living.get(group, 0) + 1
    return living


def _beats(store: ObjectStore, prefix: str) -> dict[str, Entry]:
    entries = store.entries(prefix)
    return {key: entry for key, entry in entries.items() if "/members/" in key}


def _check_unread(store: ObjectStore, config: TopicConfig, group: str) -> None:
    if not store.list(_members(group)):
        return
    members = living_members(store, config).get(group, 0)
    if members:
        raise BucketLocked(
            f"group {group!r} is being read ({members} living members): close its readers first"
        )


def _check_exists(store: ObjectStore, group: str) -> None:
    names = store_groups.groups_in(store)
    if check_name("group", group) not in names:
        raise InvalidArgument(f"there is no group {group!r}; {choices(group, names)}")


def _members(group: str) -> str:
    return f"{GROUPS}/{group}/members"
