"""The work that everyone is given, and how it is timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from corebench.report import rate, stopwatch

from peersbench.kinds import Kind, Record, check_equal

BATCH = 1000
PRODUCERS = 64

INGEST, SINGLES, CROWD, DRAIN = "ingest", "singles", "crowd", "drain"
TITLES = {
    INGEST: f"batches of {BATCH:,}",
    SINGLES: "single, each durable",
    CROWD: f"{PRODUCERS} producers, each durable",
    DRAIN: "drain as dicts",
}

_T = TypeVar("_T")


class Store(ABC):
    """An open, empty store of one kind of records. What it takes is as durable as the peer is set
    to make it (see the peer's ``durability``) before it takes the next."""

    @abstractmethod
    def ingest(self, batches: Iterable[list[Record]]) -> None: ...

    @abstractmethod
    def singles(self, rows: Iterable[Record]) -> None: ...

    @abstractmethod
    def crowd(self, shares: list[Iterable[Record]]) -> None:
        """One producer per share, all at once, in the way that is best for the peer."""

    def settle(self) -> None:
        """What a reader needs before it begins; not timed."""
        return

    @abstractmethod
    def drain(self) -> list[Record]: ...

    @abstractmethod
    def close(self) -> None: ...


Opener = Callable[[Path, Kind], Store]


class Handed(Generic[_T]):
    """Hands things out until there are no more or the time is over, and keeps what it handed."""

    def __init__(self, things: Iterable[_T], until: float) -> None:
        self._things, self._until = things, until
        self.out: list[_T] = []

    def __iter__(self) -> Iterator[_T]:
        for thing in self._things:
            if self.out and time.perf_counter() > self._until:
                return
            self.out.append(thing)
            yield thing


def measure(
    opener: Opener, folder: Path, kind: Kind, work: str, rows: list[Record], seconds: float
) -> dict[str, float]:
    """Records per second, of the work and, after ingesting, of the drain; what was put is checked.

    Whoever is slow is stopped after ``seconds``: its rate is that of what it has stored by then.
    """
    store = opener(folder, kind)
    until = time.perf_counter() + seconds
    try:
        if work == INGEST:
            batches = Handed((rows[i : i + BATCH] for i in range(0, len(rows), BATCH)), until)
            with stopwatch() as took:
                store.ingest(batches)
            put = [row for batch in batches.out for row in batch]
        elif work == SINGLES:
            handed = Handed(rows, until)
            with stopwatch() as took:
                store.singles(handed)
            put = handed.out
        else:
            shares = [Handed(rows[i::PRODUCERS], until) for i in range(PRODUCERS)]
            with stopwatch() as took:
                store.crowd(list(shares))
            put = [row for share in shares for row in share.out]
        measured = {work: rate(len(put), took())}
        store.settle()
        with stopwatch() as took:
            found = store.drain()
        if work == INGEST:
            measured[DRAIN] = rate(len(found), took())
        check_equal(found, put, in_order=work != CROWD)
    finally:
        store.close()
    return measured


def in_turns(shares: list[Iterable[Record]]) -> Iterator[Record]:
    """All producers' records in one row, for a peer that is no faster with many callers."""
    waiting = [iter(share) for share in shares]
    while waiting:
        for producer in list(waiting):
            try:
                yield next(producer)
            except StopIteration:
                waiting.remove(producer)
