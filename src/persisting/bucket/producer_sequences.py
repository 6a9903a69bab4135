"""The last sequence number of each idempotent producer, so that a retried put is stored once."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import msgspec

from persisting.bucket.delayed_puts import DELAYED, DelayedPuts
from persisting.errors import InvalidArgument, TableError

WRITERS = "persisting.writers"
"""Property of a table commit: the last number of each producer, as JSON."""

ProducerSequence = tuple[str, int]
"""A producer's name (``writer_id``) and the number of its put; each pair is stored once."""

MAX_PRODUCERS = 1024
"""Producers remembered per bucket; beyond it the one that wrote longest ago is forgotten."""

_MAX_NUMBER = (1 << 63) - 1

ANONYMOUS = "~"
"""Prefix of producers that live as long as a connection; they are forgotten first."""

GENERATED = f"{ANONYMOUS}put-"
"""Prefix of the names that the command line generates for inputs without a write id."""


def check_writer(name: Any) -> None:
    """Raise if this cannot be the name of a producer, which is stored as text."""
    try:
        if not isinstance(name, str) or not name.encode():
            raise InvalidArgument(f"writer_id must be a non-empty string, got {name!r}")
    except UnicodeEncodeError:
        raise InvalidArgument(f"writer_id {name!r} is not valid unicode") from None


def check_number(number: Any, name: str = "number") -> int:
    """Return the number of a put as an int that the log and the table can store, or raise."""
    if not isinstance(number, bool) and hasattr(number, "__index__"):
        value = operator.index(number)
        if 0 <= value <= _MAX_NUMBER:
            return value
    raise InvalidArgument(f"{name} must be a whole number from 0 to 2**63 - 1, got {number!r}")


class ProducerSequences:
    """Last number of each producer, the most recent producer last. Guarded by the bucket."""

    def __init__(self, encoded: str | None = None) -> None:
        try:
            self._last = msgspec.json.decode(encoded or b"{}", type=dict[str, int])
        except msgspec.DecodeError as exc:
            raise TableError(f"the producer sequences in the table cannot be read: {exc}") from exc
        self._delayed = DelayedPuts()
        for name in [name for name in self._last if name.startswith(DELAYED)]:
            self._delayed.add((name, self._last.pop(name)))
        self._kept: set[str] = set()

    def copy(self) -> ProducerSequences:
        """Return a copy that can be changed independently."""
        made = ProducerSequences(self.encode())
        made.keep(self._kept)
        return made

    @property
    def kept(self) -> frozenset[str]:
        """The producers that are never forgotten."""
        return frozenset(self._kept)

    def keep(self, producers: Iterable[str]) -> None:
        """Never forget these producers, until :meth:`release`."""
        self._kept.update(producers)

    def release(self, producer: str) -> None:
        """Let a producer be forgotten."""
        self._kept.discard(producer)

    def has(self, sequence: ProducerSequence) -> bool:
        """Whether this put, or a later one of its producer, is stored."""
        producer, number = sequence
        if producer.startswith(DELAYED):
            return self._delayed.has(producer)
        return number <= self._last.get(producer, -1)

    def last(self, producer: str) -> int:
        """Return the last number of a producer, -1 if there is none."""
        return self._last.get(producer, -1)

    def all(self) -> list[ProducerSequence]:
        """Return the last put of each producer, the most recent producer last."""
        return [*self._last.items(), *self._delayed.all()]

    def remember(self, sequences: list[ProducerSequence]) -> None:
        """Note puts as stored; forget the oldest producers beyond the maximum.

        Kept producers and anonymous ones in ``sequences`` stay, in addition to the maximum: what
        was stored just now must be recognized if it is repeated after a crash.
        """
        for producer, number in sequences:
            if producer.startswith(DELAYED):
                self._delayed.add((producer, number))
            else:
                self._last[producer] = max(self._last.pop(producer, -1), number)
        if len(self._last) > MAX_PRODUCERS:
            new = {producer for producer, _ in sequences if producer.startswith(ANONYMOUS)}
            self._forget_beyond_maximum(self._last.keys() & (self._kept | new))

    def _forget_beyond_maximum(self, spared: set[str]) -> None:
        while len(self._last) - len(spared) > MAX_PRODUCERS:
            others = [producer for producer in self._last if producer not in spared]
            del self._last[next((p for p in others if p.startswith(ANONYMOUS)), others[0])]

    def encode(self) -> str:
        """Return the value of :data:`WRITERS`; empty if there are no producers."""
        producers = dict(self.all())
        return msgspec.json.encode(producers).decode() if producers else ""
