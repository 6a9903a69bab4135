"""A system whose workers claim single records, and how fast they do."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corebench.report import rate
from peersbench.record_kinds import Kind, Record, check_equal
from peersbench.workload import BATCH, Store

from workbench import processes
from workbench.crowd import SMALL, WORKERS, Crowd

_WARM_UP = 256
"""Records that the workers finish before the clock starts: files and caches are ready then."""


class WorkStore(Store):
    """A store of records that workers finish one by one."""

    workers: str
    """The module whose ``connect`` opens the workers' side: at :attr:`address`, in any process."""
    address: str

    @abstractmethod
    def unfinished(self) -> int:
        """Return how many records are not acknowledged."""

    def drain(self) -> list[Record]:
        raise NotImplementedError("workers drain it")


class Workers(Protocol):
    """The workers of one process, connected."""

    async def work(self, crowd: Crowd) -> None:
        """Let every worker claim a record durably, acknowledge it durably, and continue."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class WorkPeer:
    """A system to measure."""

    name: str
    durable: str
    """What survives power loss when a claim and an acknowledgement have returned."""
    opener: Callable[[Path, Kind], WorkStore]
    missing: Callable[[], str | None] = lambda: None
    version: Callable[[], str] = lambda: ""
    target: float | None = None
    """How many times faster we must be."""

    def measure(self, folder: Path, rows: list[Record], seconds: float, count: int = 1) -> float:
        """Return how many records per second 64 workers of ``count`` processes finish."""
        store = self.opener(folder, SMALL)
        try:
            store.ingest(rows[i : i + BATCH] for i in range(0, len(rows), BATCH))
            store.prepare_read()
            if count == 1:
                warm_up, crowds = asyncio.run(_in_this_process(store, seconds))
            else:
                warm_up, crowds = [], processes.run(store.workers, store.address, count, seconds)
            self._check(store, rows, [*warm_up, *crowds])
        finally:
            store.close()
        return rate(_finished(crowds), max(crowd.seconds for crowd in crowds))

    def _check(self, store: WorkStore, rows: list[Record], crowds: list[Crowd]) -> None:
        claimed = sorted(
            (row for crowd in crowds for row in crowd.claimed), key=lambda row: str(row["id"])
        )
        numbers = {row["id"] for row in claimed}
        if len(numbers) != len(claimed):
            raise SystemExit(f"{self.name} has delivered a record twice")
        check_equal(claimed, [row for row in rows if row["id"] in numbers], in_order=True)
        finished, unfinished = _finished(crowds), store.unfinished()
        if finished != len(claimed) or unfinished != len(rows) - finished:
            raise SystemExit(
                f"{self.name}: {finished:,} of {len(rows):,} records were acknowledged, but "
                f"{unfinished:,} are unfinished"
            )


def _finished(crowds: list[Crowd]) -> int:
    return sum(crowd.finished for crowd in crowds)


async def _in_this_process(store: WorkStore, seconds: float) -> tuple[list[Crowd], list[Crowd]]:
    workers = await processes.connect(store.workers, store.address, WORKERS)
    try:
        warm_up = Crowd(WORKERS, seconds, _WARM_UP)
        await workers.work(warm_up)
        crowd = Crowd(WORKERS, seconds)
        await workers.work(crowd)
        return [warm_up], [crowd]
    finally:
        await workers.close()
