"""Which log of a topic may hold records of a bucket: a small file in the bucket's folder.

It is written durably before the first record of the bucket is acknowledged in that log, and removed
when the bucket's table holds everything. So a bucket has at most one log besides its own folder's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from persisting import json_files, wal
from persisting.errors import WALError
from persisting.fs import FileSystem, os_errors_as

FILE = "log.json"
FORMAT = 1
LOGS_FOLDER = "log"
"""Folder, beside the buckets of a topic, with one folder for each log."""

_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{8}")


class _Note(msgspec.Struct):
    """The content of the file: the name of the log's folder, and the bucket's number in it."""

    format: int
    log: str
    bucket: int


class LogNote(NamedTuple):
    """The log that may hold records of a bucket, and the number that the bucket has there."""

    folder: Path
    bucket: int


def has_log(bucket: Path) -> bool:
    """Whether the folder of a bucket holds log segments of its own."""
    path = bucket / wal.FOLDER
    return path.is_dir() and any(name.suffix == ".wal" for name in path.iterdir())


def is_logged(bucket: Path) -> bool:
    """Whether a log may hold records that the bucket's table lacks."""
    return has_log(bucket) or (bucket / FILE).exists()


def is_log_name(name: str) -> bool:
    """Whether this can be the name of a log's folder."""
    return _NAME.fullmatch(name) is not None


def logs_folder(bucket: Path) -> Path:
    """Return the folder with the logs of the topic that a bucket belongs to."""
    return bucket.parent / LOGS_FOLDER


def read(bucket: Path, fs: FileSystem) -> LogNote | None:
    """Return the log that may hold records of a bucket; None if there is none."""
    path = bucket / FILE
    try:
        data = fs.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise WALError(f"cannot read {path}: {exc.strerror or exc}") from exc
    return decode(data, path)


def decode(data: bytes, path: Path) -> LogNote:
    """Return what a note says, or raise; ``path`` is its file's, in the bucket's folder."""
    json_files.check_format(data, path, FORMAT)
    try:
        note = json_files.decode(data, _Note)
    except msgspec.DecodeError as exc:
        raise WALError(
            f"{path} is damaged ({exc}): it names the log that holds the bucket's last records. "
            "Restore it from a copy"
        ) from exc
    if not is_log_name(note.log):
        raise WALError(f"{path} names {note.log!r}, which is not a log of a topic; restore it")
    return LogNote(logs_folder(path.parent) / note.log, note.bucket)


def noted_log(bucket: Path, fs: FileSystem) -> Path | None:
    """Return the folder of the log that may hold records of a bucket; None if there is none."""
    note = read(bucket, fs)
    return None if note is None else note.folder


def notes_in(topic: Path, fs: FileSystem) -> dict[int, Path]:
    """Return, by bucket, the log that each bucket of a topic notes."""
    notes = {}
    for path in topic.glob(f"bucket_*/{FILE}"):
        number = path.parent.name.removeprefix("bucket_")
        noted = noted_log(path.parent, fs) if number.isdecimal() else None
        if noted is not None:
            notes[int(number)] = noted
    return dict(sorted(notes.items()))


def logs_in(topic: Path, fs: FileSystem) -> list[Path]:
    """Return the folders of all logs of a topic, oldest first."""
    folder = topic / LOGS_FOLDER
    return [folder / n for n in fs.list(folder) if is_log_name(n)] if folder.is_dir() else []


def write(bucket: Path, log: Path, number: int, fs: FileSystem) -> None:
    """Note durably that a log may hold records of a bucket, under this number."""
    with os_errors_as("write", bucket / FILE):
        fs.write_file(bucket / FILE, content(log, number))


def content(log: Path, number: int) -> bytes:
    """Return the content of a note that names this log, and the bucket's number in it."""
    return msgspec.json.encode(_Note(format=FORMAT, log=log.name, bucket=number)) + b"\n"


def clear(bucket: Path, fs: FileSystem) -> None:
    """Remove the note durably: the bucket's table holds everything."""
    path = bucket / FILE
    with os_errors_as("remove", path):
        if path.exists():
            fs.remove(path)
            fs.sync_folder(bucket)
