"""The owner's side of a hand-over: does what the notes of its bucket ask for, and answers them.

Everything here blocks and runs in the pool, without an event loop, so that an owner answers while
its program is busy. A note is handled by the owner of the bucket. If that owner dies or closes, the
next one finds the note; the number of the write in the table shows what was already adopted.

Where notes and answers are stored, and who may decide, is up to :class:`Notes`: folders and object
stores have a form each.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from persisting.bucket import bulk_import, handover_notes
from persisting.bucket.bucket import Bucket
from persisting.bucket.handover_notes import Answer, Note, Status, Wakeable
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.concurrency.loop_bridge import NoThread
from persisting.errors import BucketClosed, SchemaError, StorageError
from persisting.table.bulk_files import FilesRemoved, FilesUnfit

log = logging.getLogger("persisting")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds until a note that is decided and could not be adopted is tried again: doubled each
time."""


class Notes(Protocol):
    """The notes of a bucket that this process owns, and their answers. Blocking."""

    place: str
    """The bucket, for messages."""

    def names(self) -> list[str]:
        """Return the ids of the notes, oldest first."""

    def may_have_left_overs(self) -> bool:
        """Whether a hand-over of the topic may be under way, or may have been left behind."""

    def note_place(self, name: str) -> str:
        """Return where a note is, for messages."""

    def status(self, name: str) -> Status:
        """Return how far a hand-over is. One that is neither alive nor decided is void for good;
        one that is decided stays so."""

    def read(self, name: str) -> Note | None:
        """Return a note, None if it was withdrawn."""

    def read_answer(self, name: str) -> Answer | None:
        """Return the answer that stands for a note, None if this owner has to answer it."""

    def write_answer(self, name: str, answer: Answer) -> None:
        """Answer a note; an answer that files were adopted is durable when this returns."""

    def confirm_decision(self) -> None:
        """Make decisions durable if the process that hands over may not have done so yet."""

    def remove(self, name: str) -> None:
        """Remove a note, then its answer."""

    def clear(self) -> None:
        """Remove what finished hand-overs left behind."""

    def start(self, owner: Wakeable) -> None:
        """Wake an owner from now on when there may be notes for it."""

    def stop(self, owner: Wakeable) -> None:
        """Stop waking it."""


class Inbox:
    """The notes of a bucket that is open for writing. It does not keep the bucket alive."""

    def __init__(self, bucket: Bucket, notes: Notes) -> None:
        self._bucket = weakref.ref(bucket)
        self._notes = notes
        self._job = CoalescedTask(weak_callback(self, Inbox.work))
        self._working = threading.Lock()
        self._unanswered: dict[str, Answer] = {}
        """Answers to notes that were adopted, and could not be written."""
        self._reported: dict[str, str] = {}
        self._blocked: _Blocked | None = None
        """The oldest note that is decided and could not be adopted, as of the last check."""

    def complete(self) -> None:
        """Handle all notes in this thread; raise if one that is decided could not be adopted.

        For an owner that has just opened the bucket: until this returns it must not take puts.
        """
        bucket = self._bucket()
        assert bucket is not None
        with self._working:
            names = self._notes.names()
            self._handle_all(bucket, names)
            if names or self._notes.may_have_left_overs():
                self._clear()
        if self._blocked is not None:
            note = self._notes.note_place(self._blocked.name)
            raise StorageError(
                f"{self._notes.place} cannot be opened for writing: it must first store the rows "
                f"that were handed over with {note}, and that failed: {self._blocked.cause}. "
                "Fix the cause and open it again; to give up these rows instead, delete the note"
            )

    def start(self) -> None:
        """Handle notes from now on."""
        self._notes.start(self)
        self.wake()

    def stop(self) -> None:
        """Stop handling notes: the bucket is closed."""
        self._notes.stop(self)

    def wake(self, *, always: bool = False) -> None:
        """Handle the notes in the background if there are any, or ``always``."""
        if not self._job.pending and (always or self._may_have_notes()):
            with suppress(NoThread):  # the process ends; the next owner finds the notes
                self._job.trigger()

    def _may_have_notes(self) -> bool:
        try:
            return bool(self._notes.names())
        except StorageError:
            return True  # the check itself reports the error

    def work(self) -> None:
        """Handle all notes in this thread. Never raise: a bad note must not harm its bucket."""
        with self._working:
            bucket = self._bucket()
            if bucket is None:
                return
            try:
                self._handle_all(bucket, self._notes.names())
            except BucketClosed:
                return
            except StorageError as exc:
                self._report("", exc)
            self._clear()

    def _clear(self) -> None:
        """Remove what finished hand-overs left behind."""
        try:
            self._notes.clear()
        except (OSError, StorageError) as exc:
            self._report("", exc)

    def _handle_all(self, bucket: Bucket, names: list[str]) -> None:
        """Handle notes, oldest first.

        If one that is decided cannot be adopted, no later one is: an overwrite must not remove the
        rows of a newer write.
        """
        before, self._blocked = self._blocked, None
        for name in names:
            bucket.lifecycle.check_open()
            if before is not None and before.name == name and before.is_pausing:
                self._blocked = before
                continue
            try:
                self._handle(bucket, name)
            except BucketClosed:
                raise
            except Exception as exc:
                self._report(name, exc)
                if self._blocked is None and self._is_left(name):
                    self._blocked = _Blocked.after(before, name, str(exc) or type(exc).__name__)

    def _is_left(self, name: str) -> bool:
        """Whether a note may be decided, and is not adopted."""
        try:
            if not self._notes.status(name).decided:
                return False
            return not _is_final(self._notes.read_answer(name))
        except StorageError:
            return True

    def _report(self, name: str, exc: Exception) -> None:
        """Log an error once; the note is handled again."""
        if self._reported.get(name) != str(exc):
            self._reported[name] = str(exc)
            log.error("a hand-over to %s failed: %s", self._notes.place, exc)

    def _handle(self, bucket: Bucket, name: str) -> None:
        alive, decided = self._notes.status(name)
        try:
            note = self._notes.read(name)
        except StorageError as exc:
            if alive or decided:
                state = handover_notes.FAILING if decided else handover_notes.REFUSED
                self._answer(name, _error(state, exc))
                raise
            note = None  # it is void, whatever it asked for
            self._notes.remove(name)
        if note is None:
            return
        answer = self._notes.read_answer(name)
        if self._blocked is not None and note.kind == handover_notes.ADOPT:
            if answer is None:
                cause = f"an earlier write cannot be stored yet: {self._blocked.cause}"
                self._answer(name, Answer(state=handover_notes.FAILING, message=cause))
        elif decided:
            if not _is_final(answer):
                self._notes.confirm_decision()
                self._adopt(bucket, name, note)
            bucket.bypass.release_producer(note.writer)
            if not alive:
                self._notes.remove(name)
        elif not alive:
            bucket.maintenance.remove_files(note.files, never_named=True)
            self._notes.remove(name)
            bucket.bypass.release_producer(note.writer)
        elif answer is None or answer.state == handover_notes.FAILING:
            self._answer(name, _answered(lambda: self._serve(bucket, note)))

    def _serve(self, bucket: Bucket, note: Note) -> Answer:
        if note.kind == handover_notes.PING:
            return Answer(state=handover_notes.DONE)
        if note.kind == handover_notes.FLUSH:
            bucket.flusher.flush()
            return Answer(state=handover_notes.DONE)
        if note.kind == handover_notes.PREPARE:
            table = bulk_import.prepare(bucket, note.arrow_schema)
            return Answer(state=handover_notes.DONE, table=table)
        if note.kind == handover_notes.ADOPT:
            if note.rows != sum(fragment["physical_rows"] for fragment in note.fragments):
                raise FilesUnfit(f"the files do not have the {note.rows} rows of the request")
            bulk_import.check(bucket, note.fragments, note.columns)
            return Answer(state=handover_notes.READY)
        raise StorageError(f"the owner does not know requests of the kind {note.kind!r}")

    def _adopt(self, bucket: Bucket, name: str, note: Note) -> None:
        """Adopt the files of a note that is decided.

        An error is answered and raised, and the note is handled again, unless the files can never
        be adopted.
        """
        answer = self._unanswered.get(name)
        if answer is None:
            bucket.bypass.keep_producer(note.writer)
            try:
                rows = adopt(bucket, note)
                if not rows:  # an earlier attempt stored these rows, perhaps from other files
                    bucket.maintenance.remove_files(note.files)
                answer = Answer(state=handover_notes.DONE, rows=rows)
            except BucketClosed:
                raise
            except (FilesRemoved, FilesUnfit, SchemaError) as exc:
                self._report(name, exc)
                answer = _error(handover_notes.FAILED, exc)
            except Exception as exc:
                self._answer(name, _error(handover_notes.FAILING, exc))
                raise
            self._unanswered[name] = answer
        self._answer(name, answer)
        del self._unanswered[name]

    def _answer(self, name: str, answer: Answer) -> None:
        self._notes.write_answer(name, answer)


class _Blocked(NamedTuple):
    """A note that is decided and could not be adopted."""

    name: str
    cause: str
    pause: float
    until: float

    @classmethod
    def after(cls, before: _Blocked | None, name: str, cause: str) -> _Blocked:
        """Return the state after another failure; ``before`` is the one after the last check."""
        repeated = before is not None and before.name == name
        pause = min(2 * before.pause, _LONGEST_PAUSE) if before and repeated else _FIRST_PAUSE
        return cls(name, cause, pause, time.monotonic() + pause)

    @property
    def is_pausing(self) -> bool:
        return time.monotonic() < self.until


def _is_final(answer: Answer | None) -> bool:
    return answer is not None and answer.state in (handover_notes.DONE, handover_notes.FAILED)


def adopt(bucket: Bucket, note: Note) -> int:
    """Commit the files of a note; return how many rows are new."""
    return bulk_import.adopt(
        bucket,
        note.fragments,
        note.columns,
        note.writer,
        note.number,
        replace=note.replace,
        schema=note.arrow_schema,
    )


def _answered(serve: Callable[[], Answer]) -> Answer:
    """Return the answer, even if it is an error."""
    try:
        return serve()
    except BucketClosed:
        raise
    except Exception as exc:
        return _error(handover_notes.REFUSED, exc)


def _error(state: str, exc: Exception) -> Answer:
    return Answer(state=state, error=type(exc).__name__, message=str(exc))
