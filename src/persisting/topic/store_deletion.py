"""Deleting a topic in an object store. Blocking.

Every bucket is taken over first: so no live process writes the topic, and the claims and fences
of the take-over refuse whatever a paused one still sends. They must outlive the topic, because a
request may arrive at any time, perhaps when there is a new topic of the same name. So these small
objects are kept: of each bucket ``owner.json`` and the newest, empty version of its table, and of
each log that was taken over its lease and its claim. A new topic of that name continues after them.

The definition is marked first. From then on nobody can open the topic, and a deletion that was
interrupted is completed by the next one. It stays too, marked once more: a DELETE takes no
condition, so one that arrives late could remove the definition of a new topic. The name is free
then, and a new topic replaces the object by compare-and-swap.
"""

from __future__ import annotations

from contextlib import ExitStack

from persisting.backends.persisting import PersistingBackend, new_store_owner_log
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.store_bucket import StoreBucket
from persisting.bucket.store_groups import GROUPS, groups_in
from persisting.bucket.store_notes import FOLDER as HANDOVERS
from persisting.errors import BucketLocked, NoSuchTopic
from persisting.store.object_store import ObjectStore
from persisting.table.indexes import FILE as INDEX_FILE
from persisting.topic import spec as topics
from persisting.topic import store_config, tags
from persisting.topic.backup_form import CHECKPOINTS
from persisting.topic.spec import TopicConfig
from persisting.topic.store_group_admin import check_not_kept, end_work_group, living_members
from persisting.wal.slots import LOGS, is_claim, slots_prefix


def check_deletable(store: ObjectStore, config: TopicConfig) -> None:
    """Raise if a group reads the topic. Waits for the length of the lease if there are members."""
    for group, works in groups_in(store).items():
        if works:
            check_not_kept(store, group)
    for group, members in living_members(store, config).items():
        if members:
            raise BucketLocked(
                f"topic {config.topic!r} is being read by group {group!r}",
                hint="close its readers first",
            )


def delete(store: ObjectStore) -> None:
    """Delete the topic at the address of ``store``; raise if a live process writes it."""
    config = store_config.load_any(store)
    if config is None:
        raise NoSuchTopic(f"there is no topic {store.address.name!r} at {store.address.parent}")
    check_deletable(store, config)
    with ExitStack() as stack:
        # What was handed over and cannot be stored must not keep the topic from being deleted.
        count = config.num_buckets
        log = new_store_owner_log(store, count, takes_notes=False, **config.options)
        stack.callback(log.retire)
        owned = []
        for number in range(config.num_buckets):
            place = store.address / topics.bucket_name(number)
            backend = PersistingBackend(number, place, owner_log=log, **config.options)  # type: ignore[arg-type]
            stack.callback(backend.close_now)
            owned.append(backend.bucket)
        log.wait_for_removals()  # they would take group commits that are deleted below for lost
        store_config.mark_deleted(store)
        for group, works in groups_in(store).items():
            if works:  # kept only if a process was opening it before the mark, and fails now
                end_work_group(store, group, forcibly=True)
        for bucket in owned:
            assert isinstance(bucket, StoreBucket)
            bucket.ownership.note_deletion()
            bucket.table.erase()
        for folder in (GROUPS, tags.FOLDER, CHECKPOINTS, HANDOVERS):
            store.delete(store.list(folder))
        store.delete(f"{topics.bucket_name(b)}/{INDEX_FILE}" for b in range(config.num_buckets))
        _delete_old_logs(store, log.name)
        store.delete([SCHEMA_FILE])
        store_config.mark_removed(store)


def _delete_old_logs(store: ObjectStore, own: str) -> None:
    """Delete the group commits of former owners, including those after a claim. The claims stay."""
    for key in store.list(LOGS):
        name = key.split("/")[1]
        if name != own and key.startswith(f"{slots_prefix(name)}/"):
            found = store.get(key)
            if found is not None and not is_claim(found.data):
                store.delete([key])
