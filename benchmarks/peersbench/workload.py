"""The workloads that every system runs, and their timing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from corebench.report import rate, stopwatch

from peersbench.record_kinds import Kind, Record, check_equal

BATCH = 1000
PRODUCERS = 64
WARM_UP = 256
"""Records that every system stores before the clock starts: enough to open 16 buckets."""

INGEST, SINGLES, CROWD, DRAIN = "ingest", "singles", "crowd", "drain"
TITLES = {
    INGEST: f"batches of {BATCH:,}",
    SINGLES: "single, each durable",
    CROWD: f"{PRODUCERS} producers, each durable",
    DRAIN: "drain as dicts",
}

_T = TypeVar("_T")


class Store(ABC):
    """An open, empty store for one kind of record.

    Each put is as durable as the ``durability`` of its peer says before the next one starts.
    """

    in_order = True
    """Whether the records of one producer are drained in the order in which they were put."""

    @abstractmethod
    def ingest(self, batches: Iterable[list[Record]]) -> None: ...

    @abstractmethod
    def singles(self, rows: Iterable[Record]) -> None: ...

    @abstractmethod
    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        """Run one producer per share concurrently, in the fastest way for this system."""

    def prepare_read(self) -> None:
        """Prepare for reading; not timed."""
        return

    @abstractmethod
    def drain(self) -> list[Record]: ...

    @abstractmethod
    def close(self) -> None: ...


Opener = Callable[[Path, Kind], Store]


class TimeLimited(Generic[_T]):
    """Yields items until they or the time run out, and remembers what it yielded."""

    def __init__(self, items: Iterable[_T], until: float) -> None:
        self._items, self._until = items, until
        self.yielded: list[_T] = []

    def __iter__(self) -> Iterator[_T]:
        for item in self._items:
            if self.yielded and time.perf_counter() > self._until:
                return
            self.yielded.append(item)
            yield item


def measure(
    opener: Opener, folder: Path, kind: Kind, work: str, rows: list[Record], seconds: float
) -> dict[str, float]:
    """Return records per second of the workload and, after an ingest, of the drain.

    The first ``WARM_UP`` rows are not timed, since the first put also creates files. A slow system
    is stopped after ``seconds``; its rate is that of the records stored until then. What was put is
    read back and checked.
    """
    store = opener(folder, kind)
    warm_up, rows = rows[:WARM_UP], rows[WARM_UP:]
    try:
        store.ingest([warm_up])
        until = time.perf_counter() + seconds
        if work == INGEST:
            batches = TimeLimited((rows[i : i + BATCH] for i in range(0, len(rows), BATCH)), until)
            with stopwatch() as took:
                store.ingest(batches)
            put = [row for batch in batches.yielded for row in batch]
        elif work == SINGLES:
            limited = TimeLimited(rows, until)
            with stopwatch() as took:
                store.singles(limited)
            put = limited.yielded
        else:
            shares = [TimeLimited(rows[i::PRODUCERS], until) for i in range(PRODUCERS)]
            with stopwatch() as took:
                store.many_producers(list(shares))
            put = [row for share in shares for row in share.yielded]
        measured = {work: rate(len(put), took())}
        store.prepare_read()
        with stopwatch() as took:
            found = store.drain()
        if work == INGEST:
            measured[DRAIN] = rate(len(found), took())
        check_equal(found, warm_up + put, in_order=store.in_order and work != CROWD)
    finally:
        store.close()
    return measured


def in_turns(shares: list[Iterable[Record]]) -> Iterator[Record]:
    """Interleave the records of all producers, for systems that gain nothing from concurrency."""
    waiting = [iter(share) for share in shares]
    while waiting:
        for producer in list(waiting):
            try:
                yield next(producer)
            except StopIteration:
                waiting.remove(producer)
