"""Puts on their way to a bucket's owner: in order, several in one call, stored exactly once."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Any

from persisting.bucket.producer_sequences import ANONYMOUS
from persisting.bucket.put_cost import is_light
from persisting.cluster import wire
from persisting.cluster.locator import OwnerLocator
from persisting.cluster.wire import Request
from persisting.errors import SchemaError, StorageError
from persisting.topic.bucket_client import ProducerSequence, Rows

_UPLOAD_ATTEMPTS = 5


class _WaitingPut:
    """A put that waits for its turn while its rows are encoded."""

    def __init__(self, rows: Rows) -> None:
        self.encoding = asyncio.ensure_future(_encoded(rows))
        self.acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self, exc: BaseException | None = None) -> None:
        if self.acknowledged.done():
            return
        if exc is None:
            self.acknowledged.set_result(None)
        else:
            self.acknowledged.set_exception(exc)


class PutPipeline:
    """Sends puts in the order of their calls.

    Every message has a producer sequence, so that one that is sent again, also to another owner,
    is stored once. Puts that wait at the same time go out as one message.
    """

    def __init__(self, locator: OwnerLocator) -> None:
        self._locator = locator
        self._producer = ANONYMOUS + uuid.uuid4().hex
        self._sequence = -1
        self._queue: deque[_WaitingPut] = deque()
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._sending is not None and not self._sending.done()

    async def put(self, rows: Rows) -> None:
        """Store rows after those of earlier calls; return when they are acknowledged."""
        put = _WaitingPut(rows)
        self._queue.append(put)
        if not self.is_busy:
            self._sending = asyncio.create_task(self._send_queue())
        await put.acknowledged

    async def put_sequenced(self, rows: Rows, sequence: ProducerSequence) -> None:
        """Store rows under a producer's own sequence."""
        await self._send(*await _encoded(rows), sequence)

    async def drain(self) -> None:
        """Return when no put is under way."""
        if self._sending is not None and not self._sending.done():
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_queue(self) -> None:
        while self._queue:
            group = [self._queue.popleft()]
            failure: BaseException | None = None
            try:
                encoded, is_arrow = await group[0].encoding
                parts = list(encoded)
                if not is_arrow:
                    self._join_waiting(group, parts)
                await self._send_next(parts, is_arrow)
            except SchemaError as exc:
                if len(group) > 1:
                    await self._send_singly(group)
                    continue
                failure = exc
            except BaseException as exc:
                failure = exc
            for put in group:
                put.finish(failure)
            if isinstance(failure, asyncio.CancelledError):
                raise failure

    def _join_waiting(self, group: list[_WaitingPut], parts: list[bytes]) -> None:
        """Add the puts that wait next and are encoded, as far as one message holds them."""
        size = sum(map(len, parts))
        while self._queue and size < wire.MESSAGE_BYTES:
            encoding = self._queue[0].encoding
            if not encoding.done() or encoding.exception() is not None:
                return
            more, is_arrow = encoding.result()
            size += sum(map(len, more))
            if is_arrow or size > wire.MESSAGE_BYTES:
                return
            group.append(self._queue.popleft())
            parts += more

    async def _send_singly(self, group: list[_WaitingPut]) -> None:
        """Send each put of a group by itself, so that only the one that does not fit fails."""
        for put in group:
            try:
                await self._send_next(*await put.encoding)
            except Exception as exc:
                put.finish(exc)
            else:
                put.finish()

    async def _send_next(self, parts: list[bytes], is_arrow: bool) -> None:
        self._sequence += 1
        await self._send(parts, is_arrow, (self._producer, self._sequence))

    async def _send(self, parts: list[bytes], is_arrow: bool, sequence: ProducerSequence) -> None:
        """Send one put, in several messages if one cannot hold it; it is stored as a whole."""
        *before, last = wire.in_messages(parts)
        for _ in range(_UPLOAD_ATTEMPTS):
            args: dict[str, Any] = {"mark": list(sequence)}
            if before:
                upload = uuid.uuid4().hex
                for number, message in enumerate(before):
                    staging = {"upload": upload, "number": number}
                    await self._locator.ask(Request("stage", staging, message, is_arrow))
                args |= {"upload": upload, "staged": len(before)}
            reply = await self._locator.ask(Request("put", args, last, is_arrow))
            if reply.value != "resend":
                return
        raise StorageError(
            f"a put of {len(before) + 1} messages did not arrive as a whole in "
            f"{_UPLOAD_ATTEMPTS} attempts: the bucket's owner changed, or dropped the first "
            "messages, each time; put fewer rows at once"
        )


async def _encoded(rows: Rows) -> tuple[list[bytes], bool]:
    """Return rows as bytes, and whether these are Arrow; much work goes to a thread."""
    if isinstance(rows, list) and is_light(rows):
        return wire.pack_parts(rows)
    return await asyncio.to_thread(wire.pack_parts, rows)
