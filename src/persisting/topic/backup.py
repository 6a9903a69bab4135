"""Backups: a consistent copy of a topic, even while its owner writes. Blocking.

A backup is a folder, or a prefix of an object store, with the files of a topic. It has one form,
wherever the topic is: that of a topic in a folder. It is never changed or opened as a topic;
restoring it creates a topic. It holds everything that was acknowledged before it began and is
flushed or logged. Files of a table never change once they are written, and logs only grow, so the
order of copying is enough to make it consistent:

1. the progress of consumers (groups, checkpoints of pipelines), so that it is never ahead of the
   records that are copied after it;
2. all logs, up to their last complete entries. Segments disappear from the front while they are
   copied; if one was removed, the copies of those before it are dropped: the tables hold them;
3. of each bucket its note of a log, then a version of its table. What a log released before or
   while it was copied is in that version, and its log sequence tells which records of the copied
   log to replay. A note of a log that was not copied is left out: the owner began that log after
   the backup began, or everything in it was in the tables;
4. last ``backup.json`` with the checksum of every file. A copy without it is not a backup.

If a put to several buckets is acknowledged while the backup runs, the backup may hold its records
for only some of them. Tagged versions are copied, other old versions are not.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from persisting import json_files
from persisting.errors import InvalidArgument, StorageError, TableError
from persisting.topic import folder_backup, folder_restore, store_backup, store_restore
from persisting.topic import spec as topics
from persisting.topic.backup_files import (
    Copied,
    Copy,
    Counter,
    FolderFiles,
    Place,
    StoreFiles,
    crc_of,
    files_at,
    read_whole,
)
from persisting.topic.backup_form import DEFINITION, Backup, BucketCopy
from persisting.topic.spec import BACKUP_FILE as FILE
from persisting.topic.spec import TopicConfig
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder

FORMAT = 1

__all__ = ["Backup", "BucketCopy", "Copied", "create", "damage_in", "load", "restore"]


def create(source: TopicFolder, target: Place, count: Counter = lambda _: None) -> Backup:
    """Copy a topic to ``target``, a new folder or prefix; no owner and no lock is needed."""
    files = files_at(target)
    with _copy_errors(files):
        return _create(source, files, count)


def _create(source: TopicFolder, target: FolderFiles | StoreFiles, count: Counter) -> Backup:
    target.check_absent_or_empty()
    _refuse_inside(source, target)
    now = dt.datetime.now(dt.timezone.utc).isoformat()
    if isinstance(source, StoreTopic):
        copy = Copy(StoreFiles(source.store), target, count)
        buckets = store_backup.copy_topic(copy, source)
    else:
        copy = Copy(FolderFiles(source.folder), target, count)
        buckets = folder_backup.copy_topic(copy, source)
    backup = Backup(source.config.topic, source.place, now, buckets, copy.files)
    copy.finish()
    note = msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n"
    target.write_last(FILE, note)
    return backup


def _refuse_inside(source: TopicFolder, target: FolderFiles | StoreFiles) -> None:
    if isinstance(source, StoreTopic):
        is_inside = f"{target.place}/".startswith(f"{source.place}/")
    else:
        folder = source.folder.resolve()
        is_inside = isinstance(target, FolderFiles) and target.folder.resolve().is_relative_to(
            folder
        )
    if is_inside:
        raise InvalidArgument(
            f"{target.place} is inside the topic to be copied; choose another folder"
        )


def load(place: Place) -> Backup:
    """Read ``backup.json``; raise if this is not a backup, or an unfinished one."""
    files = files_at(place)
    path = f"{files.place}/{FILE}"
    try:
        data = read_whole(files, FILE)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise InvalidArgument(
            f"{files.place} is not a backup, or was not finished: it has no {FILE}"
        ) from exc
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc
    json_files.check_format(data, path, FORMAT)
    try:
        backup = json_files.decode(data, Backup)
    except msgspec.DecodeError as exc:
        raise StorageError(f"{path} is damaged ({exc}); use another backup") from exc
    for name in backup.files:
        _check_inside(path, name)
    return backup


def damage_in(place: Place, count: Counter = lambda _: None) -> list[str]:
    """Return what is wrong with a backup: files that are missing or have changed."""
    found, files = [], files_at(place)
    for name, expected in load(place).files.items():
        try:
            copied = crc_of(files, name, count)
        except FileNotFoundError:
            found.append(f"{name} is missing")
            continue
        except OSError as exc:
            found.append(f"{name} cannot be read: {exc.strerror}")
            continue
        if copied != expected:
            found.append(f"{name} has changed since it was copied")
    return found


def restore(place: Place, target: Place, count: Counter = lambda _: None) -> Backup:
    """Create a topic from a backup, in a new folder or below a new prefix; every file is checked
    while it is copied."""
    files = files_at(target)
    with _copy_errors(files):
        backup, copy = load(place), Copy(files_at(place), files, count)
        files.check_absent_or_empty()
        config = _definition(backup, copy)
        if isinstance(files, StoreFiles):
            store_restore.restore(backup, config, copy, files.store)
        else:
            folder_restore.restore(backup, config, copy, files.folder)
        return backup


def _definition(backup: Backup, copy: Copy) -> TopicConfig:
    """Return the configuration of the topic that was copied."""
    for name in (topics.FILE, DEFINITION):
        if name in backup.files:
            data = copy.checked_content(name, backup.files[name])
            return topics.decode(data, f"{copy.source.place}/{name}")
    raise TableError(f"the backup {copy.source.place} has no {topics.FILE}; use another backup")


@contextmanager
def _copy_errors(target: FolderFiles | StoreFiles) -> Iterator[None]:
    """Translate errors of the file system."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"cannot copy to {target.place}: {exc.strerror or exc}. It is incomplete and can be "
            "removed"
        ) from exc


def _check_inside(path: str, name: str) -> None:
    """Raise for a name that leads out of the backup."""
    parts = PurePosixPath(name).parts
    if not name or "\0" in name or Path(name).is_absolute() or ".." in parts:
        raise StorageError(f"{path} names {name!r}, which is outside of the backup")
