"""Backups: a consistent copy of a topic, even while its owner writes. Blocking.

A backup is a folder with the files of a topic. It is never changed or opened as a topic; restoring
it creates a topic. It holds everything that was acknowledged before it began and is flushed or
logged. Files of a table never change once they are written, and logs only grow, so the order of
copying is enough to make it consistent:

1. the progress of consumers (groups, checkpoints of pipelines), so that it is never ahead of the
   records that are copied after it;
2. all logs, up to their last complete entries. Segments disappear from the front while they are
   copied; if one is gone, the copies of those before it are dropped: the tables hold their records;
3. of each bucket its note of a log, then a version of its table. What a log released before or
   while it was copied is in that version, and its log sequence tells which records of the copied
   log to replay. A note of a log that was not copied is left out: the owner began that log after
   the backup began, or everything in it was in the tables;
4. last ``backup.json`` with the checksum of every file. A copy without it is not a backup.

Of a put to several buckets that is acknowledged while the backup runs, the backup may hold the
records of some of them. Tagged versions are copied, other old versions are not.
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
from persisting.bucket import log_note
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import InvalidArgument, StorageError, TableError
from persisting.lock import LOCK_FILE
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
from persisting.wal.frame import SEGMENT_HEADER_SIZE
from persisting.wal.inspection import whole_bytes
from persisting.wal.segment import parse_name

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
    logs = _copy_logs(copy, source)
    buckets = _copy_tags_and_buckets(copy, source, logs)
    _divide_logs(copy, logs, buckets)
    for name in (SCHEMA_FILE, topics.FILE):
        copy.file(name, optional=name == SCHEMA_FILE)
    backup = Backup(source.config.topic, str(source.folder), now, buckets, copy.files)
    copy.finish(msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n")
    return backup


def _copy_tags_and_buckets(
    copy: _Copy, source: TopicFolder, logs: dict[str, int]
) -> list[BucketCopy]:
    """Copy the tags and the versions that they hold; start over if a tag changes meanwhile."""
    for _ in range(_TRIES):
        before = _tag_files(source.folder)
        copy.tree(tags.FOLDER)
        buckets = [
            _copy_bucket(copy, source, bucket, logs)
            for bucket in source.buckets
            if bucket_folder(source.folder, bucket).is_dir()
        ]
        if _tag_files(source.folder) == before:
            return buckets
        copy.forget(tags.FOLDER)
        for bucket in source.buckets:
            _forget_bucket(copy, bucket)
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
        with source:
            self._write(name, iter(lambda: source.read(_BLOCK), b""))

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write one file with this content."""
        self._fs.make_folder((self.target / name).parent)
        self._folders.add((self.target / name).parent)
        self._write(name, iter([data]))

    def _write(self, name: str, blocks: Iterator[bytes | memoryview]) -> None:
        path = self.target / name
        size, crc = 0, 0
        self._fs.remove(path)
        fd = self._fs.create(path)
        try:
            for block in blocks:
                self._fs.write(fd, block)
                size, crc = size + len(block), zlib.crc32(block, crc)
                self._count(len(block))
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)
        self.files[name] = Copied(size, f"{crc:08x}")

    def forget(self, place: str) -> None:
        """Remove what was copied at a path or below it."""
        for name in [n for n in self.files if n == place or n.startswith(f"{place}/")]:
            del self.files[name]
            self._fs.remove(self.target / name)

    def sync(self) -> None:
        """Make the directory entries of all files durable."""
        for folder in self._folders:
            self._fs.sync_folder(folder)

    def finish(self, note: bytes) -> None:
        self.sync()
        self._fs.write_file(self.target / FILE, note)


def _copy_logs(copy: _Copy, source: TopicFolder) -> dict[str, int]:
    """Copy all logs; return their sizes, by their path in the topic. Empty logs are left out."""
    places = [bucket_folder(Path(), bucket) / LOG for bucket in source.buckets]
    folders = log_note.logs_in(source.folder, filesystem.current())
    places += [folder.relative_to(source.folder) for folder in folders]
    sizes = {str(place): _copy_log(copy, place) for place in places}
    return {place: size for place, size in sizes.items() if size}


def _copy_log(copy: _Copy, place: Path) -> int:
    """Copy the complete entries of a log; return their bytes."""
    # Listed once: all segments but the last are complete, later ones are younger than the backup.
    folder, copied = copy.source / place, list[str]()
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


def _divide_logs(copy: _Copy, logs: dict[str, int], buckets: list[BucketCopy]) -> None:
    """Count the bytes of each shared log for the buckets that note it; drop it if none does."""
    notes = log_note.notes_in(copy.target, filesystem.current())
    for place, size in logs.items():
        if Path(place).name == LOG:
            continue
        noting = [b for b in buckets if notes.get(b.bucket) == copy.target / place]
        if not noting:
            copy.forget(place)
        for number, bucket in enumerate(noting):
            bucket.log_bytes += size // len(noting) + (number < size % len(noting))


def _copy_bucket(copy: _Copy, source: TopicFolder, bucket: int, logs: dict[str, int]) -> BucketCopy:
    """Copy note, then table; start over if the owner removes files meanwhile."""
    folder = bucket_folder(source.folder, bucket)
    for _ in range(_TRIES):
        try:
            return _copy_once(copy, folder, bucket, logs)
        except (OSError, ValueError, TableError) as exc:
            if isinstance(exc, OSError) and exc.errno not in (None, errno.ENOENT):
                raise  # an error of the disk; Lance's own errors have no errno
            failure = exc
            _forget_bucket(copy, bucket)
    raise StorageError(
        f"cannot copy bucket {bucket} of {source.folder}: {failure}. If its owner removes old "
        "versions faster than they are copied, give the topic a larger keep_versions"
    ) from failure


def _forget_bucket(copy: _Copy, bucket: int) -> None:
    """Remove the copy of a bucket without its log, which is copied only once."""
    name = bucket_folder(Path(), bucket).name
    for place in (TABLE, index_file.FILE, log_note.FILE):
        copy.forget(f"{name}/{place}")


def _copy_once(copy: _Copy, folder: Path, bucket: int, logs: dict[str, int]) -> BucketCopy:
    name = folder.name
    noted = log_note.read(folder, filesystem.current())
    if noted is not None and f"{log_note.LOGS_FOLDER}/{noted.folder.name}" in logs:
        copy.write(f"{name}/{log_note.FILE}", log_note.content(noted.folder, noted.bucket))
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
