"""Copies a topic in a folder into a backup, while its owner may write. Blocking.

:mod:`persisting.topic.backup` says in which order, and why the copy is consistent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from persisting import fs as filesystem
from persisting.bucket import log_note
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import StorageError, TableError
from persisting.lock import LOCK_FILE
from persisting.table import checksums, files, versions
from persisting.table import indexes as index_file
from persisting.table.table import FOLDER as TABLE
from persisting.table.table import Table
from persisting.topic import groups, tags
from persisting.topic import spec as topics
from persisting.topic.backup_files import Copy, FolderFiles, StoreFiles
from persisting.topic.backup_form import CHECKPOINTS, DEFINITION, TRIES, BucketCopy, divide_logs
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder
from persisting.wal import FOLDER as LOG
from persisting.wal.frame import SEGMENT_HEADER_SIZE
from persisting.wal.inspection import whole_bytes
from persisting.wal.segment import parse_name


def copy_topic(copy: Copy, source: TopicFolder) -> list[BucketCopy]:
    """Copy everything but ``backup.json``."""
    _copy_groups(copy, source)
    copy.tree(CHECKPOINTS)
    logs = _copy_logs(copy, source)
    buckets, noted = _copy_tags_and_buckets(copy, source, logs)
    shared = {place: size for place, size in logs.items() if Path(place).name != LOG}
    for place in divide_logs(shared, noted, buckets):
        copy.forget(place)
    copy.file(SCHEMA_FILE, optional=True)
    if isinstance(copy.target, StoreFiles):
        copy.write(DEFINITION, (source.folder / topics.FILE).read_bytes())
    else:
        copy.file(topics.FILE)
    return buckets


def _copy_groups(copy: Copy, source: TopicFolder) -> None:
    """Copy the groups; start over if a journal of a work group begins a new segment meanwhile,
    since it removes the one before."""
    for _ in range(TRIES):
        before = _journals(source.folder)
        copy.tree(groups.FOLDER)
        if _journals(source.folder) == before:
            return
        copy.forget(groups.FOLDER)
    raise StorageError(
        f"the work groups of {source.folder} changed during every attempt to copy them; try again"
    )


def _journals(folder: Path) -> list[str]:
    names = FolderFiles(folder).names(groups.FOLDER)
    return sorted(name for name in names if parse_name(Path(name).name) is not None)


def _copy_tags_and_buckets(
    copy: Copy, source: TopicFolder, logs: dict[str, int]
) -> tuple[list[BucketCopy], dict[int, str]]:
    """Copy the tags and the versions that they hold; start over if a tag changes meanwhile.

    Also returns, by bucket, the shared log that it notes.
    """
    for _ in range(TRIES):
        before = _tag_files(source.folder)
        copy.tree(tags.FOLDER)
        noted: dict[int, str] = {}
        buckets = [
            _copy_bucket(copy, source, bucket, logs, noted)
            for bucket in source.buckets
            if bucket_folder(source.folder, bucket).is_dir()
        ]
        if _tag_files(source.folder) == before:
            return buckets, noted
        copy.forget(tags.FOLDER)
        for bucket in source.buckets:
            _forget_bucket(copy, bucket)
    raise StorageError(
        f"the tags of {source.folder} changed during every attempt to copy them; try again when "
        "nobody is tagging"
    )


def _tag_files(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in FolderFiles(folder).names(tags.FOLDER):
        with suppress(FileNotFoundError):
            contents[name] = (folder / tags.FOLDER / name).read_bytes()
    return contents


def _copy_logs(copy: Copy, source: TopicFolder) -> dict[str, int]:
    """Copy all logs; return their sizes, by their path in the topic. Empty logs are left out."""
    places = [bucket_folder(Path(), bucket) / LOG for bucket in source.buckets]
    folders = log_note.logs_in(source.folder, filesystem.current())
    places += [folder.relative_to(source.folder) for folder in folders]
    sizes = {str(place): _copy_log(copy, source.folder, place) for place in places}
    return {place: size for place, size in sizes.items() if size}


def _copy_log(copy: Copy, source: Path, place: Path) -> int:
    """Copy the complete entries of a log; return their bytes."""
    # Listed once: all segments but the last are complete, later ones are younger than the backup.
    folder, copied = source / place, list[str]()
    names = sorted(filter(parse_name, os.listdir(folder))) if folder.is_dir() else []
    for name in names:
        try:
            data = memoryview((folder / name).read_bytes())
        except FileNotFoundError:
            # Segments are removed from the front: those before it hold nothing that is needed, and
            # the log must not have a gap.
            for earlier in copied:
                copy.forget(earlier)
            copied = []
            continue
        whole = whole_bytes(folder / name, data) if name == names[-1] else len(data)
        if whole > SEGMENT_HEADER_SIZE:
            copied.append(f"{place}/{name}")
            copy.write(copied[-1], data[:whole])
    if copied and place.name != LOG:
        # The owner of the restored topic removes a log by its lock file.
        copy.write(f"{place}/{LOCK_FILE}", b"")
    return sum(copy.files[name].bytes for name in copied)


def _copy_bucket(
    copy: Copy, source: TopicFolder, bucket: int, logs: dict[str, int], noted: dict[int, str]
) -> BucketCopy:
    """Copy note, then table; start over if the owner removes files meanwhile."""
    folder = bucket_folder(source.folder, bucket)
    for _ in range(TRIES):
        try:
            return _copy_once(copy, folder, bucket, logs, noted)
        except (OSError, ValueError, TableError) as exc:
            if isinstance(exc, OSError) and exc.errno not in (None, errno.ENOENT):
                raise  # an error of the disk; Lance's own errors have no errno
            failure = exc
            _forget_bucket(copy, bucket)
    raise StorageError(
        f"cannot copy bucket {bucket} of {source.folder}: {failure}. If its owner removes old "
        "versions faster than they are copied, give the topic a larger keep_versions"
    ) from failure


def _forget_bucket(copy: Copy, bucket: int) -> None:
    """Remove the copy of a bucket without its log, which is copied only once."""
    name = bucket_folder(Path(), bucket).name
    for place in (TABLE, index_file.FILE, log_note.FILE):
        copy.forget(f"{name}/{place}")


def _copy_once(
    copy: Copy, folder: Path, bucket: int, logs: dict[str, int], noted: dict[int, str]
) -> BucketCopy:
    name = folder.name
    note = log_note.read(folder, filesystem.current())
    noted.pop(bucket, None)
    if note is not None and (place := f"{log_note.LOGS_FOLDER}/{note.folder.name}") in logs:
        copy.write(f"{name}/{log_note.FILE}", log_note.content(note.folder, note.bucket))
        noted[bucket] = place
    table = Table(folder, filesystem.current())
    table.refresh()
    view = table.view
    if view.dataset is not None:
        tagged = versions.tags(view.dataset)
        for version in _versions_to_copy(view.dataset, set(tagged.values())):
            paths = [f"{name}/{TABLE}/{file}" for file in _files_of(table, version)]
            copy.all(path for path in paths if path not in copy.files)
        for tag in tagged:
            copy.file(f"{name}/{TABLE}/{files.TAGS}/{tag}.json")
    copy.file(f"{name}/{index_file.FILE}", optional=True)
    log_bytes = logs.get(f"{name}/{LOG}", 0)
    return BucketCopy(bucket, view.version, view.rows, view.start, view.end, log_bytes)


def _versions_to_copy(dataset: Any, tagged: set[int]) -> list[int]:
    """Return the newest and the tagged versions, each with the version that has its properties."""
    existing = [entry["version"] for entry in dataset.versions()]
    chosen = set()
    for version in {dataset.version, *tagged}:
        if version in existing:
            chosen.add(version)
            chosen.add(versions.with_properties(dataset, [v for v in existing if v <= version]))
    return sorted(chosen)


def _files_of(table: Table, version: int) -> Iterator[str]:
    """Yield the files of a version, its manifest last."""
    view = table.at(version)
    yield from checksums.files_of(table.root, view.dataset)
    for name in FolderFiles(table.root).names(files.TRANSACTIONS):
        if name.startswith(f"{version - 1}-"):
            yield f"{files.TRANSACTIONS}/{name}"
    yield str(files.manifest_path(table.root, version).relative_to(table.root))
