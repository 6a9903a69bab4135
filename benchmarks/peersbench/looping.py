"""For peers whose client is asynchronous: a store with an event loop of its own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from peersbench.kinds import Record
from peersbench.work import Store

_T = TypeVar("_T")


class LoopingStore(Store):
    """Puts one record or one batch in a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    @abstractmethod
    async def put(self, row: Record) -> None: ...

    @abstractmethod
    async def put_batch(self, rows: list[Record]) -> None: ...

    async def finish(self) -> None:
        """What belongs to storing, and comes after the last put."""

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        async def produce() -> None:
            for batch in batches:
                await self.put_batch(batch)
            await self.finish()

        self.run(produce())

    def singles(self, rows: Iterable[Record]) -> None:
        self.run(self._produce(rows))

    def crowd(self, shares: list[Iterable[Record]]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*(self._produce(share) for share in shares))

        self.run(all_at_once())

    async def _produce(self, rows: Iterable[Record]) -> None:
        for row in rows:
            await self.put(row)

    def close(self) -> None:
        self._loop.close()
