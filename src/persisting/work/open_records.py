"""The open records of one bucket, in columns: about 60 bytes for each.

A record is open from its first delivery (or from when it was read ahead) until it is finished. The
rows are sorted by offset. Finished rows stay as tombstones until a quarter of the rows are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

import numpy as np

NEVER = (1 << 63) - 1
"""The due time of a row that must not be delivered: finished, or on its way to the dead letters."""

_COLUMNS = {
    "offset": "q",
    "token": "q",  # of the current lease; 0: not leased, -1: a tombstone
    "due": "q",  # the end of the lease, or when the record may be delivered again
    "first": "q",  # time of the first delivery, 0 before it
    "last": "q",  # time of the last delivery, 0 before it
    "attempts": "i",
    "member": "i",
}
_READ_AHEAD = {"key": "q", "priority": "i"}
"""Columns of groups that read ahead: a hash of the key, and the priority."""

_REDRIVEN = {"letter": "q"}
"""The place of the dead letter that the record was re-driven from, plus one."""

_LATER = {"since": "q"}
"""Since when the record may be delivered if that is not its arrival: the end of its delay, or when
it was re-driven; 0 otherwise."""

_OPTIONAL = {**_READ_AHEAD, **_REDRIVEN, **_LATER}
"""Columns that exist only once a record needs them."""

_FEW_TOMBSTONES = 256


class OpenRecords:
    """Rows sorted by offset; a row is known by its position until the next change."""

    def __init__(self) -> None:
        self.offset, self.token, self.due = array("q"), array("q"), array("q")
        self.first, self.last = array("q"), array("q")
        self.attempts, self.member = array("i"), array("i")
        self.key: array[int] | None = None
        self.priority: array[int] | None = None
        self.letter: array[int] | None = None
        self.since: array[int] | None = None
        self._tombstones = 0

    def __len__(self) -> int:
        """The number of open records."""
        return len(self.offset) - self._tombstones

    @property
    def size(self) -> int:
        """The bytes of all columns."""
        return sum(column.itemsize * len(column) for column in self._columns().values())

    def _columns(self) -> dict[str, Any]:
        names = [*_COLUMNS, *_OPTIONAL]
        columns = {name: getattr(self, name) for name in names}
        return {name: column for name, column in columns.items() if column is not None}

    def find(self, offset: int) -> int | None:
        """Return the row of an open record, None if it is not open."""
        offsets = self.offset
        row = bisect_left(offsets, offset)
        if row < len(offsets) and offsets[row] == offset and self.token[row] >= 0:
            return row
        return None

    def first_open(self) -> int | None:
        """Return the lowest open offset."""
        for row, token in enumerate(self.token):
            if token >= 0:
                return self.offset[row]
        return None

    def _ensure(self, name: str) -> array[int]:
        """Return an optional column, which is created if needed."""
        column: array[int] | None = getattr(self, name)
        if column is None:
            kind = _OPTIONAL[name]
            column = array(kind, bytes(array(kind).itemsize * len(self.offset)))
            setattr(self, name, column)
        return column

    def append(
        self, offset: int, *, token: int, due: int, now: int, attempts: int, member: int
    ) -> None:
        """Add the row of an offset above all others."""
        self.offset.append(offset)
        self.token.append(token)
        self.due.append(due)
        self.first.append(now)
        self.last.append(now)
        self.attempts.append(attempts)
        self.member.append(member)
        for column in (self.key, self.priority, self.letter, self.since):
            if column is not None:
                column.append(0)

    def append_leased(
        self, first: int, count: int, *, token: int, due: int, now: int, member: int
    ) -> None:
        """Add the rows of a claim: ``count`` offsets from ``first`` on, above all others, with
        consecutive tokens."""
        self.offset.extend(range(first, first + count))
        self.token.extend(range(token, token + count))
        self.due.extend([due] * count)
        times = [now] * count
        self.first.extend(times)
        self.last.extend(times)
        self.attempts.extend([1] * count)
        self.member.extend([member] * count)
        for column in (self.key, self.priority, self.letter, self.since):
            if column is not None:
                column.extend([0] * count)

    def append_delayed(self, offset: int, due: int) -> None:
        """Add the row of a record that was not delivered yet and may not be before ``due``."""
        self.append(offset, token=0, due=due, now=0, attempts=0, member=0)
        self._ensure("since")[-1] = due

    def append_read_ahead(
        self, first: int, now: int, dues: list[int], keys: list[int], priorities: list[int]
    ) -> None:
        """Add rows of records that were not delivered yet."""
        key, priority = self._ensure("key"), self._ensure("priority")
        for number, due in enumerate(dues):
            if due > now:
                self.append_delayed(first + number, due)
            else:
                self.append(first + number, token=0, due=due, now=0, attempts=0, member=0)
            key[-1], priority[-1] = keys[number], priorities[number]

    def insert(self, redriven: dict[int, tuple[int, int, int]], due: int) -> None:
        """Add rows of finished records again; ``redriven`` has by offset where their dead letters
        are, the hashes of their keys, and their priorities."""
        self._compact()
        self._ensure("letter")
        self._ensure("since")
        offsets = sorted(redriven)
        places, keys, priorities = zip(*(redriven[offset] for offset in offsets), strict=True)
        if any(keys) or any(priorities):
            self._ensure("key")
            self._ensure("priority")
        new = np.array(offsets, dtype=np.int64)
        at = np.searchsorted(np.frombuffer(self.offset, dtype=np.int64), new)
        values = {
            "offset": new,
            "due": np.full(len(new), due),
            "since": np.full(len(new), due),
            "letter": np.array(places) + 1,
            "key": np.array(keys),
            "priority": np.array(priorities),
        }
        for name, column in self._columns().items():
            old = np.frombuffer(column, dtype=column.typecode)
            merged = np.insert(old, at, values.get(name, 0)).astype(column.typecode)
            setattr(self, name, array(column.typecode, merged.tobytes()))

    def remove(self, row: int) -> None:
        """Make the row of a finished record a tombstone."""
        self.token[row], self.due[row] = -1, NEVER
        self._tombstones += 1
        if self._tombstones > _FEW_TOMBSTONES and 4 * self._tombstones > len(self.offset):
            self._compact()

    def remove_outside(self, low: int, high: int) -> int:
        """Drop the rows below ``low`` and from ``high`` on; return how many of the first were open.

        Re-driven records below ``low`` stay: the dead letters still hold them.
        """
        offsets = np.frombuffer(self.offset, dtype=np.int64)
        available = offsets >= low
        if self.letter is not None:
            available |= np.frombuffer(self.letter, dtype=np.int64) > 0
        removed = int((~available & (offsets < high) & self._open()).sum())
        self._keep(available & (offsets < high) & self._open())
        return removed

    def _compact(self) -> None:
        if self._tombstones:
            self._keep(self._open())

    def _open(self) -> Any:
        return np.frombuffer(self.token, dtype=np.int64) >= 0

    def _keep(self, kept: Any) -> None:
        for name, column in self._columns().items():
            values = np.frombuffer(column, dtype=column.typecode)[kept].tobytes()
            setattr(self, name, array(column.typecode, values))
        self._tombstones = 0

    def due_offsets(
        self, now: int, limit: int, *, by_key: bool, below: int | None = None
    ) -> tuple[list[int], bool, int]:
        """Return up to ``limit`` offsets that may be delivered, best first, whether there are more
        of them, and when another one may become due. With ``below``, only records with fewer
        attempts are among them.

        Higher priorities come first, then lower offsets. With ``by_key`` a record waits until all
        open records of its key with lower offsets are finished, and while another record of its
        key is leased: a re-driven record has a lower offset than those delivered after it.
        """
        due = np.frombuffer(self.due, dtype=np.int64)
        if by_key and self.key is not None:
            rows = np.flatnonzero(self._open())
            keys = np.frombuffer(self.key, dtype=np.int64)[rows]
            leased = (np.frombuffer(self.token, dtype=np.int64)[rows] > 0) & (due[rows] > now)
            first = np.sort(np.unique(keys, return_index=True)[1])
            first = first[~np.isin(keys[first], keys[leased])]
            ready = rows[first][due[rows[first]] <= now]
            waiting = np.concatenate([due[rows[first]], due[rows[leased]]])
        else:
            ready, waiting = np.flatnonzero(due <= now), due
        if below is not None:
            ready = ready[np.frombuffer(self.attempts, dtype=np.int32)[ready] < below]
        later = waiting[waiting > now]
        next_due = int(later.min()) if len(later) else NEVER
        if self.priority is not None and len(ready):
            priorities = np.frombuffer(self.priority, dtype=np.int32)[ready]
            ready = ready[np.argsort(-priorities.astype(np.int64), kind="stable")]
        offsets = np.frombuffer(self.offset, dtype=np.int64)
        return offsets[ready[:limit]].tolist(), len(ready) > limit, next_due

    def oldest(self, now: int) -> tuple[int | None, int | None]:
        """Return the two records that may have been available for the longest time: the lowest
        open offset that was available on arrival, and the earliest time since when another one is.

        A record whose delay has not ended is not available.
        """
        attempts = np.frombuffer(self.attempts, dtype=np.int32)
        due = np.frombuffer(self.due, dtype=np.int64)
        available = self._open() & ((attempts > 0) | (due <= now))
        if self.since is None:
            on_arrival, later = available, available[:0]
            since = np.zeros(0, dtype=np.int64)
        else:
            since = np.frombuffer(self.since, dtype=np.int64)
            on_arrival, later = available & (since == 0), available & (since > 0)
        rows = np.flatnonzero(on_arrival)
        offset = self.offset[int(rows[0])] if len(rows) else None
        return offset, int(since[later].min()) if later.any() else None

    def counts(self, now: int) -> tuple[int, int]:
        """Return how many records are leased, and how many were delivered and wait for a retry."""
        token = np.frombuffer(self.token, dtype=np.int64)
        due = np.frombuffer(self.due, dtype=np.int64)
        attempts = np.frombuffer(self.attempts, dtype=np.int32)
        leased = (token > 0) & (due > now)
        return int(leased.sum()), int(((token >= 0) & (attempts > 0) & ~leased).sum())

    def undelivered(self, now: int) -> int:
        """Return how many records were never delivered and are due."""
        attempts = np.frombuffer(self.attempts, dtype=np.int32)
        return int(((attempts == 0) & (np.frombuffer(self.due, dtype=np.int64) <= now)).sum())

    def tokens(self) -> Any:
        """Return the tokens of all leases."""
        token = np.frombuffer(self.token, dtype=np.int64)
        return token[token > 0]

    def held_rows(self, first: int, count: int) -> list[int]:
        """Return the rows whose leases have ``count`` tokens from ``first`` on."""
        token = np.frombuffer(self.token, dtype=np.int64)
        rows: list[int] = np.flatnonzero((token >= first) & (token < first + count)).tolist()
        return rows

    def leases(self) -> list[tuple[int, int]]:
        """Return offset and member of every leased record."""
        rows = np.flatnonzero(np.frombuffer(self.token, dtype=np.int64) > 0)
        return [(self.offset[row], self.member[row]) for row in rows.tolist()]

    def renumber_members(self, numbers: dict[int, int]) -> None:
        self.member = array("i", [numbers[member] for member in self.member])

    def dump(self) -> dict[str, bytes]:
        self._compact()
        return {name: column.tobytes() for name, column in self._columns().items()}

    @classmethod
    def load(cls, columns: dict[str, bytes]) -> OpenRecords:
        records = cls()
        kinds = {**_COLUMNS, **_OPTIONAL}
        for name, data in columns.items():
            setattr(records, name, array(kinds[name], data))
        return records
