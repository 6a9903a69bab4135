"""One bucket on the node that owns it: the calls it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pulsing as pul

from persisting.bucket.snapshot import Page
from persisting.cluster import wire
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import within
from persisting.errors import BucketClosed, BucketLocked, StorageError
from persisting.topic.local import LocalBucketClient
from persisting.topic.table_calls import parse_call

_T = TypeVar("_T")

LANES = 4
"""Actors in front of a bucket: one answers one call at a time, and calls share syncs."""

KEEPALIVE_SECONDS = 5.0
"""A waiting stream writes now and then: only a write notices that its consumer has gone."""

STREAM_SECONDS = 240.0
"""Pulsing ends a stream silently after 300 s; before that we end it ourselves, to be resumed."""

STAGED_SECONDS = 60.0
"""How long pieces of a put wait for the rest of it."""

_FIRST_ROWS = 128
_MOST_ROWS = 8192


class BucketService:
    """Answers for a bucket while this node owns it."""

    def __init__(self, port: LocalBucketClient, place: str, bucket: int) -> None:
        self.port, self.place, self.bucket = port, place, bucket
        self.closed = False
        self._page_rows = _FIRST_ROWS
        self._staged: dict[str, list[list[bytes]]] = {}
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Keeps the bucket open for the length of a call."""
        if self.closed:
            raise self._gone()
        self._running += 1
        self._idle.clear()
        try:
            yield
        except BucketLocked as exc:
            raise self._gone() from exc
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _gone(self) -> BucketClosed:
        """The bucket moved, or was closed for new options and another node was faster."""
        self.closed = True
        return BucketClosed(f"bucket {self.bucket} is no longer here")

    async def direct(self, call: Callable[[LocalBucketClient], Awaitable[_T]]) -> _T:
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
            found = await operation(parts=request.rows, arrow=request.arrow, **request.args)
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

    async def _do_stage(self, parts: list[bytes], arrow: bool, upload: str, number: int) -> str:
        """Take a piece of a put that needs several messages."""
        staged = self._staged.setdefault(upload, [])
        if number == len(staged):  # else it is a repetition
            staged.append(parts)
            if number:
                self._forgetting[upload].cancel()
            loop = asyncio.get_running_loop()
            self._forgetting[upload] = loop.call_later(STAGED_SECONDS, self._take_staged, upload)
        return "staged"

    def _take_staged(self, upload: str) -> list[list[bytes]]:
        """The pieces of a put, which are not kept any longer."""
        timer = self._forgetting.pop(upload, None)
        if timer is not None:
            timer.cancel()
        return self._staged.pop(upload, [])

    async def _do_put(
        self,
        parts: list[bytes],
        arrow: bool,
        mark: list[Any],
        upload: str | None = None,
        staged: int = 0,
    ) -> str:
        """Store rows; "resend" if pieces that came before are not here."""
        if upload is not None:
            before = self._take_staged(upload)
            if len(before) != staged:
                return "resend"
            parts = [part for message in before for part in message] + parts
        if sum(map(len, parts)) > wire.MESSAGE_BYTES:
            rows = await asyncio.to_thread(wire.unpack_parts, parts, arrow)
        else:
            rows = wire.unpack_parts(parts, arrow)
        await self.port.put(rows, (mark[0], mark[1]))
        return "stored"

    async def _do_get(self, offset: int, limit: int | None) -> Reply:
        """A first page of what was asked for; the caller asks again for the rest."""
        return _page_reply(await self._page(offset, limit))

    async def _do_get_arrow(self, offset: int, limit: int | None) -> Reply:
        rows = self._page_rows if limit is None else min(limit, self._page_rows)
        return _page_reply(self._fitting(await self.port.read_arrow(offset, rows)))

    async def _do_table(self, op: str, args: dict[str, Any]) -> pul.StreamMessage:
        """A call to the bucket as a table; it may take long, so the answer is a stream."""
        message, writer = pul.StreamMessage.create("answer", buffer_size=4)
        self._keep(self._write_answer(writer, op, args))
        return message

    async def _do_find(self, timestamp: int) -> int:
        return await self.port.find(timestamp)

    async def _do_last_number(self, writer: str) -> int:
        return await self.port.last_number(writer)

    async def _do_flush(self) -> str:
        await self.port.flush()
        return "flushed"

    async def _do_stats(self) -> dict[str, Any]:
        return await self.port.stats()

    async def _do_stream(
        self, offset: int, limit: int | None, block: bool, epoch: int | None
    ) -> pul.StreamMessage:
        message, writer = pul.StreamMessage.create("pages", buffer_size=4)
        self._keep(self._write_stream(writer, offset, limit, block, epoch))
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
            while time.monotonic() < ends and not self.closed:
                end, epoch = await self.port.end(), await self.port.epoch()
                await writer.write(wire.encode(Reply([end, epoch])))
                await self._wait_or_keep_alive(writer, end, epoch)
            await writer.write(wire.encode(Reply("again")))
        except RuntimeError:
            return  # the consumer has gone
        except BucketLocked:
            await writer.write(wire.encode(wire.error_reply(self._gone())))
        except Exception as exc:
            await writer.write(wire.encode(wire.error_reply(exc)))
        finally:
            await writer.close()

    async def _write_answer(self, writer: Any, op: str, args: dict[str, Any]) -> None:
        call = asyncio.create_task(self.direct(lambda port: port.call(parse_call(op, args))))
        try:
            while not (await asyncio.wait([call], timeout=KEEPALIVE_SECONDS))[0]:
                await writer.write(wire.encode(Reply("alive")))
            try:
                replies = await asyncio.to_thread(wire.answer_replies, op, call.result())
            except Exception as exc:
                replies = [wire.error_reply(exc)]
            for reply in replies:
                await writer.write(wire.encode(reply))
        except RuntimeError:
            return  # the consumer has gone; what was begun goes on
        except Exception as exc:
            await writer.write(wire.encode(wire.error_reply(exc)))
        finally:
            await writer.close()

    async def _page(self, offset: int, limit: int | None) -> Page:
        """Rows that fit a message: as Arrow where the backend keeps a schema, else as records."""
        rows = self._page_rows if limit is None else min(limit, self._page_rows)
        if await self.port.keeps_schema():
            return self._fitting(await self.port.read_arrow(offset, rows))
        return self._fitting(await self.port.read(offset, rows))

    def _fitting(self, page: Page) -> Page:
        """As many of the rows as fit a message; remembers how many that may be."""
        rows = page.rows
        count = len(rows)
        if not count:
            return page
        size = rows.nbytes if not isinstance(rows, list) else len(wire.pack_records(rows))
        fits = max(1, wire.MESSAGE_BYTES * count // max(1, size))
        self._page_rows = max(1, min(fits // 2, 2 * self._page_rows, _MOST_ROWS))
        if fits >= count:
            return page
        return page._replace(rows=rows[:fits] if isinstance(rows, list) else rows.slice(0, fits))

    async def _write_stream(
        self, writer: Any, offset: int, limit: int | None, block: bool, epoch: int | None
    ) -> None:
        ends = time.monotonic() + STREAM_SECONDS
        left = limit
        try:
            while (left is None or left > 0) and not self.closed:
                page = await self._page(offset, left)
                if epoch not in (None, page.epoch):
                    await writer.write(wire.encode(Reply([offset, 0, page.epoch], rows=b"")))
                    return
                epoch = page.epoch
                if len(page.rows):
                    offset = page.first + len(page.rows)
                    left = None if left is None else left - len(page.rows)
                    await writer.write(wire.encode(_page_reply(page)))
                elif not block:
                    break
                elif time.monotonic() > ends:
                    await writer.write(wire.encode(Reply("again")))
                    return
                else:
                    await self._wait_or_keep_alive(writer, offset, epoch)
            await writer.write(wire.encode(Reply("again" if self.closed else "end")))
        except RuntimeError:
            return  # the consumer has gone
        except BucketLocked:
            await writer.write(wire.encode(wire.error_reply(self._gone())))
        except Exception as exc:
            await writer.write(wire.encode(wire.error_reply(exc)))
        finally:
            await writer.close()

    async def _wait_or_keep_alive(self, writer: Any, offset: int, epoch: int) -> None:
        try:
            await within(self.port.wait(offset, epoch), KEEPALIVE_SECONDS)
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


def _page_reply(page: Page) -> Reply:
    data, is_arrow = wire.pack_rows(page.rows)
    return Reply([page.first, len(page.rows), page.epoch], rows=data, arrow=is_arrow)
