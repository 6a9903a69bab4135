"""Fetches of many tasks and readers of one process, in few calls of the keeper."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from persisting.errors import StorageError
from persisting.work.leased_records import LeasedRecord


class _Fetch(NamedTuple):
    """A task that waits for records."""

    limit: int
    lease: float
    future: asyncio.Future[list[LeasedRecord]]


class BatchedFetches:
    """Claims and reads records for all tasks that wait: one call is under way at a time.

    A claim is synced, and a read costs more than the record, so tasks that fetch single records
    would mostly wait for each other.
    """

    def __init__(
        self,
        fetch: Callable[[int, float], Awaitable[list[LeasedRecord]]],
        return_unused: Callable[[Sequence[LeasedRecord]], Awaitable[None]],
    ) -> None:
        self._fetch, self._return_unused = fetch, return_unused
        self._waiting: list[_Fetch] = []
        self._fetching: asyncio.Task[None] | None = None

    async def fetch(self, limit: int, lease: float) -> list[LeasedRecord]:
        """Return up to ``limit`` records, without waiting for new ones."""
        future: asyncio.Future[list[LeasedRecord]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Fetch(limit, lease, future))
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch_all())
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # The cancellation came after the records.
                await asyncio.shield(self._give_back(future.result()))
            raise

    async def finish(self) -> None:
        """Wait until no claim is under way, and records that no caller waits for are given back."""
        if self._fetching is not None:
            await asyncio.wait([self._fetching])

    async def _fetch_all(self) -> None:
        try:
            while self._waiting:
                lease = self._waiting[0].lease
                chosen = [fetch for fetch in self._waiting if fetch.lease == lease]
                self._waiting = [fetch for fetch in self._waiting if fetch.lease != lease]
                limit = sum(fetch.limit for fetch in chosen if not fetch.future.done())
                if not limit:
                    continue
                try:
                    records = await self._fetch(limit, lease)
                except BaseException as exc:
                    for fetch in chosen:
                        if not fetch.future.done():
                            fetch.future.set_exception(exc)
                    if not isinstance(exc, Exception):
                        raise
                    continue
                await self._give_back(_distribute(records, chosen))
        finally:
            self._fetching = None

    async def _give_back(self, records: Sequence[LeasedRecord]) -> None:
        """Give back what no task needs."""
        if records:
            with suppress(StorageError):  # the keeper has ended: the leases end by themselves
                await self._return_unused(records)


def _distribute(records: list[LeasedRecord], fetches: list[_Fetch]) -> list[LeasedRecord]:
    """Give every task its part; return what is left because tasks were cancelled."""
    first = 0
    for limit, _, future in fetches:
        if not future.done():
            future.set_result(records[first : first + limit])
            first += limit
    return records[first:]
