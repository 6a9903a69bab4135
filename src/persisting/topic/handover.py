"""Hands files over to the owners of a topic's buckets, and asks them to flush. Blocking.

This process sends notes, waits for the answers, and owns a bucket itself where nobody else does, or
where its owner has died. Notes and answers are stored by an :class:`Exchange`: in the folder of the
topic (:class:`FolderExchange`), or in its object store (:mod:`~persisting.topic.store_handover`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from persisting import errors
from persisting import fs as filesystem
from persisting.bucket import handover_notes
from persisting.bucket.handover_notes import Answer, Note
from persisting.errors import BucketLocked, StorageError
from persisting.lock import described, owner_of
from persisting.store.object_store import ObjectStore
from persisting.topic.ownership import owned
from persisting.topic.spec import TopicConfig, bucket_folder

log = logging.getLogger("persisting")

OWNER_SECONDS = 60.0
"""How long to wait for an owner that does not answer."""

Place = Path | ObjectStore
"""The folder of a topic, or its object store."""

_LONGEST_STEP = 1.0
"""A longer pause between two polls counts as this many seconds: if this process was stopped,
perhaps with the whole machine, the owners had no time to answer either."""

_REPORT_SECONDS = 5.0
"""Seconds between two messages that say what is waited for."""


def live_owner(folder: Path, bucket: int) -> dict[str, Any] | None:
    """Return the note of the process that has a bucket open for writing; None if nobody has, or
    only briefly."""
    owner = owner_of(bucket_folder(folder, bucket))
    return None if owner is None or owner.get("passing") else owner


def is_owned(place: Place, buckets: Iterable[int]) -> bool:
    """Whether a process has one of these buckets open for writing, or died while it had."""
    return bool(_owned(place, buckets))


def _owned(place: Place, buckets: Iterable[int]) -> list[int]:
    if isinstance(place, ObjectStore):
        from persisting.topic import store_handover

        return store_handover.owned_buckets(place, buckets)
    return [bucket for bucket in buckets if live_owner(place, bucket) is not None]


def flush(place: Place, config: TopicConfig, seconds: float = OWNER_SECONDS) -> None:
    """Have the owners write everything acknowledged to the tables.

    Where nobody owns a bucket, nothing is buffered.
    """
    _ask_owners(place, config, seconds, Note(kind=handover_notes.FLUSH), "flush")


def ping(place: Place, config: TopicConfig, seconds: float = OWNER_SECONDS) -> None:
    """Raise if an owner of the topic does not answer."""
    _ask_owners(place, config, seconds, Note(kind=handover_notes.PING), "answer")


def _ask_owners(place: Place, config: TopicConfig, seconds: float, note: Note, action: str) -> None:
    if owned_buckets := _owned(place, range(config.num_buckets)):
        with _hand_over(place, config, seconds) as handover:
            handover.ask(dict.fromkeys(owned_buckets, note), action)


def prepare(
    place: Place,
    config: TopicConfig,
    schema: pa.Schema,
    seconds: float = OWNER_SECONDS,
    buckets: Iterable[int] | None = None,
) -> dict[int, dict[str, Any]]:
    """Bring tables to a schema, by default all; return by bucket what writers of files need to
    know."""
    encoded = handover_notes.encoded_schema(schema)
    note = Note(kind=handover_notes.PREPARE, schema=encoded)
    numbers = range(config.num_buckets) if buckets is None else buckets
    with _hand_over(place, config, seconds) as handover:
        answers = handover.ask(dict.fromkeys(numbers, note), "prepare the table")
    return {bucket: answer.table or {} for bucket, answer in answers.items()}


def adopt(
    place: Place, config: TopicConfig, notes: Mapping[int, Note], seconds: float = OWNER_SECONDS
) -> dict[int, int]:
    """Have all buckets adopt the files of their notes, or none; return how many rows are new."""
    with _hand_over(place, config, seconds) as handover:
        return handover.adopt(notes)


class Exchange(Protocol):
    """Where the notes and answers of one hand-over are, and who owns the buckets."""

    shortest: float
    longest: float
    """Seconds between two polls for answers: doubled while there are none."""
    probe_seconds: float
    """Seconds between two checks whether the owners are alive."""

    def send(self, notes: Mapping[int, Note]) -> None:
        """Write the notes, and wake the owners."""

    def answer(self, bucket: int) -> Answer | None:
        """Return an answer that counts, None if there is none yet; raise if the hand-over is over
        without this process."""

    def decide(self) -> None:
        """Make the files part of the topic: from now on all buckets get them, even after kills."""

    def is_decided(self) -> bool:
        """Whether the files belong to the topic."""

    def may_be_decided(self) -> bool:
        """Whether the files may be part of the topic, now or later; otherwise they never will."""

    def remove(self, buckets: Iterable[int]) -> None:
        """Remove notes and answers."""

    def live_owner(self, bucket: int) -> dict[str, Any] | None:
        """Describe the process that has a bucket open for writing, None if nobody has."""

    def own_if_free(self, bucket: int) -> None:
        """Handle the note in this process if nobody owns the bucket; else see that its owner knows
        of it. Raises :class:`BucketLocked` if another process is faster."""

    def place(self, bucket: int) -> str:
        """Return where a bucket is, for messages."""

    def close(self, *, finished: bool) -> None:
        """End. If it is finished, no note is left, and all else is removed."""


@contextmanager
def _hand_over(place: Place, config: TopicConfig, seconds: float) -> Iterator[_HandOver]:
    exchange: Exchange
    if isinstance(place, ObjectStore):
        from persisting.topic.store_handover import StoreExchange

        exchange = StoreExchange(place, config)
    else:
        exchange = FolderExchange(place, config)
    handover = _HandOver(exchange, config, seconds)
    try:
        yield handover
    finally:
        exchange.close(finished=not handover.unfinished)


@contextmanager
def _logged_errors() -> Iterator[None]:
    """Removing notes that all owners have answered may fail: what they asked for is done, and the
    next owner removes them."""
    try:
        yield
    except (OSError, StorageError) as exc:
        log.warning("cannot remove the notes of a finished hand-over: %s", exc)


class FolderExchange:
    """A hand-over in the folder of a topic: see :mod:`~persisting.bucket.handover_notes`."""

    shortest, longest = 0.002, 0.05
    probe_seconds = 0.25

    def __init__(self, folder: Path, config: TopicConfig) -> None:
        self._folder, self._config = folder, config
        self._fs = filesystem.current()
        self.name, self._lock = handover_notes.hold_lock(folder, self._fs)

    def send(self, notes: Mapping[int, Note]) -> None:
        for bucket, note in notes.items():
            handover_notes.write_note(self._bucket(bucket), self.name, note, self._fs)
        handover_notes.announce(self._folder, self.name, self._fs)

    def answer(self, bucket: int) -> Answer | None:
        place = self._bucket(bucket)
        answer = handover_notes.read_answer(place, self.name, self._fs)
        if answer is None and not handover_notes.has_note(place, self.name):
            raise StorageError(
                f"what was handed over to {place} no longer exists: the topic was deleted or "
                "restored from a backup; run the write again"
            )
        return answer

    def decide(self) -> None:
        decide(self._folder, self.name)

    def is_decided(self) -> bool:
        return handover_notes.is_decided(self._folder, self.name)

    def may_be_decided(self) -> bool:
        try:
            return self.is_decided()
        except StorageError:
            return True

    def remove(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            handover_notes.remove_note(self._bucket(bucket), self.name, self._fs)

    def live_owner(self, bucket: int) -> dict[str, Any] | None:
        return live_owner(self._folder, bucket)

    def own_if_free(self, bucket: int) -> None:
        if live_owner(self._folder, bucket) is None:
            with owned(self._folder, self._config, bucket):
                pass

    def place(self, bucket: int) -> str:
        return str(self._bucket(bucket))

    def close(self, *, finished: bool) -> None:
        try:
            if finished:
                with _logged_errors():
                    handover_notes.forget(self._folder, self.name, self._fs)
        finally:
            self._lock.free()

    def _bucket(self, bucket: int) -> Path:
        return bucket_folder(self._folder, bucket)


class _HandOver:
    """One exchange of notes and answers with the owners of a topic."""

    def __init__(self, exchange: Exchange, config: TopicConfig, seconds: float) -> None:
        self._exchange, self._config, self._seconds = exchange, config, seconds
        self.unfinished = False
        """Whether files are decided to be adopted and some bucket has not answered that it did."""
        self._problems: dict[int, str] = {}
        """Why this process could not adopt the files of a bucket that nobody owns."""

    def ask(self, notes: Mapping[int, Note], action: str) -> dict[int, Answer]:
        """Send requests that need no decision; return the answers, or raise."""
        try:
            self._send(notes)
            answers = self._wait(notes, (handover_notes.DONE, handover_notes.REFUSED), action)
            _raise_refused(answers)
        finally:
            self._remove(notes)
        return answers

    def adopt(self, notes: Mapping[int, Note]) -> dict[int, int]:
        try:
            self._send(notes)
            self._wait_until_ready(notes)
            self.unfinished = True  # even if this thread is interrupted from here on
            self._exchange.decide()
        except BaseException as exc:
            self.unfinished = self._exchange.may_be_decided()
            if not self.unfinished:
                self._remove(notes)
            if not self.unfinished or not isinstance(exc, Exception):
                raise
        self.unfinished = True
        final = handover_notes.DONE, handover_notes.FAILED
        answers = self._wait(notes, final, "store the rows")
        self.unfinished = False
        with _logged_errors():
            self._remove(notes)
        self._raise_failed(answers)
        return {bucket: answer.rows for bucket, answer in answers.items()}

    def _wait_until_ready(self, notes: Mapping[int, Note]) -> None:
        """Wait until every note is checked: by the owner of its bucket, or by this process if
        nobody owns it."""
        states = handover_notes.READY, handover_notes.REFUSED
        answers = self._wait(notes, states, "check the files")
        _raise_refused(answers, "; nothing was stored, run the write again")

    def _send(self, notes: Mapping[int, Note]) -> None:
        self._exchange.send(notes)

    def _remove(self, buckets: Iterable[int]) -> None:
        self._exchange.remove(buckets)

    def _wait(
        self,
        buckets: Iterable[int],
        states: tuple[str, ...],
        action: str,
    ) -> dict[int, Answer]:
        """Wait for answers in one of these states; every answer extends the time to wait."""
        pending = list(buckets)
        answers: dict[int, Answer] = {}
        exchange = self._exchange
        pause, last = exchange.shortest, time.monotonic()
        waited = reported = 0.0
        probed = last - exchange.probe_seconds
        while True:
            for bucket in list(pending):
                answer = exchange.answer(bucket)
                if answer is not None and answer.state in states:
                    answers[bucket] = answer
                    pending.remove(bucket)
                    waited = reported = 0.0
                    pause = exchange.shortest
            if not pending:
                return answers
            now = time.monotonic()
            waited, last = waited + min(now - last, _LONGEST_STEP), now
            if waited > self._seconds:
                give_up = self._not_finished if self.unfinished else self._nothing_done
                raise give_up(answers, pending[0], action)
            if now - probed >= exchange.probe_seconds:
                for bucket in pending:
                    self._own_if_free(bucket)
                probed = time.monotonic()
                pause = exchange.shortest
            elif waited - reported >= _REPORT_SECONDS:
                reported = waited
                log.warning(
                    "waiting for %s to %s (bucket %d of topic %r; %d of %d buckets have answered)",
                    self._owner(pending[0]),
                    action,
                    pending[0],
                    self._config.topic,
                    len(answers),
                    len(answers) + len(pending),
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, exchange.longest)

    def _own_if_free(self, bucket: int) -> None:
        """Handle the note in this process if nobody owns the bucket.

        Once the files belong to the topic, a failure is tried again until the time is up.
        """
        try:
            self._exchange.own_if_free(bucket)
        except BucketLocked:
            pass  # its new owner finds the note
        except StorageError as exc:
            if not self.unfinished:
                raise
            self._problems[bucket] = str(exc)

    def _owner(self, bucket: int) -> str:
        owner = self._exchange.live_owner(bucket)
        return "its owner" if owner is None else described(owner)

    def _reason(self, bucket: int) -> str:
        """Return why a bucket is not done, as far as that is known."""
        last = self._exchange.answer(bucket)
        message = last.message if last is not None and last.message else self._problems.get(bucket)
        return f" ({message})" if message else ""

    def _nothing_done(self, answers: dict[int, Answer], bucket: int, action: str) -> StorageError:
        place = self._exchange.place(bucket)
        return BucketLocked(
            f"bucket {place} is open for writing by {self._owner(bucket)}, which did not {action} "
            f"within {self._seconds:g} s{self._reason(bucket)}; nothing was changed",
            owner=self._exchange.live_owner(bucket),
            hint="see whether that process is stopped or overloaded, or has an older version of "
            "persisting, which does not answer; the option ownerTimeout sets how many seconds to "
            "wait",
        )

    def _not_finished(self, answers: dict[int, Answer], bucket: int, action: str) -> StorageError:
        return StorageError(
            f"the rows belong to topic {self._config.topic!r}, but {self._owner(bucket)} did not "
            f"store those of bucket {bucket} within {self._seconds:g} s{self._reason(bucket)}; "
            f"{len(answers)} buckets have theirs. The files are kept, and the owner or the next "
            "one stores them: do not write the rows again, except with the same writeId"
        )

    def _raise_failed(self, answers: Mapping[int, Answer]) -> None:
        """Raise if a bucket can never store its rows."""
        failed = {b: a for b, a in answers.items() if a.state == handover_notes.FAILED}
        for bucket, answer in failed.items():
            raise _kind(answer)(
                f"bucket {bucket} of topic {self._config.topic!r} cannot store its rows "
                f"({answer.message}), and {len(answers) - len(failed)} of {len(answers)} buckets "
                "have stored theirs: repeat the write only with the same writeId, which stores "
                "what is missing"
            )


def decide(folder: Path, name: str) -> None:
    """Make the files part of the topic: from here on every bucket gets them, even after kills."""
    handover_notes.decide(folder, name, filesystem.current())


def _raise_refused(answers: Mapping[int, Answer], hint: str = "") -> None:
    for answer in answers.values():
        if answer.state == handover_notes.REFUSED:
            raise _kind(answer)(f"{answer.message}{hint}")


def _kind(answer: Answer) -> type[StorageError]:
    """Return the class of the error that an owner has answered."""
    kind = getattr(errors, answer.error, StorageError)
    return kind if isinstance(kind, type) and issubclass(kind, StorageError) else StorageError
