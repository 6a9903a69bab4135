"""A consistent copy of a topic, also while its owner writes. Blocking.

A copy is a folder with the files of a topic, and stays as it is: to read it, make a topic of it.
It holds everything that was acknowledged before it began and is flushed or logged. That takes
nothing but an order, since files of a table and of a log never change once they are written:

1. what says how far others have come (groups, checkpoints of pipelines), so that it can only lie
   behind what is copied after it;
2. of each bucket its log, then a version of its table: what the owner released from the log in
   between is in the table;
3. last ``backup.json`` with the checksum of every file. A copy without it is none.

Tagged versions come along, other old versions do not.
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
    """A file of a copy."""

    bytes: int
    crc32: str


class BucketCopy(msgspec.Struct):
    """A bucket of a copy; what is in its log comes on top of these rows."""

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
    """By path in the copy."""
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


Counter = Callable[[int], None]
"""Told of bytes that were copied or checked."""


def create(source: TopicFolder, target: Path, count: Counter = lambda _: None) -> Backup:
    """Copy a topic into ``target``, a folder that is made; it needs no owner and no lock."""
    with _told(target):
        return _create(source, target, count)


def _create(source: TopicFolder, target: Path, count: Counter) -> Backup:
    _must_be_free(target)
    if target.resolve().is_relative_to(source.folder.resolve()):
        raise InvalidArgument(
            f"{target} lies in the topic that is to be copied; name another folder"
        )
    copy = _Copy(source.folder, target, count)
    now = dt.datetime.now(dt.timezone.utc).isoformat()
    for place in (groups.FOLDER, CHECKPOINTS):
        copy.tree(place)
    buckets = _copy_tags_and_buckets(copy, source)
    for name in (SCHEMA_FILE, topics.FILE):
        copy.file(name, optional=name == SCHEMA_FILE)
    done = Backup(source.config.topic, str(source.folder), now, buckets, copy.files)
    copy.finish(msgspec.json.format(msgspec.json.encode(done), indent=1) + b"\n")
    return done


def _copy_tags_and_buckets(copy: _Copy, source: TopicFolder) -> list[BucketCopy]:
    """The tags, and the versions that they hold; anew where a tag moved meanwhile."""
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
        f"the tags of {source.folder} changed whenever they were copied; try again when nobody "
        "tags it"
    )


def _tag_files(folder: Path) -> dict[str, bytes]:
    found = {}
    for name in _below(folder / tags.FOLDER):
        with suppress(FileNotFoundError):
            found[name] = (folder / tags.FOLDER / name).read_bytes()
    return found


def load(folder: Path) -> Backup:
    """What a copy says of itself; raises if it is none, or was not finished."""
    try:
        data = (folder / FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise InvalidArgument(
            f"{folder} is no backup, or one that was not finished: there is no {FILE} in it"
        ) from exc
    except OSError as exc:
        raise StorageError(f"cannot read {folder / FILE}: {exc.strerror}") from exc
    json_files.check_format(data, folder / FILE, FORMAT)
    try:
        found = json_files.decode(data, Backup)
    except msgspec.DecodeError as exc:
        raise StorageError(f"{folder / FILE} is damaged ({exc}); use another backup") from exc
    return found


def damage_in(folder: Path, count: Counter = lambda _: None) -> list[str]:
    """What is wrong with a copy: files that are missing, or not what was copied."""
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
            found.append(f"{name} is not what was copied")
    return found


def restore(folder: Path, target: Path, count: Counter = lambda _: None) -> Backup:
    """Make a topic of a copy, in a folder that is made; every file is compared on the way."""
    with _told(target):
        return _restore(folder, target, count)


def _restore(folder: Path, target: Path, count: Counter) -> Backup:
    known = load(folder)
    _must_be_free(target)
    copy = _Copy(folder, target, count)
    for name, expected in known.files.items():
        if name != topics.FILE:
            _restore_file(copy, name, expected)
    config = topics.load_any(folder, filesystem.current())
    if config is None:
        raise TableError(f"the backup {folder} has no {topics.FILE}; use another one")
    copy.sync()
    # The last file: before, nobody takes the folder for a topic.
    renamed = msgspec.structs.replace(config, topic=target.name)
    topics.save(target, renamed, filesystem.current())
    return known


def _restore_file(copy: _Copy, name: str, expected: Copied) -> None:
    _inside(copy.source, name)
    try:
        copy.file(name)
    except FileNotFoundError:
        raise TableError(
            f"the backup {copy.source} lacks {name}; use another one. {copy.target} is not whole "
            "and can be removed"
        ) from None
    if copy.files[name] != expected:
        raise TableError(
            f"{name} in the backup {copy.source} is not what was copied; use another one. "
            f"{copy.target} is not whole and can be removed"
        )


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """What the disk refuses, in our words."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"cannot copy to {target}: {exc.strerror or exc}. It is not whole and can be removed"
        ) from exc


class _Copy:
    """Copies files from one folder to the same places in another, and knows their checksums."""

    def __init__(self, source: Path, target: Path, count: Counter) -> None:
        self.source, self.target, self._count = source, target, count
        self.files: dict[str, Copied] = {}
        self._fs = filesystem.current()
        self._folders: set[Path] = set()

    def tree(self, place: str) -> None:
        """Everything below a folder that is there when its turn comes; locks are left out.

        Folders of a pipeline's checkpoint: what was done before what was planned.
        """
        for name in sorted(_below(self.source / place), key=lambda n: "/commits/" not in f"/{n}"):
            if not name.endswith(("lock", ".tmp")) and not Path(name).name.startswith("member-"):
                self.file(f"{place}/{name}", optional=True)

    def file(self, name: str, *, optional: bool = False) -> None:
        """One file; one that is missing raises unless it is ``optional``."""
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
        """Take back what was copied below a folder."""
        for name in [name for name in self.files if name.startswith(f"{place}/")]:
            del self.files[name]
            self._fs.remove(self.target / name)

    def sync(self) -> None:
        """Make the names of all files durable."""
        for folder in self._folders:
            self._fs.sync_folder(folder)

    def finish(self, note: bytes) -> None:
        self.sync()
        self._fs.write_file(self.target / FILE, note)


def _copy_bucket(copy: _Copy, source: TopicFolder, bucket: int) -> BucketCopy:
    """Log, then table; once more from the beginning if the owner cleans up under our hands."""
    folder = bucket_folder(source.folder, bucket)
    for _ in range(_TRIES):
        try:
            return _copy_once(copy, folder, bucket)
        except (OSError, ValueError, TableError) as exc:
            if isinstance(exc, OSError) and exc.errno not in (None, errno.ENOENT):
                raise  # the disk's; Lance's own have no number
            failure = exc
            copy.forget(folder.name)
    raise StorageError(
        f"bucket {bucket} of {source.folder} cannot be copied: {failure}. If its owner cleans up "
        "faster than this copies, give it a larger keep_versions"
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
        for version in _wanted_versions(view.dataset, set(tagged.values())):
            for file in _files_of(table, version):
                if f"{name}/{TABLE}/{file}" not in copy.files:
                    copy.file(f"{name}/{TABLE}/{file}")
        for tag in tagged:
            copy.file(f"{name}/{TABLE}/{files.TAGS}/{tag}.json")
    copy.file(f"{name}/{index_file.FILE}", optional=True)
    return BucketCopy(bucket, view.version, view.rows, view.start, view.end, log_bytes)


def _wanted_versions(dataset: Any, tagged: set[int]) -> list[int]:
    """The newest version and the tagged ones, each with the commit that tells its properties."""
    there = [one["version"] for one in dataset.versions()]
    wanted = set()
    for version in {dataset.version, *tagged}:
        if version in there:
            wanted.add(version)
            wanted.add(versions.with_properties(dataset, [v for v in there if v <= version]))
    return sorted(wanted)


def _files_of(table: Table, version: int) -> Iterator[str]:
    """The files of a version, its manifest last."""
    view = table.at(version)
    yield from checksums.files_of(table.root, view.dataset)
    for name in _below(table.root / files.TRANSACTIONS):
        if name.startswith(f"{version - 1}-"):
            yield f"{files.TRANSACTIONS}/{name}"
    yield str(files.manifest_path(table.root, version).relative_to(table.root))


def _below(folder: Path) -> list[str]:
    """The files below a folder, as paths in it; none if it is not there."""
    found = []
    for place, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(place, name), folder) for name in names]
    return found


def _crc(path: Path, count: Counter) -> tuple[int, str]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
            count(len(block))
    return size, f"{crc:08x}"


def _must_be_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{target} is there already; name a folder that is not")


def _inside(folder: Path, name: str) -> Path:
    """A path of a copy, which must not lead out of it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise StorageError(f"{folder / FILE} names {name!r}, which lies outside of the backup")
    return folder / name
