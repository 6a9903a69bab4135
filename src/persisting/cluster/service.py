"""One bucket on the node that owns it: answers requests, whichever transport brings them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from persisting.bucket.producer_sequences import check_number
from persisting.bucket.snapshot import Page
from persisting.cluster import wire
from persisting.cluster.numbered_puts import NumberedPuts
from persisting.cluster.page_size import PAGE_BYTES, PAGE_ROWS, RowSizeEstimate
from persisting.cluster.staged_uploads import StagedUploads
from persisting.cluster.transport import KEEPALIVE_SECONDS, Answer, ReplyStream
from persisting.cluster.wire import Reply, Request
from persisting.errors import BucketClosed, BucketLocked, OffsetOutOfRange, WALError
from persisting.topic.bucket_client import ProducerSequence, Rows
from persisting.topic.local import LocalBucketClient
from persisting.topic.table_calls import parse_call

_T = TypeVar("_T")

PutParts: TypeAlias = "Callable[[list[tuple[int, Rows]], ProducerSequence], Awaitable[list[int]]]"
"""Store rows in several buckets of a topic; return those that are not on this node."""

WorkCalls: TypeAlias = "Callable[[str, str, dict[str, Any]], Awaitable[Any]]"
"""Call the keeper of a work group: its name, the call and the arguments."""


class OwnershipState(Protocol):
    """What a node knows of its ownership of a bucket in an object store."""

    @property
    def lost(self) -> str:
        """Why this node no longer owns the bucket; empty while it does, as far as it knows."""

    @property
    def overdue(self) -> str:
        """Why another node may have taken the bucket over unnoticed; empty while that cannot be."""


STREAM_SECONDS = 240.0
"""An idle stream ends itself after this, and its consumer asks for the next one. Pulsing would
end it after 300 s without a word."""


class BucketService:
    """Answers for a bucket while this node owns it."""

    def __init__(
        self,
        client: LocalBucketClient,
        place: str,
        bucket: int,
        put_parts: PutParts | None = None,
        ownership: OwnershipState | None = None,
    ) -> None:
        """``put_parts`` stores puts to several buckets of the topic, which any of them takes.
        ``ownership`` is that of a bucket in an object store."""
        self.client, self.place, self.bucket = client, place, bucket
        self._ownership = ownership
        self._put_parts = put_parts
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._row_size = RowSizeEstimate()
        self._uploads = StagedUploads()
        self.numbered_puts = NumberedPuts()
        self._uses = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: set[asyncio.Task[Any]] = set()
        self.work: WorkCalls | None = None
        """Answers the members of the topic's work groups, on the owner of bucket 0."""

    @property
    def closed(self) -> bool:
        return self._closing.done()

    async def close(self) -> None:
        """Stop answering, and wait until nothing uses the bucket."""
        self._refuse_requests()
        await self._idle.wait()

    def _refuse_requests(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the bucket open meanwhile.

        Whatever touches ``client`` does it in here: after ``close`` a call would open the bucket
        on this node again.
        """
        if self.closed:
            raise self._no_longer_here()
        self._check_ownership()
        self._uses += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._idle.set()

    @property
    def lost(self) -> str:
        """Why this node no longer owns a bucket in an object store; empty while it does."""
        return "" if self._ownership is None else self._ownership.lost

    @property
    def overdue(self) -> str:
        """Why another node may have taken the bucket over unnoticed; empty while that cannot be."""
        return "" if self._ownership is None else self._ownership.overdue

    def _check_ownership(self) -> None:
        """Raise if this node has lost its bucket in an object store, or cannot tell: what it would
        answer may be out of date."""
        if self._ownership is None:
            return
        if lost := self.lost:
            self._refuse_requests()
            raise self._no_longer_here(lost)
        if overdue := self.overdue:
            raise self._no_longer_here(overdue)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the bucket open meanwhile, and close it if another node has taken it."""
        with self.kept_open():
            try:
                yield
            except BucketLocked as exc:
                # Closed to be reopened with new options, and another node took the lock first. Or
                # another node has taken over a bucket in an object store.
                self._refuse_requests()
                raise self._no_longer_here(exc.summary) from exc

    async def is_still_here(self) -> bool:
        """Whether the bucket is open, or can be reopened; otherwise it is closed from now on."""
        try:
            await self.direct(lambda client: client.keeps_schema())
        except BucketClosed:
            return False
        return True

    def _no_longer_here(self, reason: str = "") -> BucketClosed:
        cause = f": {reason}" if reason else ""
        return BucketClosed(f"bucket {self.bucket} is no longer on this node{cause}")

    async def direct(self, call: Callable[[LocalBucketClient], Awaitable[_T]]) -> _T:
        """Call the bucket from its own process, without encoding anything."""
        with self._in_use():
            return await call(self.client)

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request; errors become replies."""
        try:
            with self._in_use():
                return await self._answer(request)
        except WALError as exc:
            if request.op in ("put", "put_parts") and self.lost:
                # Whether it is stored is unknown here: the next owner knows, and puts are numbered.
                self._refuse_requests()
                return wire.error_reply(self._no_longer_here(str(exc)))
            return wire.error_reply(exc)
        except Exception as exc:
            return wire.error_reply(exc)

    async def _answer(self, request: Request) -> Answer:
        operation: Callable[..., Any] | None = getattr(self, f"_do_{request.op}", None)
        if operation is None:
            raise wire.unknown_request(request.op)
        if request.rows is not None:
            result = await operation(parts=request.rows, arrow=request.arrow, **request.args)
        else:
            result = await operation(**request.args)
        return result if isinstance(result, (Reply, ReplyStream)) else Reply(result)

    # Puts

    async def _do_stage(self, parts: list[bytes], arrow: bool, upload: str, number: int) -> str:
        """Keep a message of a put that needs several."""
        self._uploads.add(upload, number, parts)
        return "staged"

    async def _do_put(
        self,
        parts: list[bytes],
        arrow: bool,
        mark: list[Any],
        upload: str | None = None,
        staged: int = 0,
        columns: bytes | None = None,
    ) -> str:
        """Store rows; answer "resend" if messages that were sent before are missing."""
        pieces = self._with_staged(parts, upload, staged)
        if pieces is None:
            return "resend"
        ((_, rows),) = await _unpacked(pieces, [(self.bucket, None, arrow)], columns)
        sequence = mark[0], mark[1]
        with self.numbered_puts.carrying_out(sequence):
            await self.client.put(rows, sequence)
        return "stored"

    async def _do_put_parts(
        self,
        parts: list[bytes],
        arrow: bool,
        mark: list[Any],
        buckets: list[tuple[int, int, bool]],
        upload: str | None = None,
        staged: int = 0,
        columns: bytes | None = None,
    ) -> str | dict[str, list[int]]:
        """Store rows in several buckets of the topic.

        ``buckets`` has, for each, its number, the count of its pieces, and whether these are
        Arrow. ``columns`` is the schema of records that are sent as columns; ``buckets`` has their
        counts. If buckets are not on this node, answer which; nothing is stored then.
        """
        if self._put_parts is None:
            raise wire.unknown_request("put_parts")
        pieces = self._with_staged(parts, upload, staged)
        if pieces is None:
            return "resend"
        rows = await _unpacked(pieces, buckets, columns)
        missing = await self._put_parts(rows, (mark[0], mark[1]))
        return {"missing": missing} if missing else "stored"

    def _with_staged(
        self, pieces: list[bytes], upload: str | None, staged: int
    ) -> list[bytes] | None:
        """Return all pieces of a put, None if some of its first messages are missing."""
        if upload is None:
            return pieces
        before = self._uploads.take(upload)
        if len(before) != staged:
            return None
        return [piece for message in before for piece in message] + pieces

    # Calls with one reply

    async def _do_get(self, offset: int, limit: int | None) -> Reply:
        """Return the first page of a window; the caller asks again for the rest."""
        return _page_reply(await self._page(offset, limit))

    async def _do_get_arrow(self, offset: int, limit: int | None) -> Reply:
        return _page_reply(await self._bounded(self.client.read_arrow, offset, limit))

    async def _do_find(self, timestamp: int) -> int:
        return await self.client.find(timestamp)

    async def _do_last_number(self, writer: str) -> int:
        return await self.client.last_number(writer)

    async def _do_give_up(self, writer: str, number: int) -> int:
        """Refuse a put, and earlier ones of its producer, from now on; return the last number that
        is stored."""
        sequence = writer, check_number(number)
        await self.numbered_puts.give_up(sequence, self.client.is_queued)
        return await self.client.last_number(writer)

    async def _do_flush(self) -> str:
        await self.client.flush()
        return "flushed"

    async def _do_stats(self) -> dict[str, Any]:
        return await self.client.stats()

    # Work groups

    async def _do_work(self, group: str, op: str, args: dict[str, Any]) -> Any:
        if self.work is None:  # bucket 0 is about to move, and the groups with it
            raise BucketClosed("this node does not keep the work groups of the topic")
        return await self.work(group, op, args)

    async def _do_work_stream(self, group: str, op: str, args: dict[str, Any]) -> ReplyStream:
        """Like ``work``, but for a call that may be slow; ends when its caller leaves."""
        return self._stream("work", self._write_work(group, op, args))

    async def _write_work(
        self, group: str, op: str, args: dict[str, Any]
    ) -> AsyncGenerator[Reply, None]:
        call = asyncio.ensure_future(self._do_work(group, op, args))
        try:
            while not (await asyncio.wait([call], timeout=KEEPALIVE_SECONDS))[0]:
                yield Reply("alive")
            yield Reply([call.result()])
        finally:
            call.cancel()

    # Pages

    async def _page(self, offset: int, limit: int | None) -> Page:
        """Read a page: as Arrow where the backend keeps a schema, else as records."""
        keeps_schema = await self.client.keeps_schema()
        read = self.client.read_arrow if keeps_schema else self.client.read
        return await self._bounded(read, offset, limit)

    async def _bounded(
        self,
        read: Callable[[int, int | None], Awaitable[Page]],
        offset: int,
        limit: int | None,
    ) -> Page:
        """Read a page of about ``PAGE_BYTES``, in several reads while rows are smaller than
        expected."""
        pages: list[Page] = []
        count = size = 0
        most = PAGE_ROWS if limit is None else min(limit, PAGE_ROWS)
        while True:
            rows = min(self._row_size.rows_within(PAGE_BYTES - size), most - count)
            try:
                known = await self.client.rows_within(offset, PAGE_BYTES - size)
                rows = rows if known is None else min(rows, known)
                page = await read(offset, rows)
            except OffsetOutOfRange:
                if not pages:
                    raise
                break  # retention removed rows between two reads
            if pages and not _continues(pages[0], page):
                break
            pages.append(page)
            found = len(page.rows)
            if not found:
                break
            nbytes = _size(page.rows)
            self._row_size.observe(found, nbytes)
            offset, count, size = page.first + found, count + found, size + nbytes
            if found < rows or count >= most or 2 * size > PAGE_BYTES:
                break
        fitting = max(1, wire.MESSAGE_BYTES * count // max(1, size))
        return pages[0]._replace(rows=_joined([p.rows for p in pages], fitting))

    # Streams

    async def _do_table(self, op: str, args: dict[str, Any]) -> ReplyStream:
        """Call the bucket as a table; a stream, since the call may be slow."""
        return self._stream("answer", self._write_answer(op, args))

    async def _do_stream(
        self, offset: int, limit: int | None, block: bool, epoch: int | None
    ) -> ReplyStream:
        return self._stream("pages", self._write_pages(offset, limit, block, epoch))

    async def _do_watch(self) -> ReplyStream:
        """Send the bucket's end and epoch whenever one of them changes."""
        return self._stream("ends", self._write_ends())

    def _stream(self, kind: str, replies: AsyncGenerator[Reply, None]) -> ReplyStream:
        return ReplyStream(kind, _errors_as_replies(replies))

    async def _write_answer(self, op: str, args: dict[str, Any]) -> AsyncGenerator[Reply, None]:
        call = asyncio.create_task(self.direct(lambda client: client.call(parse_call(op, args))))
        self._calls.add(call)  # it continues even if its consumer leaves
        call.add_done_callback(self._calls.discard)
        while not (await asyncio.wait([call], timeout=KEEPALIVE_SECONDS))[0]:
            yield Reply("alive")
        for reply in await asyncio.to_thread(wire.answer_replies, op, call.result()):
            yield reply

    async def _write_pages(
        self, offset: int, limit: int | None, block: bool, epoch: int | None
    ) -> AsyncGenerator[Reply, None]:
        deadline = time.monotonic() + STREAM_SECONDS
        left = limit
        while (left is None or left > 0) and not self.closed:
            with self._in_use():
                page = await self._page(offset, left)
            if epoch not in (None, page.epoch):
                yield Reply([offset, 0, page.epoch], rows=b"")
                return
            epoch = page.epoch
            if len(page.rows):
                offset = page.first + len(page.rows)
                left = None if left is None else left - len(page.rows)
                yield _page_reply(page)
            elif not block:
                break
            elif time.monotonic() > deadline:
                yield Reply("again")
                return
            elif not await self._changes(offset, epoch):
                yield Reply("alive")
        yield Reply("again" if self.closed else "end")

    async def _write_ends(self) -> AsyncGenerator[Reply, None]:
        deadline = time.monotonic() + STREAM_SECONDS
        while time.monotonic() < deadline and not self.closed:
            with self._in_use():
                end, epoch = await self.client.end(), await self.client.epoch()
            yield Reply([end, epoch])
            if not await self._changes(end, epoch):
                yield Reply("alive")
        yield Reply("again")

    async def _changes(self, offset: int, epoch: int) -> bool:
        """Wait for records beyond ``offset`` or a new epoch; return False if a keepalive is due
        first, or the bucket closes."""
        with self._in_use():
            change = asyncio.ensure_future(self.client.wait(offset, epoch))
            try:
                await asyncio.wait(
                    [change, self._closing],
                    timeout=KEEPALIVE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                if not change.done():
                    change.cancel()
                    await asyncio.wait([change])
            if change.cancelled():
                return False
            change.result()
            return True


async def _unpacked(
    pieces: list[bytes], buckets: Sequence[tuple[int, int | None, bool]], columns: bytes | None
) -> list[tuple[int, Rows]]:
    """Return the rows of each bucket; much work goes to a thread."""
    if sum(map(len, pieces)) > wire.MESSAGE_BYTES:
        return await asyncio.to_thread(_divided, pieces, buckets, columns)
    return _divided(pieces, buckets, columns)


def _divided(
    pieces: list[bytes], buckets: Sequence[tuple[int, int | None, bool]], columns: bytes | None
) -> list[tuple[int, Rows]]:
    """``buckets`` has the count of pieces, or of rows in columns; None: all are the bucket's."""
    if columns is not None:
        records = wire.unpack_columns(pieces, columns)
        counts = [len(records) if count is None else count for _, count, _ in buckets]
        parts = records.divided(counts)
        return [(bucket, part) for (bucket, _, _), part in zip(buckets, parts, strict=True)]
    left = iter(pieces)
    return [
        (bucket, wire.unpack_parts(list(islice(left, count)), is_arrow))
        for bucket, count, is_arrow in buckets
    ]


async def _errors_as_replies(
    replies: AsyncGenerator[Reply, None],
) -> AsyncGenerator[Reply, None]:
    """Pass replies on; a failure becomes the last reply."""
    try:
        async with aclosing(replies):
            async for reply in replies:
                yield reply
    except Exception as exc:
        yield wire.error_reply(exc)


def _continues(first: Page, page: Page) -> bool:
    """Whether two reads can form one page: same epoch, same schema."""
    if first.epoch != page.epoch:
        return False
    return isinstance(first.rows, list) or bool(first.rows.schema.equals(page.rows.schema))


def _size(rows: list[dict[str, Any]] | pa.Table) -> int:
    return len(wire.pack_records(rows)) if isinstance(rows, list) else int(rows.nbytes)


def _joined(parts: list[Any], count: int) -> list[dict[str, Any]] | pa.Table:
    """Return the first ``count`` rows of consecutive reads."""
    if isinstance(parts[0], list):
        return [record for part in parts for record in part][:count]
    table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
    return table if len(table) <= count else table.slice(0, count)


def _page_reply(page: Page) -> Reply:
    data, is_arrow = wire.pack_rows(page.rows)
    return Reply([page.first, len(page.rows), page.epoch], rows=data, arrow=is_arrow)
