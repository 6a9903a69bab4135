"""Inspect, reset and delete consumer groups of a topic in an object store. Blocking.

There are no locks that show whether a member is alive: it sends heartbeats to an object of its own.
So a change waits for the length of the lease if there are such objects, and is refused if one of
them changes. A member that was taken for dead cannot commit over the change: its next swap of the
offset fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from persisting.bucket import store_groups
from persisting.bucket.group_offsets import Committed
from persisting.bucket.store_groups import (
    GROUPS,
    NOBODY,
    KeeperRecord,
    StoredOffset,
    keeper_key,
    keeper_register,
    offset_register,
)
from persisting.errors import BucketLocked, InvalidArgument, WALError
from persisting.store.object_store import ListedObject, ObjectChanged, ObjectStore
from persisting.suggestions import choices
from persisting.topic.group_admin import BucketProgress, GroupProgress, ReadSpans, Span
from persisting.topic.spec import TopicConfig
from persisting.topic.store_membership import check_offset_mode
from persisting.topic.store_work_status import read_status
from persisting.topic.topic_names import check_name
from persisting.wal import sealing
from persisting.wal.lease import LEASE_SECONDS
from persisting.wal.sealing import SealedLog
from persisting.wal.slots import new_log_name

_MARGIN_SECONDS = 0.5


def groups(
    store: ObjectStore, buckets: Iterable[int], read_spans: ReadSpans
) -> list[GroupProgress]:
    """Return every group of a topic."""
    names, numbers = store_groups.groups_in(store), list(buckets)
    committed = {name: _committed(store, name, numbers) for name in names}
    spans = read_spans() if names else {}
    return [
        _progress(store, name, committed[name], {}, spans, works=works)
        for name, works in names.items()
    ]


def progress(
    store: ObjectStore, group: str, buckets: Iterable[int], read_spans: ReadSpans
) -> GroupProgress:
    """Return one group, or raise if it does not exist."""
    works = _check_exists(store, group)
    committed = _committed(store, group, buckets)
    return _progress(store, group, committed, {}, read_spans(), works=works)


def after_reset(
    store: ObjectStore,
    group: str,
    offsets: dict[int, int],
    buckets: Iterable[int],
    read_spans: ReadSpans,
) -> GroupProgress:
    """Return what :func:`progress` would return after :func:`reset`."""
    check_offset_mode(store, check_name("group", group))
    committed = _committed(store, group, buckets)
    return _progress(store, group, committed, offsets, read_spans(), works=False)


def _committed(store: ObjectStore, group: str, buckets: Iterable[int]) -> dict[int, Committed]:
    return {bucket: store_groups.read_committed(store, group, bucket) for bucket in buckets}


def _progress(
    store: ObjectStore,
    group: str,
    stored: dict[int, Committed],
    offsets: dict[int, int],
    spans: dict[int, Span],
    *,
    works: bool,
) -> GroupProgress:
    buckets = []
    for bucket, span in spans.items():
        offset = offsets.get(bucket, stored[bucket].now(span.restores))
        lag = max(0, span.end - max(offset, span.start))
        buckets.append(BucketProgress(bucket, offset, span.end, lag))
    lag = sum(bucket.lag for bucket in buckets)
    if works:
        status = read_status(store, group)
        return GroupProgress(group, status.members if status.kept else 0, lag, buckets, status)
    return GroupProgress(group, len(store.list(_members(group))), lag, buckets)


def reset(
    store: ObjectStore,
    config: TopicConfig,
    group: str,
    offsets: dict[int, int],
    spans: dict[int, Span],
) -> None:
    """Set the committed offsets of a group, by bucket; it must have no live member.

    A group that does not exist yet is created.
    """
    check_offset_mode(store, check_name("group", group))
    _check_unread(store, config, group)
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
    """Delete a group that has no live member."""
    if _check_exists(store, group):
        _delete_work_group(store, group)
        return
    _check_unread(store, config, group)
    store.delete(store.list(f"{GROUPS}/{group}"))


def _delete_work_group(store: ObjectStore, group: str) -> None:
    """Delete a work group without a live keeper. Waits until the lease of its keeper expires."""
    left = end_work_group(store, group)
    keys = store.list(f"{GROUPS}/{group}")
    store.delete([key for key in keys if key != keeper_key(group)])
    for sealed in left:
        sealing.remove(store, sealed)


def check_not_kept(store: ObjectStore, group: str) -> None:
    """Raise if a live process keeps a work group. Waits until its lease expires."""
    held = keeper_register(store, group).read()
    if held is None or held.content.owner == NOBODY:
        return
    try:
        sealing.wait_for_owner(store, held.content.owner)
    except BucketLocked as exc:
        raise _being_read(group, exc) from exc


def _being_read(group: str, exc: BucketLocked) -> BucketLocked:
    return BucketLocked(
        f"work group {group!r} is being read: {exc.summary}",
        owner=exc.owner,
        hint="close its readers first, and on a cluster stop the owner of the topic's bucket 0",
    )


def end_work_group(store: ObjectStore, group: str, *, forcibly: bool = False) -> list[SealedLog]:
    """Mark a work group as deleted, so that no keeper can store anything; return its logs.

    Raises if a live process keeps it, unless ``forcibly``.
    """
    register = keeper_register(store, group)
    while True:
        held = register.read()
        if held is None or held.content.deleted:
            return []
        record = held.content
        names = {record.owner, record.log, *record.left} - {NOBODY}
        if not forcibly:
            check_not_kept(store, group)
        try:
            left = [
                sealing.seal(store, name, new_log_name())
                for name in sorted(names)
                if sealing.has_lease(store, name)
            ]
            register.swap(held, KeeperRecord(deleted=True, left=sorted(names)))
            return left
        except (ObjectChanged, BucketLocked):
            continue  # another process has just taken it over, given it up, or sent a heartbeat
        except WALError:  # objects may be missing because another process has just taken it over
            now = register.read()
            if now is not None and now.version == held.version:
                raise


def living_members(store: ObjectStore, config: TopicConfig) -> dict[str, int]:
    """Return how many live members each group has. Waits for the length of the lease, unless there
    are no members."""
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


def _beats(store: ObjectStore, prefix: str) -> dict[str, ListedObject]:
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


def _check_exists(store: ObjectStore, group: str) -> bool:
    """Raise if there is no such group; return whether it is a work group."""
    names = store_groups.groups_in(store)
    if check_name("group", group) not in names:
        raise InvalidArgument(f"there is no group {group!r}; {choices(group, list(names))}")
    return names[group]


def _members(group: str) -> str:
    return f"{GROUPS}/{group}/members"
