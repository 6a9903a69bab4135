"""Endpoints as Pulsing actors: requests come in as messages, replies go out as one or a stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pulsing as pul

from persisting.cluster import wire
from persisting.cluster.pulsing_messages import message, payload_of, reads_text
from persisting.cluster.transport import Answering, ReplyStream, StopHook
from persisting.cluster.wire import Reply

_BUFFERED_REPLIES = 4
"""Replies of a stream that wait for a slow consumer before the sender does."""


class EndpointActor(pul.Actor):
    """Decodes each message, has it answered and encodes the reply.

    No exception may leave ``receive``: Pulsing would lose its class.
    """

    def __init__(self, answering: Answering, on_stop: StopHook | None = None) -> None:
        self._answering, self._on_stop = answering, on_stop
        self._streams: set[asyncio.Task[None]] = set()

    async def receive(self, msg: Any) -> Any:
        try:
            answer = await self._answering(wire.decode_request(payload_of(msg)))
            if isinstance(answer, ReplyStream):
                return self._start(answer)
            return _reply(msg, answer)
        except Exception as exc:
            return _reply(msg, wire.error_reply(exc))

    def _start(self, stream: ReplyStream) -> pul.StreamMessage:
        streamed, writer = pul.StreamMessage.create(stream.kind, buffer_size=_BUFFERED_REPLIES)
        task = asyncio.create_task(_send_all(stream, writer))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return streamed

    async def on_stop(self) -> None:
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        if self._on_stop is not None:
            await self._on_stop()


def _reply(request: Any, answer: Reply) -> Any:
    answer.reads_text = True
    return message("reply", wire.encode(answer), as_text=reads_text(request))


async def _send_all(stream: ReplyStream, writer: Any) -> None:
    """Write the replies as fast as their consumer takes them."""
    try:
        async with aclosing(stream.replies) as replies:
            async for reply in replies:
                try:
                    data = wire.encode(reply)
                except Exception as exc:
                    await writer.write(wire.encode(wire.error_reply(exc)))
                    return
                await writer.write(data)
    except RuntimeError:
        return  # the consumer has ended
    finally:
        await writer.close()
