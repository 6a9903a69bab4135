"""The caller's side of the socket: many calls and streams at a time over one connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

from persisting.cluster import wire
from persisting.cluster.transport import (
    KEEPALIVE_SECONDS,
    Answered,
    PostingTarget,
    Unreachable,
)
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import within
from persisting.errors import StorageError
from persisting.local_socket import frames
from persisting.local_socket.frames import AnswerFrame, CallFrame, FrameBuffer, FrameDecoder
from persisting.local_socket.open_sockets import new_socket
from persisting.local_socket.peers import peer_of

SILENT_CHECKS = 4
"""An owner that sends nothing between this many checks, while calls wait, has failed. It may still
carry them out: that is why every put has a producer sequence.

Checks are counted, not seconds: time in which this process was stopped, perhaps together with the
owner, says nothing about the owner."""

_BUFFERED_REPLIES = 4
"""Replies of a stream on their way to a slow consumer before the owner waits."""


class WrongUser(StorageError):
    """The owner belongs to another user, so neither side trusts the other."""


class OwnerConnection(asyncio.BufferedProtocol):
    """A connection to the process that owns buckets of a topic."""

    def __init__(self, path: str, silent_checks: int = SILENT_CHECKS) -> None:
        self.path, self._most_silent_checks = path, silent_checks
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer()
        self._decoder = FrameDecoder(AnswerFrame)
        self._number = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._posted: dict[int, Answered] = {}
        self._streams: dict[int, _Replies] = {}
        self._failure: Unreachable | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._silent_checks = 0
        self._watching: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, path: str, silent_checks: int = SILENT_CHECKS) -> OwnerConnection:
        """Connect to a socket; raise :class:`Unreachable` if nobody listens there."""
        connected = new_socket()
        try:
            connected.setblocking(False)
            connected.connect(path)
            peer = peer_of(connected)
            if not peer.is_same_user:
                raise WrongUser(
                    f"the socket {path} belongs to process {peer.pid} of user {peer.user}; only "
                    "processes of one user share a topic"
                )
            connection = cls(path, silent_checks)
            await connection._loop.create_unix_connection(lambda: connection, sock=connected)
        except PermissionError as exc:
            connected.close()
            raise WrongUser(
                f"the socket {path} belongs to another user; only processes of one user share a "
                "topic"
            ) from exc
        except OSError as exc:
            connected.close()
            raise Unreachable(f"no process answers at the socket {path}: {exc.strerror}") from exc
        except BaseException:
            connected.close()
            raise
        return connection

    @property
    def closed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """End the connection; calls that are under way fail."""
        self._fail("this process has closed its connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked with isinstance: the transports of uvloop are not subclasses of it.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(frames.greeting())

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the owner has closed its connection, or died")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_checks = 0
        try:
            for data in self._buffer.received(nbytes):
                frame = self._decoder.decode(data)
                if frame is not None:
                    self._take(frame)
        except frames.BadFrame as exc:
            self._fail(str(exc))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _take(self, frame: AnswerFrame) -> None:
        answered = self._posted.pop(frame.id, None)
        if answered is not None:
            answered(frame.reply or Unreachable(f"{self.path}: a call ended without a reply"))
            return
        if frame.id in self._streams:
            self._streams[frame.id].add(frame.reply)
            return
        call = self._calls.get(frame.id)
        if call is not None and frame.reply is not None and not call.done():
            call.set_result(frame.reply)

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = Unreachable(f"{self.path}: {reason}")
        self._writable.set()
        if self._watching is not None:
            self._watching.cancel()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._failure)
        for replies in self._streams.values():
            replies.fail(self._failure)
        posted, self._posted = self._posted, {}
        for answered in posted.values():
            answered(self._failure)
        if self._transport is not None:
            self._transport.abort()

    def _watch(self) -> None:
        """Notice an owner that is stopped: it neither answers nor closes its connections."""
        self._watching = None
        if not self._calls and not self._streams and not self._posted:
            return
        self._silent_checks += 1
        if self._silent_checks > self._most_silent_checks:
            seconds = self._silent_checks * KEEPALIVE_SECONDS
            self._fail(f"the owner has not answered for {seconds:.0f} s; it may be stopped")
        else:
            self._watching = self._loop.call_later(KEEPALIVE_SECONDS, self._watch)

    async def _send(self, frame: CallFrame) -> None:
        data = frames.encoded(frame)
        if not self._writable.is_set():
            await self._writable.wait()
        assert self._transport is not None
        if self._transport.is_closing():
            self._fail("the owner has closed its connection, or died")
        if self._failure is not None:
            raise self._failure
        self._write(data)

    def _write(self, data: bytes | bytearray) -> None:
        assert self._transport is not None
        self._transport.write(data)
        if self._watching is None:
            self._silent_checks = 0
            self._watching = self._loop.call_later(KEEPALIVE_SECONDS, self._watch)

    def post(self, bucket: int, request: Request, answered: Answered) -> bool:
        """Send a request now, and call ``answered`` later; False if it cannot be sent now."""
        if self._transport is None or self._transport.is_closing() or self._failure is not None:
            return False
        if not self._writable.is_set():
            return False
        self._number += 1
        data = frames.encoded(CallFrame(self._number, bucket, request))
        self._posted[self._number] = answered
        self._write(data)
        return True

    async def ask(self, bucket: int, request: Request, timeout: float | None = None) -> Reply:
        """Return the reply to a request."""
        self._number += 1
        number = self._number
        call: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[number] = call
        try:
            await self._send(CallFrame(number, bucket, request))
            reply = await (call if timeout is None else self._in_time(call, timeout))
        finally:
            del self._calls[number]
            if call.done() and not call.cancelled():
                call.exception()  # retrieved, even if sending has failed first
        return wire.raise_error(reply)

    async def _in_time(self, call: asyncio.Future[Reply], seconds: float) -> Reply:
        try:
            return await within(call, seconds)
        except asyncio.TimeoutError as exc:
            raise Unreachable(f"{self.path}: no answer for {seconds:g} s") from exc

    async def stream(self, bucket: int, request: Request) -> AsyncGenerator[Reply, None]:
        """Yield the replies to a request."""
        self._number += 1
        number = self._number
        replies = self._streams[number] = _Replies()
        ended = False
        try:
            await self._send(CallFrame(number, bucket, request, _BUFFERED_REPLIES))
            while True:
                reply = await replies.next()
                if reply is None:
                    ended = True
                    raise Unreachable(f"{self.path}: a stream ended without a last reply")
                yield wire.raise_error(reply)
                await self._send(CallFrame(number, bucket, credit=1))
        finally:
            del self._streams[number]
            if not ended and self._transport is not None and not self._transport.is_closing():
                self._transport.write(frames.encoded(CallFrame(number, bucket)))


class _Replies:
    """Replies of a stream that have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._arrived: deque[Reply | None] = deque()
        self._failure: Unreachable | None = None
        self._more = asyncio.Event()

    def add(self, reply: Reply | None) -> None:
        self._arrived.append(reply)
        self._more.set()

    def fail(self, failure: Unreachable) -> None:
        self._failure = failure
        self._more.set()

    async def next(self) -> Reply | None:
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            self._more.clear()
            await self._more.wait()
        return self._arrived.popleft()


class BucketConnection(PostingTarget):
    """The way to one bucket: a :class:`~persisting.cluster.transport.Connection`."""

    def __init__(self, owner: OwnerConnection, bucket: int) -> None:
        self._owner, self._bucket = owner, bucket
        self.node = owner.path

    async def ask(self, request: Request, timeout: float | None = None) -> Reply:
        return await self._owner.ask(self._bucket, request, timeout)

    def post(self, request: Request, answered: Answered) -> bool:
        return self._owner.post(self._bucket, request, answered)

    def stream(self, request: Request) -> AsyncGenerator[Reply, None]:
        return self._owner.stream(self._bucket, request)


class Connections:
    """The connections of one event loop, one per owner."""

    def __init__(self, silent_checks: int = SILENT_CHECKS) -> None:
        self._silent_checks = silent_checks
        self._open: dict[str, OwnerConnection] = {}
        self._opening = asyncio.Lock()

    async def to(self, path: str) -> OwnerConnection:
        """Return a connection to the owner that listens at ``path``."""
        async with self._opening:
            connection = self._open.get(path)
            if connection is None or connection.closed:
                self._open = {p: c for p, c in self._open.items() if not c.closed}
                connection = await OwnerConnection.open(path, self._silent_checks)
                self._open[path] = connection
            return connection

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()
