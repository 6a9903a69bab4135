"""What one bucket must hold: what was seen in it last, and what was put since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Span = tuple[int, list[str]]
"""The offset of the first row, and the ids of all."""


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
    """Whether it was acknowledged before a flush began that is done."""


class Base(NamedTuple):
    """What may have been there before the puts; ``unseen`` of them went by retention since."""

    start: int
    ids: list[str]
    unseen: int = 0

    def from_(self, start: int) -> Base:
        """What is left of it when it begins at a later offset."""
        gone = start - self.start
        return Base(start, self.ids[gone:], max(0, gone - len(self.ids)))


@dataclass
class Shelf:
    """A bucket."""

    start: int = 0
    ids: list[str] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    flushed: int = 0
    """What lies before this offset survives every crash."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def base(self) -> Base:
        return Base(self.start, self.ids)

    @property
    def acknowledged(self) -> list[Put]:
        return [put for put in self.puts if put.acknowledged is not None]

    def safe_end(self, *, logged: bool) -> int:
        """The offset before which all survives a crash now."""
        if logged:
            return self.end + sum(len(put.ids) for put in self.acknowledged)
        return self.flushed + sum(len(put.ids) for put in self.puts if put.flushed)

    def explain(self, found: Span, bases: list[Base], *, lossy: bool) -> str | None:
        """Why ``found`` cannot follow from any of the ``bases``, None if it does.

        ``lossy``: there was a crash without a log, which may take the last rows that were not
        flushed.
        """
        reasons = [self._after(found, base, lossy=lossy) for base in bases]
        return None if None in reasons else "; or ".join(str(reason) for reason in reasons)

    def settle(self, found: Span) -> None:
        """A put that was refused last of all may still come back after a crash; no other."""
        at = {name: found[0] + place for place, name in enumerate(found[1])}
        stored = [number for number, put in enumerate(self.puts) if put.ids[-1] in at]
        flushed = [at[put.ids[-1]] + 1 for put in self.puts if put.flushed and put.ids[-1] in at]
        later = self.puts[stored[-1] + 1 if stored else 0 :]
        self.puts = [put for put in later if put.acknowledged is None]
        self.start, self.ids = found[0], list(found[1])
        self.flushed = min(max(self.flushed, *flushed, self.start), self.end)

    def _after(self, found: Span, base: Base, *, lossy: bool) -> str | None:
        start, ids = found
        if start != base.start:
            return f"it begins at {start} instead of {base.start}"
        if ids[: len(base.ids)] != base.ids:
            return difference(base.ids, ids)
        return Tail(self.puts, ids[len(base.ids) :], base.unseen, lossy=lossy).wrong()


class Tail:
    """Rows that came since: whole puts, each once, in order for each producer.

    Retention may have dropped the first ``unseen`` rows before anybody saw them.
    """

    def __init__(self, puts: list[Put], rows: list[str], unseen: int, *, lossy: bool) -> None:
        self._puts, self._rows, self._unseen, self._lossy = puts, rows, unseen, lossy
        self._found: list[int] = []

    def wrong(self) -> str | None:
        return self._not_whole() or self._out_of_order() or self._missing()

    def _not_whole(self) -> str | None:
        left = {put.ids[0]: number for number, put in enumerate(self._puts)}
        at = self._take_cut_put(left)
        while at < len(self._rows):
            number = left.pop(self._rows[at], None)
            if number is None:
                return f"doubled or never put: {self._rows[at]} behind {self._rows[:at][-5:]}"
            ids = self._puts[number].ids
            if self._rows[at : at + len(ids)] != ids:
                return f"a put was torn: {self._rows[at : at + len(ids)]} of {ids}"
            self._found.append(number)
            at += len(ids)
        return None

    def _take_cut_put(self, left: dict[str, int]) -> int:
        """Retention may leave the end of a put; how many rows that is."""
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

    def _out_of_order(self) -> str | None:
        latest: dict[int, int] = {}
        for number in self._found:
            put = self._puts[number]
            if latest.get(put.producer, -1) > number:
                return f"another order: {put.ids} of producer {put.producer} came late"
            latest[put.producer] = number
        return None

    def _missing(self) -> str | None:
        """What was acknowledged and is not there went by retention, or a crash took it."""
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
    """Whether one was acknowledged before the other was begun."""
    return one.acknowledged is not None and one.acknowledged < other.begun


def difference(wanted: list[str], found: list[str]) -> str:
    missing = [name for name in wanted if name not in set(found)]
    doubled = sorted({name for name in found if found.count(name) > 1})
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), None)
    return f"missing {missing[:9]}, doubled {doubled[:9]}, first difference at place {at}"
