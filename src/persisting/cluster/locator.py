"""Finding the owner of a bucket, and finding it again when the bucket moves."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from persisting.cluster import wire
from persisting.cluster.service import BucketService
from persisting.cluster.transport import (
    Connection,
    ReplyStream,
    RequestTarget,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, StorageError

PATIENCE_SECONDS = 30.0
"""How long a call searches for a bucket's owner before it raises."""

LOST = (Unreachable, BucketClosed)
"""Errors after which the owner is searched for again: it died, or the bucket moved."""


class Patience:
    """Time to find an owner; renewed by every answer."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._may_retry = True

    def allow_retry(self) -> None:
        """Leave time for one more search: this process may have been stopped since the last one."""
        if self._may_retry:
            self._may_retry = False
            self._deadline = max(self._deadline, time.monotonic() + PATIENCE_SECONDS / 6)

    @property
    def exhausted(self) -> bool:
        return time.monotonic() > self._deadline


class OwnerLocator(ABC):
    """The way to the owner of one bucket, wherever that is."""

    pause_seconds = 0.1
    """How long to wait before an owner that was lost is searched for again."""

    def __init__(self, here: str) -> None:
        """``here`` is the id of this process as an owner."""
        self._here = here
        self._owner: Connection | None = None
        self._is_searching = False
        self._waiting: list[_WaitingCall] = []
        """Calls that wait for the search of another one."""

    @abstractmethod
    def local_service(self) -> BucketService | None:
        """Return the bucket itself if this process owns it."""

    @abstractmethod
    async def _search(self, patience: Patience) -> Connection:
        """Find the owner; raise if there is none when patience is exhausted."""

    @abstractmethod
    def _unavailable(self, failure: str) -> StorageError:
        """Return the error for an owner that cannot be found or does not answer."""

    @property
    def node(self) -> str | None:
        """The node that owns the bucket, as far as it is known."""
        if self.local_service() is not None:
            return self._here
        return self._owner.node if self._owner is not None else None

    @property
    def remote_node(self) -> str | None:
        """The node that owns the bucket if it is known and not this process."""
        return None if self.local_service() is not None or self._owner is None else self._owner.node

    def connection(self) -> RequestTarget | None:
        """Return the way to the owner, None while the owner is not known."""
        service = self.local_service()
        return self._owner if service is None else LocalConnection(service, self._here)

    async def locate(self, patience: Patience) -> str:
        """Return the node that owns the bucket; if it is not known, find it first."""
        return self.node or (await self._find(patience)).node

    async def ask(self, request: Request) -> Reply:
        """Send a request to the owner until it answers or patience runs out."""
        patience = Patience()
        while True:
            try:
                return await (self.connection() or await self._find(patience)).ask(request)
            except LOST as exc:
                await self.lost(exc, patience)

    async def stream(self, request: Request, patience: Patience) -> AsyncGenerator[Reply, None]:
        """Yield the owner's replies; every one of them renews ``patience``.

        Raises one of :data:`LOST` when the owner is lost: call :meth:`lost`, then resume.
        """
        owner = await self._find(patience)
        replies = owner.stream(request)
        try:
            async for reply in replies:
                patience.renew()
                yield reply
                patience.renew()  # a slow consumer's time is not the owner's
        finally:
            await replies.aclose()

    async def lost(self, exc: Exception, patience: Patience) -> None:
        """Forget the owner and pause, or raise if patience is exhausted."""
        self.forget()
        patience.allow_retry()
        if patience.exhausted:
            raise self._unavailable(str(exc)) from exc
        await asyncio.sleep(self.pause_seconds)

    def forget(self) -> None:
        """Search for the owner again at the next call."""
        self._owner = None

    async def reopen(self) -> None:
        """Have a node open the bucket with the topic's present configuration."""
        self.forget()
        await self._find(Patience())

    async def _find(self, patience: Patience) -> Connection:
        """Return the owner. One call searches; the others wait for it and continue in their order.

        If the search fails, so do the calls that have waited for at least half of it: each would
        search for as long, one after the other.
        """
        while self._owner is None:
            if self._is_searching:
                waiting = _WaitingCall()
                self._waiting.append(waiting)
                failure = await waiting.ended
                if failure is not None:
                    raise failure.with_traceback(None)
                continue
            self._is_searching = True
            began = time.monotonic()
            try:
                self._owner = await self._search(patience)
            except Exception as exc:
                self._end_search(exc, began + (time.monotonic() - began) / 2)
                raise
            except BaseException:
                self._end_search()
                raise
            self._end_search()
        return self._owner

    def _end_search(self, failure: Exception | None = None, until: float = 0.0) -> None:
        """Wake the calls that wait; those that began before ``until`` get ``failure``."""
        self._is_searching = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not call.ended.done():  # otherwise it was cancelled
                call.ended.set_result(failure if call.since <= until else None)


class _WaitingCall:
    """A call that waits for the search of another one."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        """Its result is the failure of the search, None if there may be an owner now."""


class LocalConnection:
    """A bucket of this process, asked as if it were elsewhere."""

    def __init__(self, service: BucketService, node: str) -> None:
        self._service, self.node = service, node

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        return checked(await self._service.answer(request))

    async def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        answer = await self._service.answer(request)
        if not isinstance(answer, ReplyStream):
            wire.raise_error(answer)
            raise Unreachable(f"{request.op!r} was answered without a stream")
        try:
            async for reply in answer.replies:
                yield wire.raise_error(reply)
        finally:
            await answer.replies.aclose()
        raise Unreachable("a stream ended without a last reply")


def checked(answer: Reply | ReplyStream) -> Reply:
    """Return the reply of a service in this process, or raise its error."""
    assert isinstance(answer, Reply)
    return wire.raise_error(answer)
