"""The files of a hand-over: how another process asks the owner of a bucket to change its table.

    <topic>/handover/<id>.lock      locked by the process that hands over, until it ends
    <topic>/handover/<id>.sent      the notes are complete; owners look for them
    <topic>/handover/<id>.decided   the files of all notes belong to the topic from now on
    <bucket>/handover/<id>.note     what the owner of the bucket is asked for
    <bucket>/handover/<id>.answer   what the owner has done

Files are adopted in two steps, so that all buckets get them or none. Owners first check their notes
and answer that they are ready. The process that hands over then writes ``decided``, durably and in
one step. Before that point nothing is adopted, and nothing is if the process gives up or dies.
After it the notes are adopted, whichever process dies: by the owner, its successor, or the process
itself. Only the holder of the lock may decide; so a note without a decision whose lock is free is
void.

This is the form of a topic in a folder; :mod:`~persisting.bucket.store_notes` is that of an object
store. Notes, answers and the steps are the same.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow as pa

from persisting import json_files
from persisting.errors import StorageError
from persisting.fs import DRAFT, FileSystem, os_errors_as
from persisting.lock import LockedFile, is_locked, this_process

FOLDER = "handover"
FORMAT = 1

PING = "ping"
"""Kind of a note: answer."""
FLUSH = "flush"
"""Kind of a note: write everything acknowledged to the table."""
PREPARE = "prepare"
"""Kind of a note: bring the table to a schema, and return what writers of files need to know."""
ADOPT = "adopt"
"""Kind of a note: commit files as the next rows."""

READY = "ready"
"""State of an answer: the note can be adopted, and waits for the decision."""
DONE = "done"
REFUSED = "refused"
"""State of an answer: the request cannot be met; nothing was changed."""
FAILING = "failing"
"""State of an answer: an adoption has failed, or waits for one that has, and is tried again."""
FAILED = "failed"
"""State of an answer: an adoption that was decided is no longer possible."""

LEFT_SECONDS = 7 * 24 * 3600.0
"""Files to which nothing refers are removed at this age. A job writes its first file long before
its notes name it."""

_T = TypeVar("_T")
_LOCK, _SENT, _DECIDED, _NOTE, _ANSWER = ".lock", ".sent", ".decided", ".note", ".answer"


class Wakeable(Protocol):
    """An owner that notes may be addressed to."""

    def wake(self, *, always: bool = False) -> None:
        """Handle the notes in the background if there are any, or ``always``. Must be quick."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the owner of one bucket."""

    kind: str
    format: int = FORMAT
    writer: str = ""
    number: int = 0
    """Writer and number identify the write: a bucket stores each pair once."""
    replace: bool = False
    rows: int = 0
    fragments: list[dict[str, Any]] = []
    columns: list[dict[str, Any]] = []
    """The columns of the table for which the files were written."""
    schema: str = ""

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of the records."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    @property
    def files(self) -> set[str]:
        """The names of the data files."""
        return {file["path"] for fragment in self.fragments for file in fragment["files"]}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an owner."""

    state: str
    rows: int = 0
    """How many rows are new."""
    table: dict[str, Any] | None = None
    error: str = ""
    message: str = ""


class Status(NamedTuple):
    """How far a hand-over is."""

    alive: bool
    """Whether the process that hands over may live, and decide if it has not yet."""
    decided: bool


def encoded_schema(schema: pa.Schema) -> str:
    """Return a schema as text, for :attr:`Note.schema`."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


# The process that hands over


def hold_lock(topic: Path, fs: FileSystem) -> tuple[str, LockedFile]:
    """Return a new id, and its lock, which is held."""
    folder = topic / FOLDER
    with os_errors_as("create a hand-over in", folder):
        fs.make_folder(folder)
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        # Locked before it has its name: a lock that is free means that its holder is dead.
        draft = folder / f"{name}{_LOCK}.{secrets.token_hex(8)}{DRAFT}"
        lock = LockedFile(draft)
        try:
            lock.lock()
            lock.write_note(this_process())
            fs.rename(draft, folder / f"{name}{_LOCK}")
        except BaseException:
            lock.free()
            draft.unlink(missing_ok=True)
            raise
    return name, lock


def write_note(bucket: Path, name: str, note: Note, fs: FileSystem) -> None:
    """Write a note; one that hands over files is durable when this returns."""
    path = _path(bucket, name, _NOTE)
    with os_errors_as("write", path):
        fs.make_folder(path.parent)
        write = fs.write_file if note.kind == ADOPT else fs.write_note
        write(path, _sealed(msgspec.json.encode(note)))
        if note.kind == ADOPT:  # the process that made the folder may have died before it synced it
            fs.sync_folder(bucket)


def announce(topic: Path, name: str, fs: FileSystem) -> None:
    """Wake the owners: the notes are complete."""
    path = _path(topic, name, _SENT)
    with os_errors_as("write", path):
        fs.write_note(path, b"")


def decide(topic: Path, name: str, fs: FileSystem) -> None:
    """Make the files of all notes part of the topic. Call with the lock held."""
    path = _path(topic, name, _DECIDED)
    with os_errors_as("write", path):
        fs.write_file(path, b"")


def forget(topic: Path, name: str, fs: FileSystem) -> None:
    """Remove the files of a hand-over that no bucket has a note of."""
    for suffix in (_DECIDED, _SENT, _LOCK):
        fs.remove(_path(topic, name, suffix))


# Both sides


def remove_note(bucket: Path, name: str, fs: FileSystem) -> None:
    """Remove a note and its answer, durably.

    The answer goes last: a note that power loss brings back must not seem unanswered.
    """
    folder = bucket / FOLDER
    if folder.is_dir():
        fs.remove(_path(bucket, name, _NOTE))
        fs.sync_folder(folder)
        fs.remove(_path(bucket, name, _ANSWER))


def read_answer(bucket: Path, name: str, fs: FileSystem) -> Answer | None:
    """Return the answer to a note, None if there is none yet, or if power loss has torn it."""
    path = _path(bucket, name, _ANSWER)
    data = _read(path, fs)
    return _decoded(data, path, Answer) if data is not None and _is_sealed(data) else None


def note_path(bucket: Path, name: str) -> Path:
    return _path(bucket, name, _NOTE)


def has_note(bucket: Path, name: str) -> bool:
    return _exists(_path(bucket, name, _NOTE))


def is_decided(topic: Path, name: str) -> bool:
    """Whether the files of a hand-over belong to the topic; raise if that cannot be seen."""
    return _exists(_path(topic, name, _DECIDED))


def sync_decision(topic: Path, fs: FileSystem) -> None:
    """Make decisions durable if the process that hands over may not have synced them yet."""
    with os_errors_as("sync", topic / FOLDER):
        fs.sync_folder(topic / FOLDER)
        fs.sync_folder(topic)


def is_alive(topic: Path, name: str) -> bool:
    """Whether the process that hands over is alive; if not, read the decision after this call."""
    return is_locked(_path(topic, name, _LOCK))


def handed_files(bucket: Path, fs: FileSystem) -> set[str]:
    """Return the data files that pending notes of a bucket name."""
    names: set[str] = set()
    for name in note_names(bucket, fs):
        note = read_note(bucket, name, fs)
        names |= set() if note is None else note.files
    return names


def writers(bucket: Path, fs: FileSystem) -> set[str]:
    """Return the writers that the notes of a bucket name; damaged notes are left out."""
    found = set()
    for name in note_names(bucket, fs):
        with suppress(StorageError):  # the inbox reports it
            note = read_note(bucket, name, fs)
            if note is not None and note.kind == ADOPT:
                found.add(note.writer)
    return found


# The owner


def note_names(bucket: Path, fs: FileSystem) -> list[str]:
    """Return the ids of the notes of a bucket, oldest first."""
    return _names(bucket / FOLDER, _NOTE, fs)


def read_note(bucket: Path, name: str, fs: FileSystem) -> Note | None:
    """Return a note, None if it was withdrawn."""
    path = _path(bucket, name, _NOTE)
    data = _read(path, fs)
    return None if data is None else _decoded(data, path, Note)


def write_answer(bucket: Path, name: str, answer: Answer, fs: FileSystem) -> None:
    """Answer a note; an answer that files were adopted is durable when this returns."""
    path = _path(bucket, name, _ANSWER)
    with os_errors_as("write", path):
        write = fs.write_file if answer.state == DONE else fs.write_note
        write(path, _sealed(msgspec.json.encode(answer)))


def has_any(topic: Path) -> bool:
    """Whether a hand-over of the topic may be under way, or may have been left behind."""
    try:
        return bool(os.listdir(topic / FOLDER))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def clear_finished(topic: Path, fs: FileSystem) -> None:
    """Remove the files of dead processes' hand-overs that no bucket has a note of."""
    folder = topic / FOLDER
    entries = _entries(folder, fs)
    suffixes = _DECIDED, _SENT, _LOCK
    names = {entry.removesuffix(s) for s in suffixes for entry in entries if entry.endswith(s)}
    for name in sorted(names):
        if not is_alive(topic, name) and not _has_note_somewhere(topic, name, fs):
            forget(topic, name, fs)
    _remove_old_drafts(folder, fs)


def clear_answers(bucket: Path, fs: FileSystem) -> None:
    """Remove answers to notes that were withdrawn."""
    notes = set(note_names(bucket, fs))
    left = [name for name in _names(bucket / FOLDER, _ANSWER, fs) if name not in notes]
    if left:  # as in remove_note(), which another process may not have ended yet
        fs.sync_folder(bucket / FOLDER)
    for name in left:
        fs.remove(_path(bucket, name, _ANSWER))
    _remove_old_drafts(bucket / FOLDER, fs)


def _has_note_somewhere(topic: Path, name: str, fs: FileSystem) -> bool:
    buckets = [entry for entry in _entries(topic, fs) if entry.startswith("bucket_")]
    return any(has_note(topic / bucket, name) for bucket in buckets)


def _remove_old_drafts(folder: Path, fs: FileSystem) -> None:
    for entry in _entries(folder, fs):
        if entry.endswith(DRAFT):
            with suppress(FileNotFoundError):
                if time.time() - (folder / entry).stat().st_mtime > LEFT_SECONDS:
                    fs.remove(folder / entry)


def _names(folder: Path, suffix: str, fs: FileSystem) -> list[str]:
    entries = _entries(folder, fs)
    return sorted(entry.removesuffix(suffix) for entry in entries if entry.endswith(suffix))


def _entries(folder: Path, fs: FileSystem) -> list[str]:
    """Return the entries of a folder, none if it does not exist.

    Any other error raises: a folder that cannot be read may hold notes that are decided.
    """
    with os_errors_as("list", folder):
        try:
            return fs.list(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []


def _exists(path: Path) -> bool:
    """Whether a file exists; raise if that cannot be seen. ``Path.exists`` says no then."""
    with os_errors_as("look for", path):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _path(folder: Path, name: str, suffix: str) -> Path:
    return folder / FOLDER / f"{name}{suffix}"


def _read(path: Path, fs: FileSystem) -> bytes | None:
    try:
        return fs.read(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc


def _sealed(data: bytes) -> bytes:
    return data + f"\n{zlib.crc32(data):08x}".encode()


def _is_sealed(data: bytes) -> bool:
    body, _, seal = data.rpartition(b"\n")
    return seal == f"{zlib.crc32(body):08x}".encode()


def _decoded(data: bytes, path: Path, kind: type[_T]) -> _T:
    body = data.rpartition(b"\n")[0]
    if not _is_sealed(data):
        raise StorageError(f"{path} is damaged: its checksum does not match")
    json_files.check_format(body, path, FORMAT)
    try:
        return json_files.decode(body, kind)
    except msgspec.DecodeError as exc:
        raise StorageError(f"{path} cannot be read: {exc}") from exc
