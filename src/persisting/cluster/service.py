"""One bucket on the node that owns it: the calls it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pulsing as pul

from persisting.cluster import wire
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, StorageError
from persisting.topic.local import LocalPort

_T = TypeVar("_T")

LANES = 4
"""Actors in front of a bucket: one answers one call at a time, and calls share syncs."""

KEEPALIVE_SECONDS = 5.0
"""A waiting stream writes now and then: only a write notices that its consumer has gone."""

STREAM_SECONDS = 240.0
"""Pulsing ends a stream silently after 300 s; before that we end it ourselves, to be resumed."""

_PAGE_ROWS = 4096


class BucketService:
    """Answers for a bucket while this node owns it."""

    def __init__(self, port: LocalPort, place: str, bucket: int) -> None:
        self.port, self.place, self.bucket = port, place, bucket
        self.closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Keeps the bucket open for the length of a call."""
        if self.closed:
            raise BucketClosed(f"bucket {self.bucket} is no longer here")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def direct(self, call: Callable[[LocalPort], Awaitable[_T]]) -> _T:
        """A call from this very process, without the detour over bytes."""
        with self._under_way():
            return await call(self.port)

    async def answer(self, request: Request) -> Reply | pul.StreamMessage:
        """The reply to a request; never raises."""
        try:
            with self._under_way():
                return await self._answer(request)
        except Exception as exc:
            return wire.error_reply(exc)

    async def _answer(self, request: Request) -> Reply | pul.StreamMessage:
        operation: Callable[..., Any] | None = getattr(self, f"_do_{request.op}", None)
        if operation is None:
            raise StorageError(f"unknown call {request.op!r}; do all nodes run one version?")
        if request.rows is not None:
            rows = wire.unpack_rows(request.rows, request.arrow)
            found = await operation(rows=rows, **request.args)
        else:
            found = await operation(**request.args)
        return found if isinstance(found, (Reply, pul.StreamMessage)) else Reply(found)

    async def close(self) -> None:
        """Answer nothing more, and return when nothing is under way."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._idle.wait()

    async def _do_put(self, rows: Any, mark: list[Any]) -> str:
        await self.port.put(rows, (mark[0], mark[1]))
        return "stored"

    async def _do_get(self, offset: int, limit: int | None) -> Reply:
        return _rows_reply(await self._page(offset, limit))

    async def _do_get_arrow(self, offset: int, limit: int | None) -> Reply:
        return _rows_reply(await self.port.get_arrow(offset, limit))

    async def _do_find(self, timestamp: int) -> int:
        return await self.port.find(timestamp)

    async def _do_last_number(self, writer: str) -> int:
        return await self.port.last_number(writer)

    async def _do_flush(self) -> str:
        await self.port.flush()
        return "flushed"

    async def _do_stats(self) -> dict[str, Any]:
        return await self.port.stats()

    async def _do_stream(self, offset: int, limit: int | None, block: bool) -> pul.StreamMessage:
        message, writer = pul.StreamMessage.create("pages", buffer_size=4)
        self._keep(self._write_stream(writer, offset, limit, block))
        return message

    async def _do_watch(self) -> pul.StreamMessage:
        """A stream of the bucket's end, whenever it has moved."""
        message, writer = pul.StreamMessage.create("ends", buffer_size=4)
        self._keep(self._write_ends(writer))
        return message

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_ends(self, writer: Any) -> None:
        ends = time.monotonic() + STREAM_SECONDS
        try:
            while time.monotonic() < ends:
                end = await self.port.end()
                await writer.write(wire.encode(Reply(end)))
                await self._wait_or_keep_alive(writer, end)
            await writer.write(wire.encode(Reply("again")))
        except RuntimeError:
            return  # the consumer has gone
        except Exception as exc:
            await writer.write(wire.encode(wire.error_reply(exc)))
        finally:
            await writer.close()

    async def _page(self, offset: int, limit: int | None) -> Any:
        """Rows as Arrow where the backend keeps a schema, else as records."""
        if await self.port.keeps_schema():
            return await self.port.get_arrow(offset, limit)
        return await self.port.get(offset, limit)

    async def _write_stream(self, writer: Any, offset: int, limit: int | None, block: bool) -> None:
        ends = time.monotonic() + STREAM_SECONDS
        left = limit
        try:
            while left is None or left > 0:
                rows = await self._page(
                    offset, _PAGE_ROWS if left is None else min(left, _PAGE_ROWS)
                )
                if len(rows):
                    offset += len(rows)
                    left = None if left is None else left - len(rows)
                    await writer.write(wire.encode(_rows_reply(rows)))
                elif not block:
                    break
                elif time.monotonic() > ends:
                    await writer.write(wire.encode(Reply("again")))
                    return
                else:
                    await self._wait_or_keep_alive(writer, offset)
            await writer.write(wire.encode(Reply("end")))
        except RuntimeError:
            return  # the consumer has gone
        except Exception as exc:
            await writer.write(wire.encode(wire.error_reply(exc)))
        finally:
            await writer.close()

    async def _wait_or_keep_alive(self, writer: Any, offset: int) -> None:
        try:
            await asyncio.wait_for(self.port.wait(offset), KEEPALIVE_SECONDS)
        except asyncio.TimeoutError:
            await writer.write(wire.encode(Reply("alive")))


class BucketActor(pul.Actor):
    """One lane of a bucket."""

    def __init__(self, service: BucketService) -> None:
        self._service = service

    async def receive(self, msg: Any) -> Any:
        return await answered(msg, self._service.answer)


async def answered(msg: Any, answer: Callable[[Request], Any]) -> Any:
    """Decode a message, answer it, encode the reply. No exception may leave an actor."""
    try:
        reply = await answer(wire.decode_request(msg.payload))
        if isinstance(reply, pul.StreamMessage):
            return reply
        return pul.Message("reply", wire.encode(reply))
    except Exception as exc:
        return pul.Message("reply", wire.encode(wire.error_reply(exc)))


def _rows_reply(rows: Any) -> Reply:
    data, is_arrow = wire.pack_rows(rows)
    return Reply(rows=data, arrow=is_arrow)
