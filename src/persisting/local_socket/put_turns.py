"""The order of puts that wait until the owners of their buckets are found."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Collection
from contextlib import asynccontextmanager


class PutTurns:
    """Lets the puts of one event loop continue in the order of their calls.

    A put that must find an owner first would be overtaken by one that is called when the owner has
    just been found: the event loop resumes the first put only later.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[_Turn]] = {}
        """By bucket, in the order of the calls."""

    def is_waited_for(self, bucket: int) -> bool:
        """Whether a put to a bucket waits."""
        return bucket in self._waiting

    @asynccontextmanager
    async def after(
        self, found: Awaitable[object], buckets: Collection[int]
    ) -> AsyncGenerator[None]:
        """Wait until the owners are ``found`` and no earlier put to these buckets waits.

        The caller must queue its put after the context without another await.
        """
        turn = _Turn(set(buckets))
        for bucket in turn.buckets:
            self._waiting.setdefault(bucket, deque()).append(turn)
        try:
            await found
            if not self._is_next(turn):
                turn.come = asyncio.get_running_loop().create_future()
                await turn.come
            yield
        finally:
            self._leave(turn)

    def _is_next(self, turn: _Turn) -> bool:
        return all(self._waiting[bucket][0] is turn for bucket in turn.buckets)

    def _leave(self, turn: _Turn) -> None:
        for bucket in turn.buckets:
            waiting = self._waiting[bucket]
            waiting.remove(turn)
            if not waiting:
                del self._waiting[bucket]
        for bucket in turn.buckets:
            following = self._waiting.get(bucket)
            if following and self._is_next(following[0]):
                following[0].begin()


class _Turn:
    """A put that waits."""

    def __init__(self, buckets: set[int]) -> None:
        self.buckets = buckets
        self.come: asyncio.Future[None] | None = None

    def begin(self) -> None:
        if self.come is not None and not self.come.done():
            self.come.set_result(None)
