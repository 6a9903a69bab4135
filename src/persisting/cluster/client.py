"""The using side: a bucket on whichever node owns it, found again when it moves."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pulsing as pul
import pyarrow as pa

from persisting.bucket.producer_sequences import ANONYMOUS
from persisting.bucket.put_cost import is_light
from persisting.bucket.snapshot import Page
from persisting.cluster import wire
from persisting.cluster.host import HOST_NAME, host_here, living_hosts
from persisting.cluster.peers import Unreachable, ask, ask_stream, plain
from persisting.cluster.placement import bucket_key, ranked
from persisting.cluster.service import KEEPALIVE_SECONDS, LANES, BucketService
from persisting.cluster.wire import Reply, Request
from persisting.concurrency.pool import within
from persisting.errors import (
    BucketClosed,
    BucketLocked,
    InvalidArgument,
    OffsetOutOfRange,
    SchemaError,
    StorageError,
)
from persisting.records import Rules
from persisting.records.arrow import align, merge
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.spec import TopicConfig
from persisting.topic.table_calls import T, TableCall

PATIENCE_SECONDS = 30.0
"""How long a call looks for a bucket's owner before it raises."""

_OPEN_SECONDS = 8.0
_PAUSE = 0.1
_WATCH_SECONDS = 30.0
_SENDINGS = 5
_MOST = (1 << 63) - 1


class Waiting:
    """A put that waits for its turn: its rows on their way to bytes, and whom to tell."""

    def __init__(self, packing: asyncio.Future[tuple[list[bytes], bool]]) -> None:
        self.packing = packing
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class RemoteTopic:
    """A topic whose buckets live on the nodes of a system."""

    def __init__(
        self,
        system: Any,
        place: str,
        storage_path: str | None,
        config: TopicConfig,
        home: str | None,
    ) -> None:
        """``home`` is the node that holds a topic in memory, which cannot move."""
        self._system, self._place, self._config, self._home = system, place, config, home
        self._storage_path = storage_path
        self._ports: dict[int, RemoteBucketClient] = {}

    @property
    def name(self) -> str:
        return self._config.topic

    @property
    def num_buckets(self) -> int:
        return self._config.num_buckets

    @property
    def bucket_column(self) -> str:
        return self._config.bucket_column

    @property
    def batch_size(self) -> int:
        return self._config.batch_size

    @property
    def folder(self) -> Path | None:
        return None if self._home is not None else Path(self._place)

    def bucket(self, bucket: int) -> RemoteBucketClient:
        if bucket not in self._ports:
            opening = Request(
                "open",
                {
                    "place": self._place,
                    "storage_path": self._storage_path,
                    "config": msgspec.to_builtins(self._config),
                    "bucket": bucket,
                },
            )
            self._ports[bucket] = RemoteBucketClient(
                self._system, bucket_key(self._place, bucket), opening, self._home
            )
        return self._ports[bucket]

    async def close(self) -> None:
        """Wait for what is under way; the buckets stay with their owners."""
        for port in self._ports.values():
            await port.close()

    async def reopen(self) -> None:
        """Have every owner go on with the topic's new configuration."""
        await asyncio.gather(*(self.bucket(b).reopen() for b in range(self.num_buckets)))


class Owner:
    """Where a bucket was found: a node and the door to one of its lanes."""

    def __init__(self, node: str, ref: Any) -> None:
        self.node, self.ref = node, ref


class RemoteBucketClient:
    """A bucket of a cluster."""

    def __init__(self, system: Any, key: str, opening: Request, home: str | None) -> None:
        self._system, self._key, self._opening, self._home = system, key, opening, home
        self._writer = ANONYMOUS + uuid.uuid4().hex
        self._number = -1
        self._lane = uuid.uuid4().int % LANES
        self._owner: Owner | None = None
        self._held: str | None = None
        self._finding = asyncio.Lock()
        self._queue: deque[Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._end = 0
        self._epoch: int | None = None
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    # Finding the owner

    def _service(self) -> BucketService | None:
        """The bucket itself, if this very process owns it."""
        host = host_here(self._system)
        service = host.buckets.get(self._key) if host is not None else None
        return service if service is not None and not service.closed else None

    async def _find(self, deadline: float) -> Owner:
        async with self._finding:
            if self._owner is not None:
                return self._owner
            hint: str | None = None
            held: str | None = None
            last = "no node hosts buckets; call persisting.cluster.serve(system) on one"
            while True:
                hosts = await living_hosts(self._system)
                order = [self._home] if self._home else ranked(self._key, hosts)
                if hint in hosts:
                    order = [hint, *(node for node in order if node != hint)]
                for node in order:
                    try:
                        self._owner = await self._open_on(node)
                        self._held = None
                        return self._owner
                    except BucketLocked as exc:
                        held, owner = str(exc), exc.owner.get("node")
                        hint = owner if owner != node else None
                    except Unreachable as exc:
                        last = str(exc)
                self._held = held or self._held
                if time.monotonic() > deadline:
                    raise _unavailable(self._key, self._opening, self._held or last, hint)
                await asyncio.sleep(_PAUSE)

    async def _open_on(self, node: str) -> Owner:
        """Have a node own the bucket, and a way to it."""
        host = host_here(self._system)
        if host is not None and host.node == node:
            reply = await asyncio.shield(host.answer(self._opening))
            if reply.error is not None:
                raise wire.rebuilt(*reply.error)
        else:
            door = await self._resolve(HOST_NAME, node)
            reply = await ask(door, node, self._opening, _OPEN_SECONDS)
        if "leaving" in reply.value:
            raise Unreachable(f"node {node} is shutting down")
        if "locked" in reply.value:
            raise BucketLocked(reply.value["text"], owner=reply.value["locked"])
        return Owner(node, await self._resolve(f"{self._key}/{self._lane}", node))

    async def _resolve(self, name: str, node: str) -> Any:
        try:
            return await within(self._system.resolve_named(name, node_id=int(node)), _OPEN_SECONDS)
        except (RuntimeError, pul.PulsingError, asyncio.TimeoutError) as exc:
            raise Unreachable(f"node {node} cannot be reached: {plain(exc)}") from exc

    async def _call(
        self, op: str, args: dict[str, Any], rows: list[bytes] | None = None, arrow: bool = False
    ) -> Reply:
        """Call the owner, whoever it is by then, until it answers or patience ends."""
        request = Request(op, _sendable(args), rows, arrow)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            service = self._service()
            if service is not None:
                reply = await service.answer(request)
                if reply.error is None:
                    return reply
                error: Exception = wire.rebuilt(*reply.error)
            else:
                owner = await self._find(deadline)
                try:
                    return await ask(owner.ref, owner.node, request)
                except (Unreachable, BucketClosed) as exc:
                    error = exc
            if not isinstance(error, (Unreachable, BucketClosed)):
                raise error
            self._owner = None
            if time.monotonic() > deadline:
                raise _unavailable(
                    self._key, self._opening, self._held or str(error), None
                ) from error
            await asyncio.sleep(_PAUSE)

    # Putting

    async def put(self, rows: Rows, mark: ProducerSequence | None = None) -> None:
        service = self._service()
        if service is not None and (self._sending is None or self._sending.done()):
            try:
                await service.direct(lambda port: port.put(rows, mark))
                return
            except BucketClosed:
                pass  # it has just moved; nothing was stored
        if mark is not None:
            parts, is_arrow = await _packed(rows)
            await self._put_marked(parts, is_arrow, mark)
        else:
            await self._put_together(rows)

    async def _put_marked(self, parts: list[bytes], is_arrow: bool, mark: ProducerSequence) -> None:
        """Send a put, in several messages where one cannot hold it; it is stored as a whole."""
        *before, last = wire.in_messages(parts)
        for _ in range(_SENDINGS):
            args: dict[str, Any] = {"mark": list(mark)}
            if before:
                upload = uuid.uuid4().hex
                for number, message in enumerate(before):
                    staging = {"upload": upload, "number": number}
                    await self._call("stage", staging, message, is_arrow)
                args |= {"upload": upload, "staged": len(before)}
            reply = await self._call("put", args, last, is_arrow)
            if reply.value != "resend":
                return
        raise StorageError(
            f"a put of {len(before) + 1} messages did not reach {self._key} as a whole: its owner "
            "changed, or forgot the first ones, each time; put less at once"
        )

    async def _put_in_turn(self, parts: list[bytes], is_arrow: bool) -> None:
        async with self._turn:
            self._number += 1
            await self._put_marked(parts, is_arrow, (self._writer, self._number))

    async def _put_together(self, rows: Rows) -> None:
        """Puts go out in the order of the calls; those that wait at the same time as one call."""
        one = Waiting(asyncio.ensure_future(_packed(rows)))
        self._queue.append(one)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await one.future

    async def _send(self) -> None:
        while self._queue:
            group = [self._queue.popleft()]
            try:
                packed, is_arrow = await group[0].packing
                parts = list(packed)
                await self._join_group(group, parts, is_arrow)
                await self._put_in_turn(parts, is_arrow)
            except SchemaError as exc:
                await self._send_singly(group, exc)
            except BaseException as exc:
                _settle(group, exc)
                if isinstance(exc, asyncio.CancelledError):
                    raise
            else:
                _settle(group, None)

    async def _join_group(self, group: list[Waiting], parts: list[bytes], is_arrow: bool) -> None:
        """Add the puts that wait next, as far as one message holds them."""
        size = sum(map(len, parts))
        while self._queue and not is_arrow and size < wire.MESSAGE_BYTES:
            following = self._queue[0]
            if not following.packing.done() or following.packing.exception() is not None:
                return
            more, more_is_arrow = following.packing.result()
            size += sum(map(len, more))
            if more_is_arrow or size > wire.MESSAGE_BYTES:
                return
            group.append(self._queue.popleft())
            parts += more

    async def _send_singly(self, group: list[Waiting], exc: SchemaError) -> None:
        """One of them does not fit: it alone is to fail."""
        if len(group) == 1:
            _settle(group, exc)
            return
        for one in group:
            try:
                await self._put_in_turn(*await one.packing)
            except Exception as own:
                _settle([one], own)
            else:
                _settle([one], None)

    async def drain(self) -> None:
        """Return when no put is under way."""
        if self._sending is not None and not self._sending.done():
            await asyncio.gather(self._sending, return_exceptions=True)

    async def close(self) -> None:
        """Finish what is under way and watch no longer."""
        self._closed = True
        await self.drain()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def reopen(self) -> None:
        """Have the owner look at the topic's configuration again."""
        self._owner = None
        await self._find(time.monotonic() + PATIENCE_SECONDS)

    # Reading

    async def read(self, offset: int, limit: int | None) -> Page:
        service = self._service()
        if service is not None:
            with suppress(BucketClosed):
                return await service.direct(lambda port: port.read(offset, limit))
        found: list[dict[str, Any]] = []
        first, epoch = offset, 0
        async for page in self._read("get", offset, limit):
            first, epoch = (page.first, page.epoch) if not found else (first, epoch)
            found += page.rows
        return Page(first, found, epoch)

    async def _read(self, op: str, offset: int, limit: int | None) -> AsyncIterator[Page]:
        """The pages of a window; each holds as much as a message does.

        They are of one epoch: where another begins, the window ends.
        """
        left, epoch = limit, None
        while True:
            try:
                reply = await self._call(op, {"offset": offset, "limit": left})
            except OffsetOutOfRange:
                if epoch is None:
                    raise
                return  # retention came between two pages
            first, count, now = reply.value
            if epoch not in (None, now):
                return
            epoch = now
            rows = wire.unpack_rows(reply.rows or b"", reply.arrow)
            yield Page(first, _as_records(rows) if op == "get" else rows, epoch)
            offset = first + count
            left = None if left is None else left - count
            if not count or left == 0:
                return

    async def read_arrow(self, offset: int, limit: int | None) -> Page:
        pages = [page async for page in self._read("get_arrow", offset, limit)]
        tables = [page.rows for page in pages]
        table = await asyncio.to_thread(_joined, [t for t in tables if len(t)] or tables[:1])
        return Page(pages[0].first, table, pages[0].epoch)

    async def call(self, call: TableCall[T]) -> T:
        """Run a call on the bucket's table, however long it takes."""
        await self.drain()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                service = self._service()
                if service is not None:
                    return await service.direct(lambda port: port.call(call))
                owner = await self._find(deadline)
                request = Request("table", {"op": call.op, "args": call.args})
                _check_sendable(request)
                stream = await ask_stream(owner.ref, owner.node, request)
                replies = []
                while (reply := await _next_reply(stream)).value != "end":
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    if reply.value != "alive":
                        replies.append(reply)
                return await asyncio.to_thread(wire.join_replies, call.op, replies)
            except (Unreachable, BucketClosed) as exc:
                await self._lost(exc, deadline)

    async def _lost(self, exc: Exception, deadline: float) -> None:
        """The owner is gone: look for it again, after a pause, or raise when patience ends."""
        self._owner = None
        if time.monotonic() > deadline:
            raise _unavailable(self._key, self._opening, self._held or str(exc), None) from exc
        await asyncio.sleep(_PAUSE)

    async def pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None = None
    ) -> AsyncIterator[Page]:
        left = limit
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left is None or left > 0:
            window = {"offset": offset, "limit": left, "block": block, "epoch": epoch}
            request = Request("stream", _sendable(window))
            try:
                owner = await self._find(deadline)
                stream = await ask_stream(owner.ref, owner.node, request)
                done = False
                while not done:
                    reply = await _next_reply(stream)
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    if reply.rows is not None:
                        first, count, now = reply.value
                        epoch, offset = now, first + count
                        left = None if left is None else left - count
                        yield Page(first, _as_records(_rows_of(reply)), epoch)
                        deadline = time.monotonic() + PATIENCE_SECONDS
                        if not count:
                            return
                    elif reply.value == "end":
                        return
                    else:
                        done = reply.value == "again"
            except (Unreachable, BucketClosed) as exc:
                await self._lost(exc, deadline)

    async def wait(self, offset: int, epoch: int = 0) -> None:
        """One watcher serves all who wait: a stream per wait would pile up at the owner."""
        while self._end <= offset and self._epoch in (None, epoch):
            if self._closed:
                raise BucketClosed("the reader was closed")
            if self._watcher is None or self._watcher.done():
                self._watcher = asyncio.create_task(self._watch())
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    async def _watch(self) -> None:
        """Follow the bucket's end until nobody has waited for a while."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        wanted = time.monotonic()
        try:
            while time.monotonic() - wanted < _WATCH_SECONDS:
                try:
                    owner = await self._find(deadline)
                    stream = await ask_stream(owner.ref, owner.node, Request("watch"))
                    again = False
                    while not again and time.monotonic() - wanted < _WATCH_SECONDS:
                        reply = await _next_reply(stream)
                        deadline = time.monotonic() + PATIENCE_SECONDS
                        wanted = time.monotonic() if self._waiting else wanted
                        again = reply.value == "again"
                        if isinstance(reply.value, list):
                            self._end, self._epoch = reply.value
                            self._wake(None)
                except (Unreachable, BucketClosed) as exc:
                    await self._lost(exc, deadline)
        except Exception as exc:
            self._wake(exc)
        finally:
            self._end, self._epoch = 0, None  # what it knew is old from here on
            self._wake(None)  # who still waits looks again, and starts another watcher

    def _wake(self, exc: Exception | None) -> None:
        for future in self._waiting:
            if not future.done():
                if exc is None:
                    future.set_result(None)
                else:
                    future.set_exception(exc)

    async def find(self, timestamp: int) -> int:
        return int((await self._call("find", {"timestamp": timestamp})).value)

    async def last_number(self, writer: str) -> int:
        return int((await self._call("last_number", {"writer": writer})).value)

    async def flush(self) -> None:
        await self.drain()
        await self._call("flush", {})

    async def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._call("stats", {})).value
        here = host_here(self._system) if self._service() is not None else None
        owner = here if here is not None else self._owner
        return {**found, "node": owner.node if owner is not None else None}


async def _packed(rows: Rows) -> tuple[list[bytes], bool]:
    if isinstance(rows, list) and is_light(rows):
        return wire.pack_parts(rows)
    return await asyncio.to_thread(wire.pack_parts, rows)


async def _next_reply(stream: Any) -> Reply:
    """The next reply of a stream; its end without a word of ours is a failure."""
    try:
        data = await within(anext(stream, None), 3 * KEEPALIVE_SECONDS)
    except asyncio.TimeoutError as exc:
        raise Unreachable("a stream fell silent") from exc
    except (RuntimeError, pul.PulsingError) as exc:
        raise Unreachable(f"a stream broke off: {plain(exc)}") from exc
    if data is None:
        raise Unreachable("a stream ended without a word")
    return wire.decode_reply(data)


def _rows_of(reply: Reply) -> Any:
    return wire.unpack_rows(reply.rows, reply.arrow) if reply.rows else []


def _as_records(rows: Any) -> list[dict[str, Any]]:
    return rows if isinstance(rows, list) else rows.to_pylist()


def _settle(group: list[Waiting], exc: BaseException | None) -> None:
    for one in group:
        if not one.future.done():
            if exc is None:
                one.future.set_result(None)
            else:
                one.future.set_exception(exc)


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Pages of one read; a put between two of them may have changed the schema."""
    schema = tables[0].schema
    for table in tables[1:]:
        schema = merge(schema, table.schema, Rules(evolving=True))
    batches = [align(batch, schema) for table in tables for batch in table.to_batches()]
    return pa.Table.from_batches(batches, schema=schema)


def _sendable(args: dict[str, Any]) -> dict[str, Any]:
    """Offsets and limits beyond all that there can be, as large as a message takes them."""
    large = {name: _MOST for name, v in args.items() if type(v) is int and v > _MOST}
    return args | large if large else args


def _check_sendable(request: Request) -> None:
    try:
        wire.encode(request)
    except (TypeError, OverflowError, UnicodeEncodeError) as exc:
        raise InvalidArgument(
            f"{request.args['op']}: an argument is not what it should be: {exc}"
        ) from exc


def _unavailable(key: str, opening: Request, last: str, owner: str | None) -> StorageError:
    topic, bucket = opening.args["config"]["topic"], opening.args["bucket"]
    return StorageError(
        f"bucket {bucket} of topic {topic!r} has no owner that answers"
        + (f" (node {owner} holds it)" if owner else "")
        + f": {last}"
    )
