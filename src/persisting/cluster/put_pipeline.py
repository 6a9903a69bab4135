"""Puts on their way to the owners of their buckets: in order, several in one call, stored once.

A bucket's puts keep the order of their calls because of three rules:

- All unsent puts of a bucket are in one queue, and a queue has one message under way. So a bucket
  never has two messages under way, wherever its owner is.
- Messages are numbered when they are composed. The numbers that a bucket sees only rise, and a
  message that is sent again keeps its number and its rows.
- A bucket whose owner is lost leaves the queue of that owner, with its unsent puts, in one step.
  Its message is sent again before any of them. The other buckets of the queue do not wait for it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from persisting.bucket.chunk import ROWS_AT_ONCE
from persisting.bucket.producer_sequences import ANONYMOUS
from persisting.bucket.put_cost import is_light
from persisting.cluster import wire
from persisting.cluster.locator import OwnerLocator, Patience
from persisting.cluster.put_delivery import ColumnRange, PackedRows, PutDelivery, is_stored
from persisting.cluster.wire import Reply, Request
from persisting.errors import SchemaError, StorageError
from persisting.topic.bucket_client import ProducerSequence, Rows

Parts = list[tuple[int, Rows]]

_SHARED_BYTES = 256 * 1024
"""The most that several puts share a message for. Larger ones go out one by one: the owner stores
one while the next is still being packed."""

_NUMBERS = frozenset({int, float, bool, type(None)})
_ROW_BYTES = 32
_SMALL_BYTES = 64 * 1024
"""Records up to this size are always packed in the event loop."""


class _WaitingPut:
    """A put until all its buckets have answered. Packing many rows takes a while."""

    def __init__(self, parts: Parts, as_columns: bool) -> None:
        self.packed: dict[int, PackedRows] | None = None
        self.packing: asyncio.Task[dict[int, PackedRows]] | None = None
        if _are_light(parts):
            self.packed = _pack(parts, as_columns)
        else:
            self.packing = asyncio.ensure_future(asyncio.to_thread(_pack, parts, as_columns))
        self.acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = {bucket for bucket, _ in parts}
        self._failure: BaseException | None = None

    def packed_so_far(self) -> dict[int, PackedRows] | None:
        """Return the packed rows, None while they are being packed or if that failed."""
        if self.packed is None and self.packing is not None and self.packing.done():
            if not self.packing.cancelled() and self.packing.exception() is None:
                self.packed = self.packing.result()
        return self.packed

    async def wait_packed(self) -> dict[int, PackedRows]:
        if self.packed is None:
            assert self.packing is not None
            self.packed = await asyncio.shield(self.packing)
        return self.packed

    def finish(self, bucket: int, failure: BaseException | None) -> bool:
        """Note the end for a bucket; return False if it was noted before."""
        if bucket not in self._unfinished:
            return False
        self._unfinished.remove(bucket)
        self._failure = self._failure or failure
        if not self._unfinished and not self.acknowledged.done():
            if self._failure is None:
                self.acknowledged.set_result(None)
            else:
                self.acknowledged.set_exception(self._failure)
        return True


class _RowPut:
    """A put of one plain record, which is packed together with those that are sent with it."""

    __slots__ = ("_ended", "acknowledged", "record", "size")

    def __init__(self, record: dict[str, Any], size: int) -> None:
        self.record, self.size = record, size
        self.acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = False

    def finish(self, bucket: int, failure: BaseException | None) -> bool:
        """Note the end; return False if it was noted before."""
        if self._ended:
            return False
        self._ended = True
        if not self.acknowledged.done():
            if failure is None:
                self.acknowledged.set_result(None)
            else:
                self.acknowledged.set_exception(failure)
        return True


class _Job:
    """The parts of a put that are in one queue."""

    __slots__ = ("buckets", "group", "put")

    def __init__(
        self, put: _WaitingPut | _RowPut, buckets: list[int], group: object = None
    ) -> None:
        """Only jobs of the same group share a message."""
        self.put, self.buckets, self.group = put, buckets, group


class _Message:
    """Rows of one or several jobs that are sent together."""

    def __init__(self, jobs: list[_Job], sequence: ProducerSequence, patience: Patience) -> None:
        self.jobs, self.sequence, self.patience = jobs, sequence, patience
        self.rows: dict[int, PackedRows] = {}
        if len(jobs) == 1 and isinstance(jobs[0].put, _RowPut):  # most messages of a lone producer
            packed = PackedRows([wire.pack_plain([jobs[0].put.record])], is_arrow=False)
            self.rows[jobs[0].buckets[0]] = packed
            return
        records: dict[int, list[dict[str, Any]]] = {}
        """By bucket, single records that are not packed yet."""
        for job in jobs:
            put = job.put
            if isinstance(put, _RowPut):
                for bucket in job.buckets:
                    records.setdefault(bucket, []).append(put.record)
                continue
            assert put.packed is not None
            for bucket in job.buckets:
                self._pack(bucket, records.pop(bucket, None))
                self._add(bucket, put.packed[bucket])
        for bucket, waiting in records.items():
            self._pack(bucket, waiting)

    def _pack(self, bucket: int, records: list[dict[str, Any]] | None) -> None:
        if records:
            self._add(bucket, PackedRows(*wire.pack_parts(records)))

    def _add(self, bucket: int, packed: PackedRows) -> None:
        if bucket in self.rows:
            self.rows[bucket].pieces.extend(packed.pieces)
        else:
            self.rows[bucket] = packed._replace(pieces=list(packed.pieces))

    def jobs_of(self, buckets: Collection[int]) -> list[_Job]:
        """Return the jobs as far as they go to some buckets."""
        jobs = [_Job(j.put, [b for b in j.buckets if b in buckets], j.group) for j in self.jobs]
        return [job for job in jobs if job.buckets]


class _Queue:
    """Puts for buckets of one owner, or for buckets whose owner must be found first."""

    def __init__(self, node: str | None) -> None:
        self.node = node
        self.jobs: deque[_Job] = deque()
        self.under_way: _Message | None = None
        self.sender: asyncio.Task[None] | None = None
        self.shares = False
        """Whether the last message was shared by several puts. Then the next one waits for those
        of the same turn of the event loop."""
        self.is_posted_soon = False
        """Whether the next message is posted at the end of this turn."""


class PutPipeline:
    """Sends the puts of one topic handle, in the order of their calls.

    Puts that wait at the same time for buckets of one owner go out as one message.
    """

    def __init__(
        self, locator_of: Callable[[int], OwnerLocator], *, as_columns: bool = False
    ) -> None:
        """With ``as_columns``, owners take records as Arrow columns."""
        self._locator_of, self._as_columns = locator_of, as_columns
        self._delivery = PutDelivery(locator_of)
        self._producer = ANONYMOUS + uuid.uuid4().hex
        self._number = -1
        self._queues: dict[str, _Queue] = {}
        """By owner."""
        self._queue_of: dict[int, _Queue] = {}
        """By bucket: where its unsent puts are, if it has any."""
        self._started: defaultdict[int, int] = defaultdict(int)
        self._finished: defaultdict[int, int] = defaultdict(int)
        """By bucket: how many puts to it were started, and how many of these have ended."""
        self._draining: dict[int, list[asyncio.Future[None]]] = {}

    def is_busy(self, bucket: int) -> bool:
        """Whether puts to a bucket are under way."""
        return self._started[bucket] != self._finished[bucket]

    def start(self, parts: Parts) -> asyncio.Future[None]:
        """Queue a put after those of earlier calls; the future ends when it is acknowledged."""
        put = _WaitingPut(parts, self._as_columns)
        unlocated = _Queue(None)
        jobs: dict[_Queue, list[int]] = {}
        for bucket, _ in parts:
            if not self.is_busy(bucket):
                node = self._locator_of(bucket).node
                self._queue_of[bucket] = unlocated if node is None else self._queue_at(node)
            self._started[bucket] += 1
            jobs.setdefault(self._queue_of[bucket], []).append(bucket)
        for queue, buckets in jobs.items():
            queue.jobs.append(_Job(put, buckets))
            self._wake(queue)
        return put.acknowledged

    def start_row(self, bucket: int, record: dict[str, Any]) -> asyncio.Future[None] | None:
        """Like :meth:`start`, but only for a plain record of a bucket whose owner is known; None
        otherwise."""
        size = _plain_size(record)
        if size is None:
            return None
        if self._started[bucket] == self._finished[bucket]:
            node = self._locator_of(bucket).remote_node
            if node is None:
                return None
            queue = self._queue_of[bucket] = self._queue_at(node)
        else:
            queue = self._queue_of[bucket]
        put = _RowPut(dict(record), size)
        self._started[bucket] += 1
        queue.jobs.append(_Job(put, [bucket]))
        self._wake(queue)
        return put.acknowledged

    async def put_sequenced(self, parts: Parts, sequence: ProducerSequence) -> None:
        """Store rows under a producer's own sequence; the caller keeps these puts in order."""
        if _are_light(parts):
            rows = _pack(parts, self._as_columns)
        else:
            rows = await asyncio.to_thread(_pack, parts, self._as_columns)
        failure: Exception | None = None
        delivery = self._delivery.everywhere(rows, sequence, Patience())
        async with aclosing(delivery) as outcomes:
            async for outcome in outcomes:
                failure = failure or outcome.error
        if failure is not None:
            raise failure

    async def drain(self, bucket: int) -> None:
        """Wait until the puts to a bucket that are under way now have ended."""
        last = self._started[bucket]
        while self._finished[bucket] < last:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._draining.setdefault(bucket, []).append(ended)
            await ended

    def _queue_at(self, node: str) -> _Queue:
        if node not in self._queues:
            self._queues[node] = _Queue(node)
        return self._queues[node]

    def _wake(self, queue: _Queue) -> None:
        """Send a queue's puts, unless a message is under way: its end leads to the next one."""
        if queue.under_way is not None or queue.is_posted_soon:
            return
        if queue.sender is None or queue.sender.done():
            if queue.shares and self._can_post(queue):
                self._post_soon(queue)
            elif queue.shares or not self._post(queue):
                queue.sender = asyncio.create_task(self._send_queue(queue))

    def _can_post(self, queue: _Queue) -> bool:
        bucket = queue.jobs[0].buckets[0]
        return queue.node is not None and self._delivery.can_post(queue.node, bucket)

    def _post_soon(self, queue: _Queue) -> None:
        """Post a message when the producers that can continue now have put, so that they share it.

        Otherwise two halves of the producers would take turns.
        """
        queue.is_posted_soon = True
        asyncio.get_running_loop().call_soon(self._post_or_send, queue)

    def _post_or_send(self, queue: _Queue) -> None:
        queue.is_posted_soon = False
        if queue.jobs and not self._post(queue):  # there are none if their bucket has moved
            queue.sender = asyncio.create_task(self._send_queue(queue))

    def _post(self, queue: _Queue) -> bool:
        """Send a queue's next message immediately, without a task, if that is possible."""
        first = queue.jobs[0].put
        if queue.node is None or (isinstance(first, _WaitingPut) and first.packed is None):
            return False
        jobs = self._next_jobs(queue)
        try:
            message = self._numbered(jobs)
            answered = partial(self._answered, queue, message)
            posted = self._delivery.post(queue.node, message.rows, message.sequence, answered)
        except Exception:  # the sender finds the same, and tells the producers
            posted = False
        if posted:
            queue.under_way = message
        else:
            queue.jobs.extendleft(reversed(jobs))
        return posted

    def _answered(self, queue: _Queue, message: _Message, answer: Reply | Exception) -> None:
        """End a message that was sent without a task."""
        if is_stored(answer):
            queue.under_way = None
            for job in message.jobs:
                self._finish(job, job.buckets, None)
            if queue.jobs:
                self._post_soon(queue)
        else:
            queue.sender = asyncio.create_task(self._send_queue(queue, answer=answer))

    async def _send_queue(
        self,
        queue: _Queue,
        lost: dict[int, Exception] | None = None,
        answer: Reply | Exception | None = None,
    ) -> None:
        """Send a queue's messages one at a time.

        With ``lost``, the owners of the message under way were lost, and it is sent again first.
        With ``answer``, the message under way was answered, and its puts are not finished.
        """
        try:
            if answer is not None:
                assert queue.under_way is not None
                assert queue.node is not None
                await self._send_to_owner(queue, queue.under_way, queue.node, answer)
            elif queue.under_way is not None:
                await self._send_everywhere(queue, queue.under_way, lost)
            while queue.jobs:
                queue.under_way = await self._compose(queue)
                if queue.under_way is None:
                    continue
                if queue.node is None:
                    await self._send_everywhere(queue, queue.under_way)
                else:
                    await self._send_to_owner(queue, queue.under_way, queue.node)
                # The producers that were just acknowledged run now, so that their next records
                # share a message with those that wait. Otherwise two halves of the producers would
                # take turns.
                await asyncio.sleep(0)
            queue.under_way = None
        except BaseException as exc:
            # The event loop ends: nobody may wait for an answer that never comes.
            unfinished = [*(queue.under_way.jobs if queue.under_way else ()), *queue.jobs]
            queue.under_way = None
            queue.jobs.clear()
            for job in unfinished:
                self._finish(job, job.buckets, exc)
            raise

    async def _compose(self, queue: _Queue) -> _Message | None:
        """Take the next puts from a queue as one message; None if the first cannot be packed."""
        first = queue.jobs[0]
        if isinstance(first.put, _WaitingPut):
            try:
                await first.put.wait_packed()
            except Exception as exc:
                queue.jobs.popleft()
                self._finish(first, first.buckets, exc)
                return None
        jobs = self._next_jobs(queue)
        try:
            return self._numbered(jobs)
        except SchemaError:
            sendable = [job for job in jobs if self._can_pack(job)]
            return self._numbered(sendable) if sendable else None

    def _next_jobs(self, queue: _Queue) -> list[_Job]:
        """Take the puts from a queue that share the next message."""
        first = queue.jobs.popleft()
        jobs, size = [first], _shared_size(first)
        while size is not None and queue.jobs and queue.jobs[0].group is first.group:
            further = _shared_size(queue.jobs[0])
            if further is None or size + further > _SHARED_BYTES:
                break
            size += further
            jobs.append(queue.jobs.popleft())
        queue.shares = len(jobs) > 1
        return jobs

    def _numbered(self, jobs: list[_Job]) -> _Message:
        self._number += 1
        return _Message(jobs, (self._producer, self._number), Patience())

    def _can_pack(self, job: _Job) -> bool:
        """Whether a record can be sent; otherwise its put fails."""
        if isinstance(job.put, _RowPut):
            try:
                wire.pack_records([job.put.record])
            except SchemaError as exc:
                self._finish(job, job.buckets, exc)
                return False
        return True

    async def _send_to_owner(
        self, queue: _Queue, message: _Message, node: str, answer: Reply | Exception | None = None
    ) -> None:
        try:
            lost = await self._delivery.to_owner(
                node, message.rows, message.sequence, message.patience, answer
            )
        except Exception as exc:
            await self._fail(queue, message, list(message.rows), exc)
            return
        self._acknowledge(message, [b for b in message.rows if b not in lost])
        if lost:
            searching = _Queue(None)
            self._move(list(lost), queue, searching)
            searching.under_way = _Message(
                message.jobs_of(lost), message.sequence, message.patience
            )
            searching.sender = asyncio.create_task(self._send_queue(searching, lost))

    async def _send_everywhere(
        self, queue: _Queue, message: _Message, lost: dict[int, Exception] | None = None
    ) -> None:
        """Send a message to owners that must be found first; each bucket then continues in
        the queue of its owner."""
        delivery = self._delivery.everywhere(message.rows, message.sequence, message.patience, lost)
        async with aclosing(delivery) as outcomes:
            async for buckets, node, error in outcomes:
                if error is None:
                    self._acknowledge(message, buckets)
                else:
                    await self._fail(queue, message, buckets, error)
                if node is not None:
                    self._move(buckets, queue, self._queue_at(node))

    def _move(self, buckets: list[int], source: _Queue, target: _Queue) -> None:
        """Let buckets, with their unsent puts, go from one queue to another."""
        kept: deque[_Job] = deque()
        for job in source.jobs:
            moving = [bucket for bucket in job.buckets if bucket in buckets]
            if moving:
                target.jobs.append(_Job(job.put, moving, job.group))
                job.buckets = [bucket for bucket in job.buckets if bucket not in buckets]
            if job.buckets:
                kept.append(job)
        source.jobs = kept
        for bucket in buckets:
            self._queue_of[bucket] = target
        if target.jobs and target.node is not None:
            self._wake(target)

    async def _fail(
        self, queue: _Queue, message: _Message, buckets: list[int], exc: Exception
    ) -> None:
        """Fail the puts of a message. If these are several and one of them does not fit the
        schema, each half is sent by itself, until only that one fails."""
        if len(message.jobs_of(buckets)) > 1:
            stored = await self._stored(message, buckets)
            if stored is not None:
                self._acknowledge(message, stored)
                buckets = [bucket for bucket in buckets if bucket not in stored]
                if isinstance(exc, SchemaError):
                    queue.jobs.extendleft(reversed(_halved(message.jobs_of(buckets))))
                    return
        for job in message.jobs_of(buckets):
            self._finish(job, job.buckets, exc)

    async def _stored(self, message: _Message, buckets: list[int]) -> list[int] | None:
        """Return the buckets that have stored their part of a message that failed, None if that
        cannot be found out. Topics without a log store the parts independently.

        The others never store it: an owner may still have an earlier request with this message,
        whose reply was lost.
        """
        if len(buckets) == 1:  # The part that failed fails in every request.
            return []
        try:
            lasts = await asyncio.gather(*(self._give_up(message.sequence, b) for b in buckets))
        except StorageError:
            return None
        number = message.sequence[1]
        return [b for b, last in zip(buckets, lasts, strict=True) if last >= number]

    async def _give_up(self, sequence: ProducerSequence, bucket: int) -> int:
        """Have the owner of a bucket refuse a put from now on; return the last stored number."""
        producer, number = sequence
        locator = self._locator_of(bucket)
        try:
            reply = await locator.ask(Request("give_up", {"writer": producer, "number": number}))
        except StorageError as exc:
            if not wire.is_unknown_request(exc, "give_up"):
                raise
            reply = await locator.ask(Request("last_number", {"writer": producer}))
        return int(reply.value)

    def _acknowledge(self, message: _Message, buckets: Collection[int]) -> None:
        for job in message.jobs:
            self._finish(job, [b for b in job.buckets if b in buckets], None)

    def _finish(self, job: _Job, buckets: Iterable[int], failure: BaseException | None) -> None:
        for bucket in buckets:
            if job.put.finish(bucket, failure):
                self._finished[bucket] += 1
                for ended in self._draining.pop(bucket, []):
                    if not ended.done():
                        ended.set_result(None)


def _halved(jobs: list[_Job]) -> list[_Job]:
    """Return the jobs as two groups."""
    middle = (len(jobs) + 1) // 2
    groups = [object()] * middle + [object()] * (len(jobs) - middle)
    return [_Job(job.put, job.buckets, group) for job, group in zip(jobs, groups, strict=True)]


def _are_light(parts: Parts) -> bool:
    """Whether packing takes a millisecond at most."""
    rows = [part for _, part in parts if isinstance(part, list)]
    if len(rows) < len(parts) or sum(map(len, rows)) > ROWS_AT_ONCE:
        return False
    return all(map(is_light, rows))


def _pack(parts: Parts, as_columns: bool) -> dict[int, PackedRows]:
    packed = wire.pack_lists([rows for _, rows in parts]) if as_columns else None
    if packed is None:
        return {bucket: PackedRows(*wire.pack_parts(rows)) for bucket, rows in parts}
    columns, start = {}, 0
    for bucket, rows in parts:
        part = ColumnRange(packed, start, len(rows))
        columns[bucket] = PackedRows([], is_arrow=False, columns=part)
        start += part.rows
    return columns


def _shared_size(job: _Job) -> int | None:
    """Return the bytes of a job that can share a message; None if it has columns, or is not packed
    yet."""
    if isinstance(job.put, _RowPut):
        return job.put.size
    packed = job.put.packed_so_far()
    if packed is None or any(packed[b].is_arrow or packed[b].columns for b in job.buckets):
        return None
    return sum(len(piece) for bucket in job.buckets for piece in packed[bucket].pieces)


def _plain_size(record: Any) -> int | None:
    """Return the rough size of a small record of plain values; None for any other."""
    if type(record) is not dict:
        return None
    size = _ROW_BYTES + 16 * len(record)
    for value in record.values():
        kind = type(value)
        if kind is str or kind is bytes:
            size += len(value)
        elif kind not in _NUMBERS:
            return None
    return size if size <= _SMALL_BYTES else None
