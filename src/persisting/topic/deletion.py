"""Deleting a stored topic. Blocking.

The folder is renamed first, which is atomic: a crash leaves either the whole topic, or a folder
with a hidden name that no command lists. The next deletion removes it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from persisting import fs as filesystem
from persisting.bucket.group_offsets import WORK_FOLDER, groups_in, is_work_group
from persisting.errors import BucketLocked, InvalidArgument, NoSuchTopic, StorageError
from persisting.fs import os_errors_as
from persisting.lock import LOCK_FILE, LockedFile, described, file_lock, is_locked, owner_of
from persisting.topic import spec as topics
from persisting.topic.groups import FOLDER as GROUPS
from persisting.topic.groups import MEMBER, try_lock

_DELETED = ".deleted-"


def check_deletable(folder: Path) -> None:
    """Raise unless there is a topic in ``folder`` that nobody writes or reads in a group."""
    if folder.is_symlink():
        raise InvalidArgument(
            f"{folder} is a symbolic link; delete the topic in the folder that it points to"
        )
    if topics.has_file(folder, topics.BACKUP_FILE):
        raise InvalidArgument(f"{folder} is a backup, not a topic; remove the folder itself")
    if not topics.has_file(folder):
        raise NoSuchTopic(topics.no_such_topic(folder))
    for bucket in _bucket_folders(folder):
        owner = owner_of(bucket)
        if owner is not None and not owner.get("passing"):
            raise _owned(folder, described(owner))
    fs = filesystem.current()
    for group in groups_in(folder / GROUPS, fs):
        members = [group / name for name in fs.list(group) if name.startswith(MEMBER)]
        if any(map(is_locked, [*members, group / WORK_FOLDER / LOCK_FILE])):
            raise _read_by(folder, group)


def delete(folder: Path) -> None:
    """Delete the topic in ``folder``; raise if a process has it open for writing."""
    check_deletable(folder)
    fs = filesystem.current()
    with ExitStack() as stack:
        # No process may create or open the topic until it has lost its name.
        stack.enter_context(file_lock(folder / topics.LOCK_FILE))
        for bucket in _bucket_folders(folder):
            stack.callback(_locked(folder, bucket).free)
        for group in groups_in(folder / GROUPS, fs):
            if is_work_group(group):  # a keeper may have started since the check
                kept = try_lock(group / WORK_FOLDER / LOCK_FILE)
                if kept is None:
                    raise _read_by(folder, group)
                stack.callback(kept.free)
        trash = folder.with_name(f".{folder.name}{_DELETED}{secrets.token_hex(4)}")
        with os_errors_as("rename", folder):
            fs.rename(folder, trash)
            fs.sync_folder(folder.parent)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> int:
    """Remove what interrupted deletions of a topic left behind; return how many there were."""
    prefix = f".{folder.name}{_DELETED}"
    if not folder.parent.is_dir():
        return 0
    names = [name for name in os.listdir(folder.parent) if name.startswith(prefix)]
    for name in names:
        try:
            shutil.rmtree(folder.parent / name)
        except FileNotFoundError:
            continue  # another process removes it, too
        except OSError as exc:
            raise StorageError(
                f"the topic is deleted, but {folder.parent / name} cannot be removed: "
                f"{exc.strerror}; remove it by hand, or delete the topic again"
            ) from exc
    return len(names)


def _bucket_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("bucket_*") if path.is_dir())


def _locked(folder: Path, bucket: Path) -> LockedFile:
    """Lock a bucket without a note: the note of its last owner stays, should a rename fail."""
    with os_errors_as("open the lock file", bucket / LOCK_FILE):
        file = LockedFile(bucket / LOCK_FILE)
    try:
        file.lock()
    except OSError:
        file.free()
        owner = owner_of(bucket)
        raise _owned(folder, described(owner or {})) from None
    return file


def _owned(folder: Path, owner: str) -> BucketLocked:
    return BucketLocked(
        f"topic {folder.name!r} is open for writing by {owner}", hint="close it there first"
    )


def _read_by(folder: Path, group: Path) -> BucketLocked:
    return BucketLocked(
        f"topic {folder.name!r} is being read by group {group.name!r}",
        hint="close its readers first",
    )
