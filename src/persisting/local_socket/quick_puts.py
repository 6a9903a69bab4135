"""Puts of plain rows, and of columns of the bucket's schema, from a connection to the log of their
buckets without a task in between."""

from __future__ import annotations

import asyncio
from typing import Any

from persisting.backends.table_backend import TableBackend
from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import (
    MAX_BATCH_BYTES,
    ROWS_AT_ONCE,
    Chunk,
    columns_fit,
    prepare_columns,
)
from persisting.bucket.delays import is_delay
from persisting.bucket.group_commit import GroupCommit
from persisting.bucket.pending_puts import PendingPut, Waiter
from persisting.bucket.producer_sequences import ProducerSequence, check_number, check_writer
from persisting.cluster import wire
from persisting.cluster.wire import Request
from persisting.local_socket.open_buckets import OpenBuckets
from persisting.records import RecordEncoder
from persisting.records.record_columns import check_counts
from persisting.topic.local import LocalTopic

_QUICK_BYTES = 16 * 1024
_QUICK_COLUMN_BYTES = 256 * 1024
"""A put with more bytes is decoded and checked by a task, so that it does not hold up other calls.
Columns take less time than rows."""


class QuickPuts:
    """Queues the puts of other processes for the log if nothing stands in the way.

    They need no lock per producer, unlike puts that a task prepares: the numbers of a producer
    arrive in order over one connection, and after a lost connection a caller sends a number again
    before the next one.
    """

    def __init__(self, topic: LocalTopic, buckets: OpenBuckets) -> None:
        """Belongs to the running event loop."""
        self._topic, self._buckets = topic, buckets
        self._loop = asyncio.get_running_loop()
        self._to_start: list[GroupCommit] = []
        """Logs with puts that no thread writes yet."""

    def enqueue(
        self, bucket: int, request: Request, waiter: Waiter, *, alone: bool = False
    ) -> bool:
        """Queue a put; return False, with nothing queued, if its rows are not plain or it cannot be
        queued now; :meth:`BucketService.answer` then does the rest.

        The put of a lone peer (``alone``) is written in this thread: the event loop belongs to the
        socket, nobody else waits for it, and the peer is spared two switches of threads. With
        several peers, a thread starts writing once all messages that have arrived are queued.
        """
        try:
            if request.rows is None or request.arrow or "upload" in request.args:
                return False
            if self._topic.store is not None:
                return False  # its service knows whether the bucket was lost to another process
            mark = request.args["mark"]
            check_writer(mark[0])
            producer = mark[0], check_number(mark[1])
            if "columns" in request.args:
                log = self._enqueue_columns(bucket, request, producer, waiter)
            else:
                log = self._enqueue_rows(bucket, request, producer, waiter)
        except Exception:
            return False  # a task meets the same error, and answers with it
        if log is not None:
            self._start_soon(log, alone)
        return log is not None

    def _enqueue_rows(
        self, bucket: int, request: Request, producer: ProducerSequence, waiter: Waiter
    ) -> GroupCommit | None:
        """Return the log that the put is queued for, None if it is not."""
        sections: list[tuple[Bucket, Chunk]] = []
        log: GroupCommit | None = None
        for number, pieces in _parts_of(bucket, request):
            core = self._open_bucket(number, producer)
            if core is None or log not in (None, core.group_commit):
                return None
            log = core.group_commit
            chunk = _chunk(core.schema_state.encoder, pieces)
            if chunk is None:
                return None
            sections.append((core, chunk))
        return log if log is not None and log.enqueue_rows(sections, waiter, producer) else None

    def _enqueue_columns(
        self, bucket: int, request: Request, producer: ProducerSequence, waiter: Waiter
    ) -> GroupCommit | None:
        """The same for records that are sent as columns, and need no conversion."""
        pieces = request.rows or []
        if sum(map(len, pieces)) > _QUICK_COLUMN_BYTES:
            return None
        columns = wire.unpack_columns(pieces, request.args["columns"])
        if not 0 < len(columns) <= ROWS_AT_ONCE:
            return None
        counts = {bucket: len(columns)}
        if request.op == "put_parts":
            counts = {number: count for number, count, _ in request.args["buckets"]}
            if len(counts) < len(request.args["buckets"]):
                return None
            check_counts(list(counts.values()), len(columns))
        targets: list[tuple[Bucket, int]] = []
        for number, count in counts.items():
            core = self._open_bucket(number, producer)
            if core is None:
                return None
            targets.append((core, count))
        first = targets[0][0]
        log = first.group_commit
        if log is None or any(core.group_commit is not log for core, _ in targets):
            return None
        if not columns_fit(first.schema_state.encoder, columns):
            return None
        prepared = prepare_columns(first.schema_state.encoder, columns)
        if first.schema_state.must_propose(prepared):
            return None
        put = log.enqueue(prepared, targets, waiter, producer)
        # If the number is stored, or another put waits for it, a task finds the outcome.
        return log if isinstance(put, PendingPut) and put.waiter is waiter else None

    def _start_soon(self, log: GroupCommit, alone: bool) -> None:
        if alone:
            if not (log.syncs_quickly and log.write_if_idle()):
                log.start()
            return
        if not self._to_start:
            self._loop.call_soon(self._start)
        if log not in self._to_start:
            self._to_start.append(log)

    def _start(self) -> None:
        logs, self._to_start = self._to_start, []
        for log in logs:
            log.start()

    def _open_bucket(self, bucket: int, producer: ProducerSequence) -> Bucket | None:
        """Return a bucket that takes this put, None if it has to be waited for, or refused."""
        service = self._buckets.service(bucket)
        if service is None or service.numbered_puts.is_given_up(producer):
            return None
        backend = self._topic.open_backend(bucket)
        if not isinstance(backend, TableBackend):
            return None
        core = backend.bucket
        if core.group_commit is None or core.puts.is_full:
            return None
        if is_delay(producer):
            core.delays.check_room()
        return core


def _parts_of(bucket: int, request: Request) -> list[tuple[int, list[bytes]]]:
    """Return the pieces for each bucket; none if this is not a small put of records."""
    pieces = request.rows or []
    if sum(map(len, pieces)) > _QUICK_BYTES:
        return []
    if request.op == "put":
        return [(bucket, pieces)]
    parts, start = [], 0
    for number, count, is_arrow in request.args["buckets"]:
        if is_arrow:
            return []
        parts.append((number, pieces[start : start + count]))
        start += count
    return parts if len({number for number, _ in parts}) == len(parts) else []


def _chunk(encoder: RecordEncoder, pieces: list[bytes]) -> Chunk | None:
    """Return records as a chunk of rows; None if one needs more than a check."""
    rows: list[dict[str, Any]] = []
    for piece in pieces:
        rows += wire.unpack_records(piece)
    nbytes = 0
    for row in rows:
        size = encoder.known_row(row)
        if size is None:
            return None
        nbytes += size
    return Chunk(encoder, rows=rows, nbytes=nbytes) if rows and nbytes < MAX_BATCH_BYTES else None
