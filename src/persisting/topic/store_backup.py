"""Copies a topic in an object store into a backup, while its owner may write. Blocking.

The backup has the form of a topic in a folder: group commits become segments of the log, which have
the same bytes, and each small object becomes the file of its name. The order of copying is that of
:mod:`persisting.topic.backup`. Nothing is written to the topic, and no owner is disturbed: an
object of the log that arrives later is not part of the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from persisting.bucket import log_note, store_groups
from persisting.bucket.group_offsets import WORK_FOLDER, Committed
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import FORMAT as SCHEMA_FORMAT
from persisting.bucket.shared_schema import SchemaFile
from persisting.bucket.store_maintenance import index_register
from persisting.bucket.store_ownership import FREE, OwnerRecord, owner_register
from persisting.errors import StorageError, TableError, WALError
from persisting.lock import LOCK_FILE
from persisting.store.object_store import ObjectStore, StoredObject
from persisting.store.register import Register
from persisting.table import files, properties, versions
from persisting.table import indexes as index_file
from persisting.table.lance_errors import indices_of, own_handle
from persisting.table.store_table import StoreTable
from persisting.table.table import FOLDER as TABLE
from persisting.topic import groups, tags
from persisting.topic import spec as topics
from persisting.topic.backup_files import Copy, StoreFiles
from persisting.topic.backup_form import CHECKPOINTS, DEFINITION, TRIES, BucketCopy, divide_logs
from persisting.topic.store_files import StoreTopic
from persisting.wal import sealing
from persisting.wal.frame import Broken, decode_segment_header
from persisting.wal.lease import lease_register
from persisting.wal.segment import SegmentName
from persisting.wal.slots import (
    LOGS,
    check_slot,
    first_free,
    is_claim,
    is_log_name,
    slot_key,
    slot_of,
    slots_prefix,
)

_PARALLEL_READS = 16


def copy_topic(copy: Copy, source: StoreTopic) -> list[BucketCopy]:
    """Copy everything but ``backup.json``."""
    _copy_groups(copy, source)
    copy.tree(CHECKPOINTS)
    logs = _copy_logs(copy, source.store)
    buckets, noted = _copy_tags_and_buckets(copy, source, logs)
    for place in divide_logs(logs, noted, buckets):
        copy.forget(place)
    schema = Register(source.store, SCHEMA_FILE, SchemaFile, SCHEMA_FORMAT).read()
    if schema is not None:
        copy.write(SCHEMA_FILE, _encoded(schema.content))
    name = DEFINITION if isinstance(copy.target, StoreFiles) else topics.FILE
    copy.write(name, _encoded(source.config))
    return buckets


def _copy_groups(copy: Copy, source: StoreTopic) -> None:
    for group, works in store_groups.groups_in(source.store).items():
        for bucket in source.buckets:
            held = store_groups.offset_register(source.store, group, bucket).read()
            if held is not None:
                stored = held.content
                committed = Committed(stored.offset, stored.generation, stored.epoch)
                copy.write(f"{groups.FOLDER}/{group}/bucket_{bucket}.json", _encoded(committed))
        if works:  # after the floors of its buckets, which must not be ahead of it
            _copy_journal(copy, source.store, group)


def _copy_journal(copy: Copy, store: ObjectStore, group: str) -> None:
    """Copy the journal of a work group: its slots become the segments of a journal in a folder."""
    place = f"{groups.FOLDER}/{group}/{WORK_FOLDER}"
    contents, source = store_groups.read_journal(store, group)
    for data in contents:
        header = decode_segment_header(memoryview(data))
        copy.write(f"{place}/{SegmentName(header.first_sequence, header.salt)}", data)
    if source:
        copy.write(f"{place}/{LOCK_FILE}", b"")


# Logs


def _copy_logs(copy: Copy, store: ObjectStore) -> dict[str, int]:
    """Copy all logs; return their sizes, by their path in the backup. Empty logs are left out."""
    listed: dict[str, list[int]] = {}
    for key in store.list(LOGS):
        name = key.split("/")[1]
        if is_log_name(name) and key.startswith(f"{slots_prefix(name)}/"):
            listed.setdefault(name, []).append(slot_of(key))
    sizes = {
        _log_place(name): _copy_log(copy, store, name, slots) for name, slots in listed.items()
    }
    return {place: size for place, size in sizes.items() if size}


def _log_place(name: str) -> str:
    """Return the path of a log in the backup; names of logs in folders are shorter."""
    time, _, number = name.partition("-")
    return f"{log_note.LOGS_FOLDER}/{time}-{number[:8]}"


def _copy_log(copy: Copy, store: ObjectStore, name: str, listed: list[int]) -> int:
    """Copy the group commits of a log that were listed; return their bytes."""
    lease = lease_register(store, name).read()
    if lease is None:
        return 0  # closed since it was listed; the tables hold everything
    # The lease was read after the listing, and the owner announces there what it deletes: every
    # later slot that was acknowledged was there when the log was listed.
    released, before = lease.content.released, lease.content.released_through
    free = first_free(set(listed), released + 1)
    slots = list(range(released + 1, free))
    place, copied, size = _log_place(name), list[str](), 0
    for slot, found in zip(slots, _read(store, name, slots), strict=True):
        if found is None:
            # Released meanwhile: those before it hold nothing that is needed, and the log must not
            # have a gap.
            for earlier in copied:
                copy.forget(earlier)
            copied, size = [], 0
        elif is_claim(found.data):
            break  # what the old owner has stored after it does not count
        else:
            before = check_slot(found.data, str(store.address / slot_key(name, slot))).last
            copied.append(f"{place}/{_segment_name(found.data, store, name, slot)}")
            copy.write(copied[-1], found.data)
            size += len(found.data)
    else:
        _check_nothing_is_missing(
            store, name, free, before, sorted(slot for slot in listed if slot > free)
        )
    if copied:
        copy.write(f"{place}/{LOCK_FILE}", b"")  # the owner of the restored topic locks a log by it
    return size


def _check_nothing_is_missing(
    store: ObjectStore, name: str, free: int, before: int, behind: list[int]
) -> None:
    """Raise if the first free slot was acknowledged, and has not been released meanwhile."""
    try:
        sealing.check_nothing_is_missing(store, name, free, before, behind)
    except WALError:
        lease = lease_register(store, name).read()
        if lease is not None and lease.content.released < free:
            raise


def _read(store: ObjectStore, name: str, slots: list[int]) -> Iterator[StoredObject | None]:
    """Yield the objects of slots; not all together, since a log may be large."""
    with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="persisting-slots") as threads:
        for begin in range(0, len(slots), _PARALLEL_READS):
            keys = [slot_key(name, slot) for slot in slots[begin : begin + _PARALLEL_READS]]
            yield from threads.map(store.get, keys)


def _segment_name(data: bytes, store: ObjectStore, name: str, slot: int) -> str:
    try:
        header = decode_segment_header(memoryview(data))
    except Broken as exc:
        raise WALError(
            f"the log object {store.address / slot_key(name, slot)} is damaged: {exc}. Restore it "
            "from an older version of the object"
        ) from exc
    return str(SegmentName(header.first_sequence, header.salt))


# Tags and buckets


def _copy_tags_and_buckets(
    copy: Copy, source: StoreTopic, logs: dict[str, int]
) -> tuple[list[BucketCopy], dict[int, str]]:
    """Copy the tags and the versions that they hold; start over if a tag changes meanwhile.

    Also returns, by bucket, the log that it notes.
    """
    for _ in range(TRIES):
        before = _tag_objects(source.store)
        for name, data in before.items():
            copy.write(name, data)
        noted: dict[int, str] = {}
        buckets = [_copy_bucket(copy, source, bucket, logs, noted) for bucket in source.buckets]
        if _tag_objects(source.store) == before:
            return buckets, noted
        copy.forget(tags.FOLDER)
        for bucket in source.buckets:
            copy.forget(topics.bucket_name(bucket))
    raise StorageError(
        f"the tags of {source.place} changed during every attempt to copy them; try again when "
        "nobody is tagging"
    )


def _tag_objects(store: ObjectStore) -> dict[str, bytes]:
    found = {key: store.get(key) for key in store.list(tags.FOLDER)}
    return {key: one.data for key, one in found.items() if one is not None}


def _copy_bucket(
    copy: Copy, source: StoreTopic, bucket: int, logs: dict[str, int], noted: dict[int, str]
) -> BucketCopy:
    """Copy note, then table; start over if the owner removes files meanwhile."""
    for _ in range(TRIES):
        try:
            return _copy_once(copy, source, bucket, logs, noted)
        except (OSError, ValueError, TableError) as exc:
            failure = exc
            copy.forget(topics.bucket_name(bucket))
    reason = source.store.options.scrub(str(failure))
    raise StorageError(
        f"cannot copy bucket {bucket} of {source.place}: {reason}. If its owner removes old "
        "versions faster than they are copied, give the topic a larger keep_versions"
    ) from None


def _copy_once(
    copy: Copy, source: StoreTopic, bucket: int, logs: dict[str, int], noted: dict[int, str]
) -> BucketCopy:
    name = topics.bucket_name(bucket)
    owner = _owner(source.store, bucket)
    noted.pop(bucket, None)
    if owner.log != FREE and (place := _log_place(owner.log)) in logs:
        copy.write(f"{name}/{log_note.FILE}", log_note.content(Path(place), bucket))
        noted[bucket] = place
    table = StoreTable(source.store.address / name, source.store.options)
    table.refresh()
    view = table.view
    if view.dataset is not None:
        tagged = versions.tags(view.dataset)
        listing = _Listing(table)
        for version in listing.versions_to_copy(view.dataset, set(tagged.values())):
            paths = [f"{name}/{TABLE}/{file}" for file in listing.files_of(table, version)]
            copy.all(path for path in paths if path not in copy.files)
        copy.all(f"{name}/{TABLE}/{files.TAGS}/{tag}.json" for tag in tagged)
    indexes = index_register(source.store, bucket).read()
    if indexes is not None:
        copy.write(f"{name}/{index_file.FILE}", _encoded(indexes.content.indexes))
    return BucketCopy(bucket, view.version, view.rows, view.start, view.end, 0, owner.term)


def _owner(store: ObjectStore, bucket: int) -> OwnerRecord:
    """Return who owns a bucket; raise if the lease of the log that it names is missing."""
    register = owner_register(store, bucket)
    held = register.read()
    while held is not None and held.content.log != FREE:
        if lease_register(store, held.content.log).read() is not None:
            break
        again = register.read()
        if again == held:
            raise WALError(
                f"the lease of the log {store.address / slots_prefix(held.content.log)} is "
                "missing, and the log may hold acknowledged records. Restore it from an older "
                "version of the object"
            )
        held = again
    return OwnerRecord(term=0, owner=FREE) if held is None else held.content


class _Listing:
    """The objects of a table."""

    def __init__(self, table: StoreTable) -> None:
        sizes = table.committer.object_sizes
        self._transactions = list(sizes(files.TRANSACTIONS))
        self._indexes = list(sizes(files.INDICES))
        found = (files.version_of(name.rpartition("/")[2]) for name in sizes(files.VERSIONS))
        self._versions = sorted(version for version in found if version is not None)

    def versions_to_copy(self, dataset: Any, tagged: Iterable[int]) -> list[int]:
        """Return the newest and the tagged versions, each with the version that has its
        properties."""
        chosen = set()
        for version in {dataset.version, *tagged}:
            if version in self._versions:
                older = [number for number in self._versions if number <= version]
                chosen |= {version, versions.with_properties(dataset, older)}
        return sorted(chosen)

    def files_of(self, table: StoreTable, version: int) -> Iterator[str]:
        dataset = table.at(version).dataset
        assert dataset is not None
        for path in files.data_paths(fragment.metadata for fragment in dataset.get_fragments()):
            yield f"{files.DATA}/{path}"
        segments = [segment.uuid for index in indices_of(dataset) for segment in index.segments]
        for uuid in segments:
            yield from (n for n in self._indexes if n.startswith(f"{files.INDICES}/{uuid}/"))
        yield from self._transactions_of(dataset, version)
        yield files.manifest_name(version)

    def _transactions_of(self, dataset: Any, version: int) -> Iterator[str]:
        uuid = properties.transaction_id(own_handle(dataset), version)
        for name in self._transactions:
            file = name.rpartition("/")[2]
            if file.startswith(f"{version - 1}-") or (uuid and file.endswith(f"-{uuid}.txn")):
                yield name


def _encoded(content: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
