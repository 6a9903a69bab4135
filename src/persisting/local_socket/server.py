"""The owner's side of the socket: answers the calls of other processes about one topic."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast

from persisting import fs as filesystem
from persisting.cluster import wire
from persisting.cluster.transport import KEEPALIVE_SECONDS, Answer, ReplyStream
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import in_thread
from persisting.errors import BucketClosed, BucketLocked, InvalidArgument, StorageError
from persisting.local_socket import addresses, frames, loop_thread
from persisting.local_socket.frames import AnswerFrame, CallFrame, FrameBuffer, FrameDecoder
from persisting.local_socket.open_buckets import OpenBuckets
from persisting.local_socket.open_sockets import accept
from persisting.local_socket.peers import Peer, peer_of
from persisting.local_socket.quick_puts import QuickPuts
from persisting.topic import spec as topics
from persisting.topic import store_config
from persisting.topic.local import LocalTopic
from persisting.topic.registry import get_backend_class
from persisting.topic.spec import TopicConfig

log = logging.getLogger("persisting")

CALLS_AT_ONCE = 256
"""Calls of one connection under way before no more are read from it."""

_PUTS = frozenset({"put", "put_parts"})
_PAUSE_SECONDS = 0.01
_ACCEPT_PAUSE_SECONDS = 0.5
_END_SECONDS = 1.0
"""How long the last replies of a connection may take."""


_STORED = Reply("stored")


class TopicServer:
    """Listens for one topic while this process has it open."""

    def __init__(self, topic: LocalTopic) -> None:
        self._topic = topic
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: socket.socket | None = None
        self._path: Path | None = None
        self._buckets: OpenBuckets | None = None
        self._quick: QuickPuts | None = None
        self._connections: set[_ServerConnection] = set()
        self._starting_over: asyncio.Task[None] | None = None

    def start(self) -> str | None:
        """Listen, and return the socket's path; None if this is not possible. Blocking."""
        with self._guard:
            if self._loop is None:
                try:
                    self._listening, self._path = addresses.listen(self._topic.folder)
                except OSError as exc:
                    log.warning(
                        "topic %r cannot listen for other processes, which find its buckets "
                        "locked: %s",
                        self._topic.config.topic,
                        exc,
                    )
                    return None
                self._loop = loop_thread.acquire()
                loop_thread.run_blocking(self._begin(), self._loop)
            return str(self._path)

    async def _begin(self) -> None:
        self._buckets = OpenBuckets(self._topic)
        self._quick = QuickPuts(self._topic, self._buckets)
        self._watch_listening()

    def _watch_listening(self) -> None:
        if self._listening is not None and self._listening.fileno() >= 0:
            assert self._loop is not None
            self._loop.add_reader(self._listening, self._accept_all)

    def _accept_all(self) -> None:
        assert self._listening is not None
        assert self._loop is not None
        while True:
            try:
                connected = accept(self._listening)
            except BlockingIOError:
                return
            except OSError as exc:  # too many open files, most likely
                log.warning("cannot accept a connection of another process: %s", exc)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._watch_listening)
                return
            self._admit(connected)

    def _admit(self, connected: socket.socket) -> None:
        assert self._loop is not None
        try:
            peer = peer_of(connected)
        except OSError:
            connected.close()
            return
        if not peer.is_same_user:
            log.warning("refused a connection of process %s of user %s", peer.pid, peer.user)
            connected.close()
            return
        connection = _ServerConnection(self, peer, connected)
        self._connections.add(connection)
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, sock=connected)
        )
        task.add_done_callback(lambda done: self._admitted(done, connection, connected))

    def _admitted(
        self, task: asyncio.Task[Any], connection: _ServerConnection, connected: socket.socket
    ) -> None:
        if task.cancelled() or task.exception() is not None:
            self.left(connection)
            connected.close()

    def left(self, connection: _ServerConnection) -> None:
        self._connections.discard(connection)

    def put_soon(self, bucket: int, request: Request, waiter: _PutWaiter) -> bool:
        """Queue a put for the log immediately if that is possible; its connection gets the
        answer."""
        if self._quick is None or not threading.main_thread().is_alive():
            return False
        return self._quick.enqueue(bucket, request, waiter, alone=len(self._connections) == 1)

    def ends_with_caller(self, request: Request) -> bool:
        """Whether a call is cancelled when the process that made it has ended."""
        return False

    async def answer(self, bucket: int, request: Request) -> Answer:
        """Return the answer to a request; errors become replies."""
        try:
            _check_running()
            if bucket == frames.TOPIC:
                return Reply(await self._answer_for_topic(request))
            assert self._buckets is not None
            service = self._buckets.service(bucket)
            if service is None:
                if self._topic.is_lost(bucket):
                    self.start_over_soon()
                if bucket in self._topic.opening and request.op == "here":
                    return Reply("opening")
                raise BucketClosed(f"bucket {bucket} is not open in process {os.getpid()}")
            if request.op == "here":
                return Reply("here")
            answer = await service.answer(request)
            if isinstance(answer, Reply) and answer.error:
                _check_running()
            return answer
        except Exception as exc:
            return wire.error_reply(exc)

    async def _answer_for_topic(self, request: Request) -> Any:
        if request.op == "reconfigure":
            await self._reconfigure()
            return "reconfigured"
        if request.op == "open":
            await self._open(**request.args)
            return "open"
        raise wire.unknown_request(request.op)

    async def _open(self, bucket: int) -> None:
        """Open a bucket that another process needs and nobody owns."""
        if not 0 <= bucket < self._topic.config.num_buckets:
            raise InvalidArgument(f"the topic has no bucket {bucket}")
        if self._topic.is_lost(bucket):
            raise BucketClosed(f"process {os.getpid()} has lost bucket {bucket}")
        await self._topic.backend(bucket)

    async def _reconfigure(self) -> None:
        """Reopen the buckets as the topic file says, which another process has changed."""
        config = await in_thread(self._stored_config)
        if config is None:
            return
        owned = self._topic.buckets_open
        await self._topic.reconfigure(config, get_backend_class(config.backend))
        for bucket in owned:  # otherwise the next process that needs one would become its owner
            with suppress(BucketLocked):
                await self._topic.backend(bucket)

    def _stored_config(self) -> TopicConfig | None:
        if self._topic.store is not None:
            return store_config.load(self._topic.store)
        assert self._topic.folder is not None
        return topics.load(self._topic.folder, filesystem.current())

    async def refuse(self) -> None:
        """Stop answering calls about buckets, and wait until none is under way."""
        if self._loop is not None and self._buckets is not None:
            await loop_thread.run_elsewhere(self._buckets.refuse(), self._loop)

    async def start_over(self) -> None:
        """Have the topic close what was lost; continues even if the caller is cancelled."""
        if self._loop is None:  # no socket could be opened
            await self._topic.start_over()
        else:
            joined = asyncio.run_coroutine_threadsafe(self._join_start_over(), self._loop)
            await asyncio.shield(asyncio.wrap_future(joined))

    def start_over_soon(self) -> None:
        """The same in the background, from any thread."""
        loop = self._loop  # another thread may be about to forget it
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._begin_start_over)

    def _begin_start_over(self) -> asyncio.Task[None]:
        if self._starting_over is None or self._starting_over.done():
            assert self._loop is not None
            self._starting_over = self._loop.create_task(self._start_over())
        return self._starting_over

    async def _join_start_over(self) -> None:
        await asyncio.shield(self._begin_start_over())

    async def _start_over(self) -> None:
        try:
            await self._topic.start_over()
        except StorageError as exc:
            log.warning("topic %r cannot close its buckets: %s", self._topic.config.topic, exc)

    async def stop(self) -> None:
        """Stop listening and end all connections."""
        if self._loop is not None:
            await loop_thread.run_elsewhere(self._end(), self._loop)
            loop_thread.release()
            self._loop = None

    async def _end(self) -> None:
        assert self._loop is not None
        assert self._listening is not None
        assert self._path is not None
        self._loop.remove_reader(self._listening)
        with suppress(OSError):
            self._path.unlink()
        self._listening.close()
        await asyncio.gather(*(connection.end() for connection in list(self._connections)))


def _check_running() -> None:
    """Raise if this process is exiting: what fails without its threads succeeds at the next
    owner."""
    if not threading.main_thread().is_alive():
        raise BucketClosed("the owner is exiting")


class _PutWaiter:
    """A call that waits for its put."""

    __slots__ = ("number", "sink")

    def __init__(self, sink: _ServerConnection, number: int) -> None:
        self.sink, self.number = sink, number


class _ServerConnection(asyncio.BufferedProtocol):
    """The calls of one process, any number of them under way."""

    is_here = False

    def __init__(self, server: TopicServer, peer: Peer, connected: socket.socket) -> None:
        self._server, self._peer, self._socket = server, peer, connected
        self._puts: set[int] = set()
        """Calls whose puts are queued for the log; they have no task."""
        self._slow_puts: set[int] = set()
        """Puts among the calls that have a task."""
        self._writing = threading.Lock()
        """Held while a thread writes to the connection, or closes it."""
        self._waiting: list[bytes | bytearray] | None = None
        """What must be written before anything else, in the event loop."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer()
        self._decoder = FrameDecoder(CallFrame)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, _Credit] = {}
        self._ended_with_caller: set[int] = set()
        """Calls that are cancelled when the connection is lost."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._keepalive: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked with isinstance: the transports of uvloop are not subclasses of it.
        transport = cast("asyncio.Transport", transport)
        # Then the buffer of the transport is empty unless writing is paused.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self._write(frames.greeting())

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        if not self._gone.done():
            self._gone.set_result(None)
        self._writable.set()
        with self._writing:
            self._transport = None
        for number in {*self._streams, *self._ended_with_caller}:
            self._calls[number].cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.space()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for data in self._buffer.received(nbytes):
                frame = self._decoder.decode(data)
                if frame is not None:
                    self._take(frame)
        except Exception as exc:
            log.warning("closed the connection of process %s: %s", self._peer.pid, exc)
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _take(self, frame: CallFrame) -> None:
        if frame.request is None:
            if frame.credit > 0 and frame.id in self._streams:
                self._streams[frame.id].add(frame.credit)
            elif frame.credit == 0 and frame.id in self._calls:
                self._calls[frame.id].cancel()
            return
        if frame.id in self._calls or frame.id in self._puts or frame.id <= 0:
            raise frames.BadFrame(f"the number {frame.id} of a call is in use")
        if self._keepalive is None:
            self._keepalive = self._loop.call_later(KEEPALIVE_SECONDS, self._send_keepalive)
        if frame.request.op in _PUTS:
            if self._is_quick and self._put_soon(frame.id, frame.bucket, frame.request):
                return
            self._slow_puts.add(frame.id)
        task = self._loop.create_task(self._answer(frame.id, frame.bucket, frame.request, frame))
        self._calls[frame.id] = task
        if self._server.ends_with_caller(frame.request):
            self._ended_with_caller.add(frame.id)
        task.add_done_callback(lambda _: self._finished(frame.id))
        self._limit_calls()

    @property
    def _is_quick(self) -> bool:
        """Whether a put needs no task. It must not overtake one that has a task, and for a peer
        that reads no answers only tasks are limited."""
        return not self._slow_puts and len(self._puts) < CALLS_AT_ONCE and self._writable.is_set()

    def _put_soon(self, number: int, bucket: int, request: Request) -> bool:
        self._puts.add(number)
        if self._server.put_soon(bucket, request, _PutWaiter(self, number)):
            return True
        self._puts.discard(number)
        return False

    def deliver(self, waiters: Sequence[_PutWaiter], exc: BaseException | None) -> None:
        """Answer calls whose puts have ended; called by the thread that writes the log, or by the
        event loop if it does."""
        if exc is not None and not threading.main_thread().is_alive():
            exc = BucketClosed("the owner is exiting")
        reply = _STORED if exc is None else wire.error_reply(exc)
        answers = [_encoded(AnswerFrame(waiter.number, reply))[0] for waiter in waiters]
        self._puts.difference_update([waiter.number for waiter in waiters])
        self._write_from_thread(answers[0] if len(answers) == 1 else b"".join(answers))

    def after_turn(self, call: Callable[[], Any]) -> bool:
        """Quick puts start the log themselves when all frames that arrived together are taken."""
        return False

    def _finished(self, number: int) -> None:
        self._calls.pop(number, None)
        self._streams.pop(number, None)
        self._slow_puts.discard(number)
        self._ended_with_caller.discard(number)
        self._limit_calls()

    def _limit_calls(self) -> None:
        """Stop reading while very many calls are under way. Streams wait for their consumers, and
        calls that end with their caller wait for something to happen, so neither count."""
        waiting = len(self._streams) + len(self._ended_with_caller)
        many = len(self._calls) - waiting >= CALLS_AT_ONCE
        if many != self._paused and self._transport is not None:
            self._paused = many
            if many:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _send_keepalive(self) -> None:
        self._keepalive = None
        if (self._calls or self._puts) and self._transport is not None:
            if self._writable.is_set():
                self._write(frames.encoded(AnswerFrame(0)))
            self._keepalive = self._loop.call_later(KEEPALIVE_SECONDS, self._send_keepalive)

    async def _answer(self, number: int, bucket: int, request: Request, frame: CallFrame) -> None:
        answer = await self._server.answer(bucket, request)
        if isinstance(answer, ReplyStream):
            self._streams[number] = _Credit(frame.credit)
            self._limit_calls()
            await self._send_stream(number, answer, self._streams[number])
        else:
            await self._send(number, answer)

    async def _send_stream(self, number: int, stream: ReplyStream, credit: _Credit) -> None:
        async with aclosing(stream.replies) as replies:
            await credit.take()
            async for reply in replies:
                if not await self._send(number, reply, streamed=True):
                    break
                await credit.take()
        self._write(frames.encoded(AnswerFrame(number)))

    async def _send(self, number: int, reply: Reply, streamed: bool = False) -> bool:
        """Send a reply when the connection takes it; False if another had to be sent."""
        if not self._writable.is_set():
            await self._writable.wait()
        data, sendable = _encoded(AnswerFrame(number, reply, streamed))
        self._write(data)
        return sendable

    def _write(self, data: bytes | bytearray) -> None:
        with self._writing:
            if self._waiting is not None:
                self._waiting.append(data)
            elif self._transport is not None and not self._transport.is_closing():
                self._transport.write(data)

    def _write_from_thread(self, data: bytes | bytearray) -> None:
        """Write from any thread; that saves a switch to the event loop's."""
        with self._writing:
            if self._transport is None or self._transport.is_closing():
                return
            sent = 0
            if self._waiting is None:
                if self._writable.is_set():
                    try:
                        sent = self._socket.send(data)
                    except BlockingIOError:
                        pass
                    except OSError:
                        return  # the event loop notices, too
                if sent == len(data):
                    return
                with suppress(RuntimeError):  # the event loop has ended
                    self._loop.call_soon_threadsafe(self._write_waiting)
                self._waiting = []
            self._waiting.append(data[sent:])

    def _write_waiting(self) -> None:
        with self._writing:
            waiting, self._waiting = self._waiting or [], None
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write(b"".join(waiting))

    async def end(self) -> None:
        """Finish what is under way and close the connection."""
        for number in list(self._streams):
            self._calls[number].cancel()
        calls = list(self._calls.values())
        if calls:
            await asyncio.wait(calls, timeout=KEEPALIVE_SECONDS)
        deadline = self._loop.time() + KEEPALIVE_SECONDS
        while self._puts and self._loop.time() < deadline:  # noqa: ASYNC110 (set by threads)
            await asyncio.sleep(_PAUSE_SECONDS)
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._gone], timeout=_END_SECONDS)
        if self._transport is not None:  # its peer does not read
            self._transport.abort()
            await self._gone


def _encoded(frame: AnswerFrame) -> tuple[bytearray, bool]:
    """Return an answer as bytes; if it cannot be sent, an error instead of it, and False."""
    try:
        return frames.encoded(frame), True
    except Exception as exc:
        error = AnswerFrame(frame.id, wire.error_reply(exc), frame.streamed)
        return frames.encoded(error), False


class _Credit:
    """How many replies a stream may still send."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._more = asyncio.Event()

    def add(self, count: int) -> None:
        self._count += count
        self._more.set()

    async def take(self) -> None:
        while self._count <= 0:
            self._more.clear()
            await self._more.wait()
        self._count -= 1
