"""Backups: a consistent copy of a topic, even while its owner writes. Blocking.

A backup is a folder with the files of a topic. It is never changed or opened as a topic; restoring
it creates a topic. It holds everything that was acknowledged before it began and is flushed or
logged. Files of a table or a log never change once they are written, so the order of copying is
enough to make it consistent:

1. the progress of consumers (groups, checkpoints of pipelines), so that it is never ahead of the
   records that are copied after it;
2. of each bucket first its log, then a version of its table: what the owner released from the log
   in between is in the table;
3. last ``backup.json`` with the checksum of every file. A copy without it is not a backup.

Tagged versions are copied, other old versions are not.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from persisting import fs as filesystem
from persisting import json_files
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import InvalidArgument, StorageError, TableError
from persisting.table import checksums, files, versions
from persisting.table import indexes as index_file
from persisting.table.table import FOLDER as TABLE
from persisting.table.table import Table
from persisting.topic import groups, tags
from persisting.topic import spec as topics
from persisting.topic.spec import BACKUP_FILE as FILE
from persisting.topic.spec import bucket_folder
from persisting.topic.topic_files import TopicFolder
from persisting.wal import FOLDER as LOG
from persisting.wal.segment import SUFFIX

FORMAT = 1
CHECKPOINTS = "checkpoints"
_TRIES = 5
_BLOCK = 1 << 20


class Copied(msgspec.Struct):
    """A file of a backup."""

    bytes: int
    crc32: str


class BucketCopy(msgspec.Struct):
    """A bucket of a backup; the records in its log are not among ``rows``."""

    bucket: int
    version: int
    rows: int
    start_offset: int
    end_offset: int
    log_bytes: int


class Backup(msgspec.Struct):
    """The contents of ``backup.json``."""

    topic: str
    source: str
    time: str
    buckets: list[BucketCopy]
    files: dict[str, Copied]
    """By path in the backup."""
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


Counter = Callable[[int], None]
"""Called with the number of bytes just copied or checked."""


def create(source: TopicFolder, target: Path, count: Counter = lambda _: None) -> Backup:
    """Copy a topic into ``target``, a new folder; no owner and no lock is needed."""
    with _copy_errors(target):
        return _create(source, target, count)


def _create(source: TopicFolder, target: Path, count: Counter) -> Backup:
    _check_absent_or_empty(target)
    if target.resolve().is_relative_to(source.folder.resolve()):
        raise InvalidArgument(f"{target} is inside the topic to be copied; choose another folder")
    copy = _Copy(source.folder, target, count)
    now = dt.datetime.now(dt.timezone.utc).isoformat()
    for place in (groups.FOLDER, CHECKPOINTS):
        copy.tree(place)
    buckets = _copy_tags_and_buckets(copy, source)
    for name in (SCHEMA_FILE, topics.FILE):
        copy.file(name, optional=name == SCHEMA_FILE)
    backup = Backup(source.config.topic, str(source.folder), now, buckets, copy.files)
    copy.finish(msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n")
    return backup


def _copy_tags_and_buckets(copy: _Copy, source: TopicFolder) -> list[BucketCopy]:
    """Copy the tags and the versions that they hold; start over if a tag changes meanwhile."""
    for _ in range(_TRIES):
        before = _tag_files(source.folder)
        copy.tree(tags.FOLDER)
        buckets = [
            _copy_bucket(copy, source, bucket)
            for bucket in source.buckets
            if bucket_folder(source.folder, bucket).is_dir()
        ]
        if _tag_files(source.folder) == before:
            return buckets
        for place in (tags.FOLDER, *(bucket_folder(Path(), b).name for b in source.buckets)):
            copy.forget(place)
    raise StorageError(
        f"the tags of {source.folder} changed during every attempt to copy them; try again when "
        "nobody is tagging"
    )


def _tag_files(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in _below(folder / tags.FOLDER):
        with suppress(FileNotFoundError):
            contents[name] = (folder / tags.FOLDER / name).read_bytes()
    return contents


def load(folder: Path) -> Backup:
    """Read ``backup.json``; raise if the folder is not a backup, or an unfinished one."""
    try:
        data = (folder / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise InvalidArgument(
            f"{folder} is not a backup, or was not finished: it has no {FILE}"
        ) from exc
    except OSError as exc:
        raise StorageError(f"cannot read {folder / FILE}: {exc.strerror}") from exc
    json_files.check_format(data, folder / FILE, FORMAT)
    try:
        return json_files.decode(data, Backup)
    except msgspec.DecodeError as exc:
        raise StorageError(f"{folder / FILE} is damaged ({exc}); use another backup") from exc


def damage_in(folder: Path, count: Counter = lambda _: None) -> list[str]:
    """Return what is wrong with a backup: files that are missing or have changed."""
    found = []
    for name, expected in load(folder).files.items():
        path = _inside(folder, name)
        try:
            size, crc = _crc(path, count)
        except FileNotFoundError:
            found.append(f"{name} is missing")
            continue
        except OSError as exc:
            found.append(f"{name} cannot be read: {exc.strerror}")
            continue
        if (size, crc) != (expected.bytes, expected.crc32):
            found.append(f"{name} has changed since it was copied")
    return found


def restore(folder: Path, target: Path, count: Counter = lambda _: None) -> Backup:
    """Create a topic from a backup, in a new folder; every file is checked while it is copied."""
    with _copy_errors(target):
        return _restore(folder, target, count)


def _restore(folder: Path, target: Path, count: Counter) -> Backup:
    backup = load(folder)
    _check_absent_or_empty(target)
    copy = _Copy(folder, target, count)
    for name, expected in backup.files.items():
        if name != topics.FILE:
            _restore_file(copy, name, expected)
    config = topics.load_any(folder, filesystem.current())
    if config is None:
        raise TableError(f"the backup {folder} has no {topics.FILE}; use another backup")
    copy.sync()
    # The last file: without it the folder is not a topic.
    renamed = msgspec.structs.replace(config, topic=target.name)
    topics.save(target, renamed, filesystem.current())
    return backup


def _restore_file(copy: _Copy, name: str, expected: Copied) -> None:
    _inside(copy.source, name)
    try:
        copy.file(name)
    except FileNotFoundError:
        raise TableError(
            f"the backup {copy.source} lacks {name}; use another backup. {copy.target} is "
            "incomplete and can be removed"
        ) from None
    if copy.files[name] != expected:
        raise TableError(
            f"{name} in the backup {copy.source} has changed since it was copied; use another "
            f"backup. {copy.target} is incomplete and can be removed"
        )


@contextmanager
def _copy_errors(target: Path) -> Iterator[None]:
    """Translate errors of the file system."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"cannot copy to {target}: {exc.strerror or exc}. It is incomplete and can be removed"
        ) from exc


class _Copy:
    """Copies files from one folder to the same paths in another, and records their checksums."""

    def __init__(self, source: Path, target: Path, count: Counter) -> None:
        self.source, self.target, self._count = source, target, count
        self.files: dict[str, Copied] = {}
        self._fs = filesystem.current()
        self._folders: set[Path] = set()

    def tree(self, place: str) -> None:
        """Copy everything below a folder, except locks and files that disappear meanwhile.

        Of a pipeline's checkpoint, ``commits`` come first: a plan without its commit is repeated,
        a commit without its plan would be wrong.
        """
        for name in sorted(_below(self.source / place), key=lambda n: "/commits/" not in f"/{n}"):
            if not name.endswith(("lock", ".tmp")) and not Path(name).name.startswith("member-"):
                self.file(f"{place}/{name}", optional=True)

    def file(self, name: str, *, optional: bool = False) -> None:
        """Copy one file; a missing file raises unless it is ``optional``."""
        path = self.target / name
        self._fs.make_folder(path.parent)
        self._folders.add(path.parent)
        try:
            source = (self.source / name).open("rb")
        except FileNotFoundError:
            if optional:
                return
            raise
        size, crc = 0, 0
        with source:
            self._fs.remove(path)
            fd = self._fs.create(path)
            try:
                while block := source.read(_BLOCK):
                    self._fs.write(fd, block)
                    size, crc = size + len(block), zlib.crc32(block, crc)
                    self._count(len(block))
                self._fs.sync(fd)
            finally:
                self._fs.close(fd)
        self.files[name] = Copied(size, f"{crc:08x}")

    def forget(self, place: str) -> None:
        """Remove what was copied below a folder."""
        for name in [name for name in self.files if name.startswith(f"{place}/")]:
            del self.files[name]
            self._fs.remove(self.target / name)

    def sync(self) -> None:
        """Make the directory entries of all files durable."""
        for folder in self._folders:
            self._fs.sync_folder(folder)

    def finish(self, note: bytes) -> None:
        self.sync()
        self._fs.write_file(self.target / FILE, note)


def _copy_bucket(copy: _Copy, source: TopicFolder, bucket: int) -> BucketCopy:
    """Copy log, then table; start over if the owner removes files meanwhile."""
    folder = bucket_folder(source.folder, bucket)
    for _ in range(_TRIES):
        try:
            return _copy_once(copy, folder, bucket)
        except (OSError, ValueError, TableError) as exc:
            if isinstance(exc, OSError) and exc.errno not in (None, errno.ENOENT):
                raise  # an error of the disk; Lance's own errors have no errno
            failure = exc
            copy.forget(folder.name)
    raise StorageError(
        f"cannot copy bucket {bucket} of {source.folder}: {failure}. If its owner removes old "
        "versions faster than they are copied, give the topic a larger keep_versions"
    ) from failure


def _copy_once(copy: _Copy, folder: Path, bucket: int) -> BucketCopy:
    name = folder.name
    log_bytes = 0
    for segment in sorted(_below(folder / LOG)):
        if segment.endswith(SUFFIX) and "/" not in segment:
            copy.file(f"{name}/{LOG}/{segment}", optional=True)
            log_bytes += copy.files.get(f"{name}/{LOG}/{segment}", Copied(0, "")).bytes
    table = Table(folder, filesystem.current())
    table.refresh()
    view = table.view
    if view.dataset is not None:
        tagged = versions.tags(view.dataset)
        for version in _versions_to_copy(view.dataset, set(tagged.values())):
            for file in _files_of(table, version):
                if f"{name}/{TABLE}/{file}" not in copy.files:
                    copy.file(f"{name}/{TABLE}/{file}")
        for tag in tagged:
            copy.file(f"{name}/{TABLE}/{files.TAGS}/{tag}.json")
    copy.file(f"{name}/{index_file.FILE}", optional=True)
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
    for name in _below(table.root / files.TRANSACTIONS):
        if name.startswith(f"{version - 1}-"):
            yield f"{files.TRANSACTIONS}/{name}"
    yield str(files.manifest_path(table.root, version).relative_to(table.root))


def _below(folder: Path) -> list[str]:
    """Return the files below a folder, as relative paths; none if the folder does not exist."""
    paths = []
    for place, _, names in os.walk(folder):
        paths += [os.path.relpath(os.path.join(place, name), folder) for name in names]
    return paths


def _crc(path: Path, count: Counter) -> tuple[int, str]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
            count(len(block))
    return size, f"{crc:08x}"


def _check_absent_or_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{target} already exists; choose a folder that does not exist")


def _inside(folder: Path, name: str) -> Path:
    """Return a path in a backup; raise for a name that leads out of it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise StorageError(f"{folder / FILE} names {name!r}, which is outside of the backup")
    return folder / name
