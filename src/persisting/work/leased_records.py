"""Reads the records of leases: from the topic, or re-driven ones from their dead letters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from persisting.errors import NoSuchTopic, StorageError, TableError
from persisting.topic.bucket_client import BucketClient, Topic
from persisting.work.dead_letters import FIELD, read_letter, read_letters
from persisting.work.group_values import Position, RecordLease
from persisting.work.record_cache import RecordCache, Rows, read_rows

OpenLetters: TypeAlias = Callable[[], Awaitable[Topic]]
"""Opens the topic of the dead letters for reading."""

_Records = list[tuple[tuple[int, int], dict[str, Any]]]
"""Records with their buckets and offsets."""

log = logging.getLogger("persisting")


class LeasedRecord(NamedTuple):
    """A lease with its record."""

    lease: RecordLease
    record: dict[str, Any]
    expires: float
    """When the lease ends, by the monotonic clock of this process."""
    history: str = ""
    """A line for every time that the record went to the dead letters."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lease[:3]


class LeasedRecords:
    """Reads records for the readers of one group on one event loop."""

    def __init__(self, topic: Topic, group: str, open_letters: OpenLetters) -> None:
        self.topic, self._group, self._open_letters = topic, group, open_letters
        self._letters: Topic | None = None
        self._opening = asyncio.Lock()
        self._cache = RecordCache()
        self._unreadable: set[int] = set()
        """Buckets whose last read has failed."""

    async def dead_letters(self) -> Topic:
        """Return the topic of the dead letters."""
        async with self._opening:
            if self._letters is None:
                self._letters = await self._open_letters()
            return self._letters

    async def read(
        self, leases: list[RecordLease], expires: float, damage: list[TableError]
    ) -> list[LeasedRecord]:
        """Return the records that can be read now, and note the errors of those that are damaged.

        Raises if no bucket can be read.
        """
        records: dict[tuple[int, int], dict[str, Any]] = {}
        for rows in await self._read_runs(list(_runs(leases)), damage):
            records.update(rows)
        leased = []
        letters = await self._letters_of(leases)
        for lease in leases:
            record = records.get((lease.bucket, lease.offset))
            history = ""
            if lease.letter >= 0:
                letter = letters.get((lease.bucket, lease.offset)) or await self._letter_of(lease)
                if letter is not None:
                    history = letter[FIELD]["history"]
                    if record is None:
                        record = {n: value for n, value in letter.items() if n != FIELD}
            if record is not None:
                leased.append(LeasedRecord(lease, record, expires, history))
        return leased

    async def _letters_of(self, leases: list[RecordLease]) -> dict[Position, dict[str, Any]]:
        """Return those of the dead letters of re-driven records that can be read together."""
        places = {lease.letter: (lease.bucket, lease.offset) for lease in leases}
        places.pop(-1, None)
        if not places:
            return {}
        try:
            return await read_letters(await self.dead_letters(), places, self._group)
        except StorageError:  # _letter_of() tells why
            return {}

    async def _letter_of(self, lease: RecordLease) -> dict[str, Any] | None:
        """Return the dead letter that a record was re-driven from, None if it was removed.

        A letter that cannot be read must not hold back the record, nor those of other leases.
        """
        position = lease.bucket, lease.offset
        try:
            letters = await self.dead_letters()
            return await read_letter(letters, lease.letter, self._group, position)
        except NoSuchTopic:  # it was deleted after the re-drive
            return None
        except StorageError as exc:
            log.warning(
                "the history of offset %d of bucket %d of topic %r cannot be read: %s",
                lease.offset,
                lease.bucket,
                self.topic.name,
                exc,
            )
            await self._forget_letters()
            return None

    async def _forget_letters(self) -> None:
        """Open the topic of the dead letters again at the next call: it may have been deleted and
        created again."""
        async with self._opening:
            letters, self._letters = self._letters, None
        if letters is not None:
            await letters.close()

    async def _read_runs(
        self, runs: list[list[RecordLease]], damage: list[TableError]
    ) -> list[_Records]:
        """Read all runs concurrently; raise only if none can be read.

        A bucket without an owner must not hold back the records of the others.
        """
        read: list[_Records] = []
        errors: list[BaseException] = []
        results: list[_Records | BaseException]
        if len(runs) == 1:  # most claims: needs no task
            try:
                results = [await self._read_run(runs[0], damage)]
            except StorageError as exc:
                results = [exc]
        else:
            reads = (self._read_run(run, damage) for run in runs)
            results = await asyncio.gather(*reads, return_exceptions=True)
        for run, result in zip(runs, results, strict=True):
            bucket = run[0].bucket
            if not isinstance(result, BaseException):
                self._unreadable.discard(bucket)
                read.append(result)
                continue
            errors.append(result)
            if not isinstance(result, StorageError):
                raise result
            if bucket not in self._unreadable:
                self._unreadable.add(bucket)
                log.warning(
                    "work group %r cannot read bucket %d of topic %r: %s",
                    self._group,
                    bucket,
                    self.topic.name,
                    result,
                )
        if errors and not read:
            raise errors[0]
        return read

    async def _read_run(self, run: list[RecordLease], damage: list[TableError]) -> _Records:
        """Return the records of leases on neighbouring offsets, with bucket and offset."""
        bucket = run[0].bucket
        client = self.topic.bucket(bucket)
        try:
            if _is_first(run[0]):
                rows = await self._cache.bucket(bucket).read_new(client, run)
            else:
                rows = await read_rows(client, run[0].offset, len(run), run[0].epoch)
        except TableError:
            rows = await _read_intact(client, run, damage)
        return [((bucket, offset), row) for offset, row in rows]

    async def close(self) -> None:
        try:
            await self.topic.close()
        finally:
            if self._letters is not None:
                await self._letters.close()


async def _read_intact(
    client: BucketClient, run: list[RecordLease], damage: list[TableError]
) -> Rows:
    """Read each record by itself, and note the errors of those that are damaged.

    A read fails as a whole, even if only a record that was read ahead is damaged.
    """
    rows: Rows = []
    for lease in run:
        try:
            rows += await read_rows(client, lease.offset, 1, lease.epoch)
        except TableError as exc:
            damage.append(exc)
    return rows


def _is_first(lease: RecordLease) -> bool:
    """Whether no member had the record before."""
    return lease.attempt == 1 and lease.letter < 0


def _runs(leases: list[RecordLease]) -> Iterator[list[RecordLease]]:
    """Yield runs of leases on neighbouring offsets, all for the first time or all again."""

    def run_of(item: tuple[int, RecordLease]) -> tuple[int, int, bool]:
        place, lease = item
        return lease.bucket, lease.offset - place, _is_first(lease)

    for _, run in groupby(enumerate(sorted(leases)), run_of):
        yield [lease for _, lease in run]
