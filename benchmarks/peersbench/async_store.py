"""Base of stores with an asynchronous client: it runs them in its own event loop."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from peersbench.record_kinds import Record
from peersbench.workload import Store

_T = TypeVar("_T")


class AsyncStore(Store):
    """A store that puts a record or a batch in a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    @abstractmethod
    async def put(self, row: Record) -> None: ...

    @abstractmethod
    async def put_batch(self, rows: list[Record]) -> None: ...

    async def finish(self) -> None:
        """Make the last puts durable; timed as part of storing."""

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        async def produce() -> None:
            for batch in batches:
                await self.put_batch(batch)
            await self.finish()

        self.run(produce())

    def singles(self, rows: Iterable[Record]) -> None:
        self.run(self._produce(rows))

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        async def produce_all() -> None:
            await asyncio.gather(*(self._produce(share) for share in shares))

        self.run(produce_all())

    async def _produce(self, rows: Iterable[Record]) -> None:
        for row in rows:
            await self.put(row)

    def close(self) -> None:
        self._loop.close()
