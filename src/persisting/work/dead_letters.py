"""Dead letters: the records that a group has given up, in the ordinary topic ``<topic>.dead``.

A dead letter is the record with one more field, :data:`FIELD`, which says where it came from and
why it failed. Letters are numbered and put in batches, and the journal holds the batch before it is
put: after a crash the same batch is put again, with the same numbers, and stored once.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

from persisting.concurrency.pool import in_thread
from persisting.errors import BucketLocked, OffsetOutOfRange, StorageError, TableError
from persisting.options import DURABLE
from persisting.topic.bucket_client import Topic
from persisting.topic.open_local import topic_spec
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.table_calls import MakeDurable
from persisting.topic.writer import QueueWriter
from persisting.work.group_place import LETTERS, GroupPlace, is_in_memory
from persisting.work.group_values import Position
from persisting.work.keeper import DyingRecord, Keeper
from persisting.work.near_reads import MOST_BYTES, read_near, rows_within

log = logging.getLogger("persisting")

SUFFIX = LETTERS
FIELD = "dead_letter"
BATCH = 256
_FIRST_BATCH = 8
"""The first batch shows how large the records are. A batch stays as it is once it is journaled."""

_BUCKET_BITS = 40
_SHORTEST_RETRY, _LONGEST_RETRY = 0.5, 30.0
_TURN_SECONDS = 60.0
"""How long to wait until other keepers have written their dead letters to an object store."""

OpenDeadLetters: TypeAlias = "Callable[[], Awaitable[Topic]]"
"""Opens the topic of the dead letters for writing, which is created if needed."""


async def letters_spec(place: GroupPlace) -> TopicSpec:
    """Return how to open the dead letters of a topic; they are created with every put synced."""
    name = place.config.topic + SUFFIX
    if await in_thread(place.load_letters) is not None:
        return TopicSpec(topic=name)
    wanted, _ = topic_spec(
        name,
        bucket_column=place.config.bucket_column,
        num_buckets=1,
        backend="persisting",
        backend_options={**DURABLE, **_lease_option(place.config)},
    )
    return wanted


def _lease_option(config: TopicConfig) -> dict[str, Any]:
    """Return the lease of a topic in an object store, if it is not the default."""
    return {"lease": config.options["lease"]} if "lease" in config.options else {}


def letter_place(bucket: int, offset: int) -> int:
    """Return where a dead letter is as one number."""
    return (bucket << _BUCKET_BITS) | offset


def bucket_and_offset(place: int) -> tuple[int, int]:
    return place >> _BUCKET_BITS, place & ((1 << _BUCKET_BITS) - 1)


class DeadLetterWriter:
    """Puts the dead letters of a group, one batch after the other, on one event loop."""

    def __init__(self, keeper: Keeper, topic: Topic, open_letters: OpenDeadLetters) -> None:
        self._keeper, self._topic, self._open_letters = keeper, topic, open_letters
        self._letters: Topic | None = None
        self._writer: QueueWriter | None = None
        self._closing: asyncio.Task[None] | None = None
        self._above = 0
        self._most = min(_FIRST_BATCH, BATCH)
        """How many dead letters the next batch may have."""
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        keeper.on_dying = self._notify

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the next keeper continues
            self._loop.call_soon_threadsafe(self._more.set)

    async def run(self) -> None:
        """Put the dead letters of records as they come, until the keeper ends."""
        pause = _SHORTEST_RETRY
        self._more.set()  # of the keeper before
        while self._keeper.failure is None:
            await self._more.wait()
            self._more.clear()
            try:
                while True:
                    if self._writer is None and self._keeper.state.dying:
                        await self._open()
                    batch = await self._keeper.next_batch(self._most, self._above)
                    if not batch:
                        break
                    await self._put(batch)
                    await self._keeper.letters_stored([record.position for record in batch])
                pause = _SHORTEST_RETRY
                if self._letters is not None and getattr(self._letters, "store", None) is not None:
                    await self.close()  # groups that other processes keep need it, too
            except Exception as exc:  # whatever it is, the records stay and their members are told
                if self._keeper.failure is not None:
                    return
                if not isinstance(exc, StorageError):
                    log.exception("dead letters of topic %r failed", self._topic.name)
                self._keeper.letters_failed(exc)
                log.warning(
                    "work group %r cannot write dead letters of topic %r: %s",
                    self._keeper.group,
                    self._topic.name,
                    exc,
                )
                await self.close()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY)
                self._more.set()

    async def _open(self) -> None:
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                self._letters = letters = await self._open_letters()
                break
            except BucketLocked:  # the keeper of another group writes its dead letters
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_SHORTEST_RETRY)
        if is_in_memory(letters):
            raise StorageError(f"topic {letters.name!r} is in memory and cannot hold dead letters")
        name = f"work-group-{self._keeper.state.settings.identity}"
        self._writer = QueueWriter(letters, writer_id=name)
        stored = [await letters.bucket(b).last_number(name) for b in range(letters.num_buckets)]
        self._above = max(stored)

    async def _put(self, batch: list[DyingRecord]) -> None:
        """Make the dead letters of a batch durable."""
        assert self._writer is not None
        records = await self._read_near(batch)
        letters = [await self._letter(record, records.get(record.position)) for record in batch]
        self._most = min(rows_within(MOST_BYTES, letters), BATCH)
        number = batch[-1].number
        await self._writer.put_batch(letters, sequence=number)
        for bucket in sorted({self._writer.bucket_of(letter) for letter in letters}):
            await self._make_durable(bucket, number)

    async def _read_near(self, batch: list[DyingRecord]) -> dict[Position, dict[str, Any]]:
        """Return the records of a batch that can be read with their neighbours."""
        offsets: dict[int, list[int]] = {}
        for bucket, offset in (dying.position for dying in batch):
            offsets.setdefault(bucket, []).append(offset)
        return {
            (bucket, offset): record
            for bucket, wanted in offsets.items()
            for offset, record in (await read_near(self._topic.bucket(bucket), wanted)).items()
        }

    async def _make_durable(self, bucket: int, number: int) -> None:
        """Sync what was put to a bucket: it may have no log, or one with rare syncs, as its present
        owner opened it. Raise if an owner without a log died before the dead letter was durable."""
        assert self._letters is not None
        assert self._writer is not None
        client = self._letters.bucket(bucket)
        stats = await client.stats()
        if stats.get("wal_enabled"):
            await client.call(MakeDurable(int(stats["end_offset"])))
        else:
            await client.flush()
        if await client.last_number(self._writer.writer_id) < number:
            raise StorageError(
                f"the owner of topic {self._letters.name!r} died before the dead letter was durable"
            )

    async def _letter(self, dying: DyingRecord, read: dict[str, Any] | None) -> dict[str, Any]:
        """Return a dead letter; ``read`` is its record if that was already read.

        If the record is damaged, or retention has removed it, only its origin is left.
        """
        record, earlier = await self._record(dying, read)
        bucket, offset = dying.position
        line = f"{_utc(dying.time):%Y-%m-%d %H:%M:%S} {dying.attempts} deliveries: {dying.reason}"
        assert self._letters is not None
        column = self._letters.bucket_column  # without it a record has no bucket
        return {
            **({} if column in record else {column: None}),
            **record,
            FIELD: {
                "number": dying.number,
                "topic": self._topic.name,
                "bucket": bucket,
                "offset": offset,
                "group": self._keeper.group,
                "group_id": self._keeper.state.settings.identity,
                "generation": dying.generation,
                "reason": dying.reason,
                "attempts": dying.attempts,
                "time": _utc(dying.time),
                "first_delivery": _utc(dying.first),
                "last_delivery": _utc(dying.last),
                "history": f"{earlier}\n{line}" if earlier else line,
            },
        }

    async def _record(
        self, dying: DyingRecord, read: dict[str, Any] | None
    ) -> tuple[dict[str, Any], str]:
        """Return a record and the history of its earlier dead letter.

        Raises if the record should exist and cannot be read: it must not be lost.
        """
        earlier: dict[str, Any] | None = None
        if dying.letter >= 0:
            earlier = await self._earlier_letter(dying)
        history = earlier[FIELD]["history"] if earlier else ""
        if read is not None:
            return read, history
        bucket, offset = dying.position
        try:
            page = await self._topic.bucket(bucket).read(offset, 1)
            removed = page.first > offset  # a read from 0 returns the earliest record
        except OffsetOutOfRange:
            removed = True
        except TableError as exc:  # it must not hold back the dead letters of others
            log.warning(
                "the dead letter of offset %d of bucket %d lacks its record: %s",
                offset,
                bucket,
                exc,
            )
            removed = True
        if removed:
            record = earlier or {}
            return {name: value for name, value in record.items() if name != FIELD}, history
        if not page.rows:
            raise StorageError(f"offset {offset} of bucket {bucket} cannot be read yet")
        return page.rows[0], history

    async def _earlier_letter(self, dying: DyingRecord) -> dict[str, Any] | None:
        """Return the dead letter that a record was re-driven from, None if it no longer exists
        or is damaged: that must not hold back the dead letters of others."""
        assert self._letters is not None
        try:
            return await read_letter(
                self._letters, dying.letter, self._keeper.group, dying.position
            )
        except TableError as exc:
            log.warning("an earlier dead letter of topic %r is damaged: %s", self._topic.name, exc)
            return None

    async def close(self) -> None:
        """Release the topic of the dead letters.

        Nothing is left to flush: every batch was synced, and one under way will be put again. A
        flush could wait for a bucket without an owner, which this node may open only after the
        group has left it.
        """
        letters, self._letters, self._writer = self._letters, None, None
        if letters is not None:
            self._closing = asyncio.create_task(self._close(letters))
        if self._closing is not None:  # even if its caller was cancelled
            await asyncio.shield(self._closing)

    async def _close(self, letters: Topic) -> None:
        try:
            await letters.close()
        except StorageError as exc:
            log.warning("cannot close the dead letters of topic %r: %s", self._topic.name, exc)


async def read_letter(
    letters: Topic, place: int, group: str, position: Position
) -> dict[str, Any] | None:
    """Return the dead letter of a record, None if it is no longer at ``place``: retention has
    removed it, or the topic was deleted and created again."""
    bucket, offset = bucket_and_offset(place)
    if bucket >= letters.num_buckets:
        return None
    client = letters.bucket(bucket)
    try:
        page = await client.read(offset, 1)
        if not page.rows and getattr(client, "may_be_behind", False):
            await client.call(MakeDurable(offset + 1))
            page = await client.read(offset, 1)
    except OffsetOutOfRange:
        return None
    if not page.rows or page.first != offset:
        return None
    record: dict[str, Any] = page.rows[0]
    return record if _is_letter_of(record, group, position) else None


async def read_letters(
    letters: Topic, places: dict[int, Position], group: str
) -> dict[Position, dict[str, Any]]:
    """Return the dead letters of many records by their positions; ``places`` says where they are.

    Those that cannot be read together are left out: :func:`read_letter` shows why.
    """
    offsets: dict[int, list[int]] = {}
    for place in places:
        bucket, offset = bucket_and_offset(place)
        if bucket < letters.num_buckets:
            offsets.setdefault(bucket, []).append(offset)
    found = {}
    for bucket, wanted in offsets.items():
        for offset, record in (await read_near(letters.bucket(bucket), wanted)).items():
            position = places[letter_place(bucket, offset)]
            if _is_letter_of(record, group, position):
                found[position] = record
    return found


def _is_letter_of(record: dict[str, Any], group: str, position: Position) -> bool:
    """Whether a record is the dead letter of another one: anything may be put into its topic."""
    letter = record.get(FIELD)
    if not isinstance(letter, dict) or not isinstance(letter.get("history"), str):
        return False
    origin = letter.get("group"), letter.get("bucket"), letter.get("offset")
    return origin == (group, *position)


def _utc(time: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(time / 1e6, dt.timezone.utc)
