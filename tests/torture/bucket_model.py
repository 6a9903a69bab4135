"""Model of one bucket: the rows that were last observed, and the puts since then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Span = tuple[int, list[str]]
"""The offset of the first row, and the ids of all rows."""


@dataclass
class Put:
    """The part of a put that goes to one bucket."""

    key: tuple[int, int]
    producer: int
    ids: list[str]
    begun: int = 0
    acknowledged: int | None = None
    """Both are numbers of notes."""
    flushed: bool = False
    """Whether it was acknowledged before the start of a completed flush."""


class Baseline(NamedTuple):
    """Rows that may precede the new puts. Retention has also dropped ``unseen`` rows of the
    puts."""

    start: int
    ids: list[str]
    unseen: int = 0

    def from_(self, start: int) -> Baseline:
        """Return what is left if the first offset is ``start``."""
        gone = start - self.start
        return Baseline(start, self.ids[gone:], max(0, gone - len(self.ids)))


@dataclass
class BucketModel:
    """The rows of a bucket and the puts since they were observed."""

    start: int = 0
    ids: list[str] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    flushed: int = 0
    """Rows before this offset survive every crash."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def base(self) -> Baseline:
        return Baseline(self.start, self.ids)

    @property
    def acknowledged(self) -> list[Put]:
        return [put for put in self.puts if put.acknowledged is not None]

    def safe_end(self, *, logged: bool) -> int:
        """Return the offset up to which all rows survive a crash now."""
        if logged:
            return self.end + sum(len(put.ids) for put in self.acknowledged)
        return self.flushed + sum(len(put.ids) for put in self.puts if put.flushed)

    def find_problem(self, found: Span, bases: list[Baseline], *, lossy: bool) -> str | None:
        """Return why ``found`` cannot follow from any of the ``bases``; None if it can.

        ``lossy``: a crash without a log may have lost the last rows that were not flushed.
        """
        reasons = [self._after(found, base, lossy=lossy) for base in bases]
        return None if None in reasons else "; or ".join(str(reason) for reason in reasons)

    def reconcile(self, found: Span) -> None:
        """Accept the observed rows. Only failed puts after the last stored one may still appear
        after a crash."""
        at = {name: found[0] + place for place, name in enumerate(found[1])}
        stored = [number for number, put in enumerate(self.puts) if put.ids[-1] in at]
        flushed = [at[put.ids[-1]] + 1 for put in self.puts if put.flushed and put.ids[-1] in at]
        later = self.puts[stored[-1] + 1 if stored else 0 :]
        self.puts = [put for put in later if put.acknowledged is None]
        self.start, self.ids = found[0], list(found[1])
        self.flushed = min(max(self.flushed, *flushed, self.start), self.end)

    def _after(self, found: Span, base: Baseline, *, lossy: bool) -> str | None:
        start, ids = found
        if start != base.start:
            return f"it starts at {start} instead of {base.start}"
        if ids[: len(base.ids)] != base.ids:
            return difference(base.ids, ids)
        return NewRows(self.puts, ids[len(base.ids) :], base.unseen, lossy=lossy).find_problem()


class NewRows:
    """Rows that were put since: whole puts, each once, in order for each producer.

    Retention may have dropped the first ``unseen`` of them before they were observed.
    """

    def __init__(self, puts: list[Put], rows: list[str], unseen: int, *, lossy: bool) -> None:
        self._puts, self._rows, self._unseen, self._lossy = puts, rows, unseen, lossy
        self._found: list[int] = []

    def find_problem(self) -> str | None:
        return self._find_torn_put() or self._find_reordered_put() or self._find_lost_put()

    def _find_torn_put(self) -> str | None:
        left = {put.ids[0]: number for number, put in enumerate(self._puts)}
        at = self._take_partly_dropped_put(left)
        while at < len(self._rows):
            number = left.pop(self._rows[at], None)
            if number is None:
                return f"stored twice or never put: {self._rows[at]} after {self._rows[:at][-5:]}"
            ids = self._puts[number].ids
            if self._rows[at : at + len(ids)] != ids:
                return f"part of a put is missing: {self._rows[at : at + len(ids)]} of {ids}"
            self._found.append(number)
            at += len(ids)
        return None

    def _take_partly_dropped_put(self, left: dict[str, int]) -> int:
        """Match the rest of a put whose first rows retention has dropped; return its number of
        rows."""
        first = self._rows[0] if self._rows else None
        for number, put in enumerate(self._puts):
            if self._unseen and first in put.ids[1:]:
                cut = put.ids.index(first)
                if self._rows[: len(put.ids) - cut] == put.ids[cut:]:
                    del left[put.ids[0]]
                    self._found.append(number)
                    self._unseen -= cut
                    return len(put.ids) - cut
        return 0

    def _find_reordered_put(self) -> str | None:
        latest: dict[int, int] = {}
        for number in self._found:
            put = self._puts[number]
            if latest.get(put.producer, -1) > number:
                return f"reordered: {put.ids} of producer {put.producer} is too late"
            latest[put.producer] = number
        return None

    def _find_lost_put(self) -> str | None:
        """Raise no problem for missing puts that retention dropped or that a crash may lose."""
        missing = [put for number, put in enumerate(self._puts) if number not in self._found]
        found = [self._puts[number] for number in self._found]
        dropped = 0
        for put in missing:
            if put.acknowledged is None or self._may_be_lost(put, found):
                continue
            if not self._unseen or any(_before(other, put) for other in found):
                return f"lost: {put.ids}"
            dropped += len(put.ids)
        if not dropped <= self._unseen <= sum(len(put.ids) for put in missing):
            return f"lost: {dropped} rows or more, while {self._unseen} were dropped"
        return None

    def _may_be_lost(self, put: Put, found: list[Put]) -> bool:
        return self._lossy and not put.flushed and not any(_before(put, other) for other in found)


def _before(one: Put, other: Put) -> bool:
    """Return whether ``one`` was acknowledged before ``other`` was started."""
    return one.acknowledged is not None and one.acknowledged < other.begun


def difference(expected: list[str], found: list[str]) -> str:
    missing = [name for name in expected if name not in set(found)]
    repeated = sorted({name for name in found if found.count(name) > 1})
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    return f"missing {missing[:9]}, repeated {repeated[:9]}, first difference at index {at}"
