"""Restores a backup as a topic in an object store. Blocking.

The tables are copied as they are. The segments of a log become the group commits of a sealed log,
which the first owner replays. A backup may have been restored at a place where a topic was before,
so every log gets a new name: a late put of a former owner cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from persisting import json_files
from persisting.backends.persisting import PersistingBackend
from persisting.bucket import log_note
from persisting.bucket.group_offsets import WORK_FOLDER, Committed
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import FORMAT as SCHEMA_FORMAT
from persisting.bucket.shared_schema import SchemaFile
from persisting.bucket.store_groups import (
    KeeperRecord,
    StoredOffset,
    keeper_register,
    offset_register,
)
from persisting.bucket.store_maintenance import IndexList, index_register
from persisting.bucket.store_ownership import FREE, OwnerRecord, owner_register
from persisting.errors import InvalidArgument, StorageError
from persisting.store.object_store import ObjectExists, ObjectStore
from persisting.store.probe import probe
from persisting.store.register import Register
from persisting.table.indexes import FILE as INDEX_FILE
from persisting.table.indexes import IndexSpec
from persisting.topic import groups, store_config
from persisting.topic import spec as topics
from persisting.topic.backup_files import Copied, Copy
from persisting.topic.backup_form import DEFINITION, Backup
from persisting.topic.spec import TopicConfig
from persisting.topic.work_status import FILE as STATUS_FILE
from persisting.wal import FOLDER as LOG
from persisting.wal.lease import LEASE_SECONDS, LeaseRecord, lease_register
from persisting.wal.slots import (
    check_slot,
    complete_entries,
    new_claim,
    new_log_name,
    slot_key,
    this_process,
)

_T = TypeVar("_T")


def restore(backup: Backup, config: TopicConfig, copy: Copy, store: ObjectStore) -> None:
    """Write all objects, the topic's definition last: without it there is no topic."""
    _check_restorable(backup, config, store)
    probe(store)
    parts = _Parts(backup, copy, store)
    plain = [name for name in backup.files if not parts.converted(name)]
    _copy_all(copy, {name: backup.files[name] for name in plain})
    parts.write()
    copy.finish()
    renamed = msgspec.structs.replace(config, topic=store.address.name)
    topics.check_storable(renamed)
    try:
        store_config.register(store).create(renamed)
    except ObjectExists:
        raise InvalidArgument(
            f"another process has created a topic at {store.address} meanwhile; restore the backup "
            "under another name"
        ) from None


def _check_restorable(backup: Backup, config: TopicConfig, store: ObjectStore) -> None:
    """Raise if the topic has something that an object store does not support."""
    if config.backend != store_config.BACKEND or not config.options.get("enable_wal"):
        raise InvalidArgument(
            f"the backup is of a topic without a log (backend {config.backend!r}); in an object "
            "store every topic has one. Restore it to a folder, open it there with durable=True, "
            "and back it up again"
        )
    PersistingBackend.check_options(
        batch_size=config.batch_size, storage_path=store.address, **config.options
    )
    for name in backup.files:
        parts = PurePosixPath(name).parts
        if len(parts) > 1 and parts[0].startswith("bucket_") and parts[1] == LOG:
            raise InvalidArgument(
                "the backup has a log in the form of version 0.4 or earlier; restore it to a "
                "folder, open it there, and back it up again"
            )


def _copy_all(copy: Copy, expected: dict[str, Copied]) -> None:
    copy.each(lambda name: copy.checked(name, expected[name]), list(expected))


class _Parts:
    """The files of a backup that have another form in an object store."""

    def __init__(self, backup: Backup, copy: Copy, store: ObjectStore) -> None:
        self._backup, self._copy, self._store = backup, copy, store
        self._logs: dict[str, list[str]] = {}
        """By log, its segments."""
        self._notes: dict[int, str] = {}
        """By bucket, the log that holds its last records."""
        self._journals: dict[str, list[str]] = {}
        """By work group, the segments of its journal."""
        self._later: list[Callable[[], object]] = []

    def converted(self, name: str) -> bool:
        """Take a file that is not copied as it is; return whether this one is."""
        parts = PurePosixPath(name).parts
        if name in (topics.FILE, DEFINITION):
            return True
        if parts[0] == log_note.LOGS_FOLDER:
            if name.endswith(".wal"):
                self._logs.setdefault(parts[1], []).append(name)
            return True
        if name == SCHEMA_FILE:
            schema = self._decoded(name, SchemaFile)
            register = Register(self._store, SCHEMA_FILE, SchemaFile, SCHEMA_FORMAT)
            self._later.append(lambda: register.create(schema))
            return True
        return self._is_of_group(name, parts) or self._is_of_bucket(name, parts)

    def _is_of_group(self, name: str, parts: tuple[str, ...]) -> bool:
        if parts[0] == groups.FOLDER and parts[2:3] in ((WORK_FOLDER,), (STATUS_FILE,)):
            segments = self._journals.setdefault(parts[1], [])
            if name.endswith(".wal"):
                segments.append(name)
            return True
        bucket = _bucket_of(PurePosixPath(name).stem)
        if parts[0] != groups.FOLDER or len(parts) != 3 or bucket is None:
            return False
        last = self._decoded(name, Committed)
        stored = StoredOffset(offset=last.offset, generation=last.generation, epoch=last.epoch)
        register = offset_register(self._store, parts[1], bucket)
        self._later.append(lambda: register.create(stored))
        return True

    def _is_of_bucket(self, name: str, parts: tuple[str, ...]) -> bool:
        bucket = _bucket_of(parts[0])
        if bucket is None or len(parts) != 2:
            return False
        if parts[1] == log_note.FILE:
            noted = log_note.decode(self._content(name), Path(name))
            if noted.bucket != bucket:
                raise InvalidArgument(
                    f"bucket {bucket} has the number {noted.bucket} in its log; restore the backup "
                    "to a folder, open it there, and back it up again"
                )
            self._notes[bucket] = noted.folder.name
            return True
        if parts[1] == INDEX_FILE:
            content = IndexList(indexes=self._decoded(name, list[IndexSpec]))
            self._later.append(lambda: index_register(self._store, bucket).create(content))
            return True
        return False

    def _content(self, name: str) -> bytes:
        return self._copy.checked_content(name, self._backup.files[name])

    def _decoded(self, name: str, kind: type[_T]) -> _T:
        try:
            return json_files.decode(self._content(name), kind)
        except msgspec.DecodeError as exc:
            raise StorageError(
                f"{name} in the backup {self._copy.source.place} is damaged ({exc}); use another "
                "backup"
            ) from exc

    def write(self) -> None:
        """Write the logs, then who may replay them, and all else."""
        noted = set(self._notes.values())
        names = {log: self._write_log(self._logs.get(log, [])) for log in noted}
        for bucket in self._backup.buckets:
            number = bucket.bucket
            log = names[self._notes[number]] if number in self._notes else FREE
            if log != FREE or bucket.version:
                record = OwnerRecord(term=bucket.term, owner=FREE, log=log)
                owner_register(self._store, number).create(record)
        for group, segments in self._journals.items():
            self._write_journal(group, segments)
        for call in self._later:
            call()

    def _write_log(self, segments: list[str]) -> str:
        """Write a log that is no longer written to; return its name."""
        contents = [self._content(segment) for segment in segments]
        return self._write_slots(dict(zip(segments, contents, strict=True)))

    def _write_journal(self, group: str, segments: list[str]) -> None:
        """Write the journal of a work group. Its keeper may have written to the last segment while
        that was copied, or may not have written anything yet."""
        contents = {segment: self._content(segment) for segment in segments}
        for segment in sorted(segments)[-1:]:
            place = f"{self._copy.source.place}/{segment}"
            contents[segment] = complete_entries(contents[segment], place)
        written = {segment: data for segment, data in contents.items() if data}
        log = self._write_slots(written) if written else FREE
        keeper_register(self._store, group).create(KeeperRecord(log=log))

    def _write_slots(self, contents: dict[str, bytes]) -> str:
        """Write the segments of a log as its slots, and a claim after them; return its name."""
        name = new_log_name()
        for slot, segment in enumerate(sorted(contents)):
            check_slot(contents[segment], f"{self._copy.source.place}/{segment}")
            self._store.create(slot_key(name, slot), contents[segment])
        self._store.create(slot_key(name, len(contents)), new_claim())
        lease = LeaseRecord(owner=this_process(), seconds=LEASE_SECONDS, taken_by=name)
        lease_register(self._store, name).create(lease)
        return name


def _bucket_of(name: str) -> int | None:
    """Return the number of the bucket that has this name."""
    number = name.removeprefix("bucket_")
    return int(number) if number != name and number.isdecimal() else None
