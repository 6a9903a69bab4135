"""Puts records from files and pipes into a topic and counts exactly what is durable."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from persisting.cli.formats import batches
from persisting.cli.topics_access import Progress
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting.queue import QueueWriter

_READ_BYTES = 1 << 20
_LONGEST_LINE = 256 << 20
_FLUSH_ROWS = 50_000
_ARROW_ROWS = 10_000
_NUMBER = "_persisting_number"


class Line(NamedTuple):
    """A record and its line number."""

    number: int
    record: dict[str, Any]


class Feed:
    """Puts records into a topic and counts how many are durable.

    Under a write id each record has a number, its position in the whole input. Each bucket
    remembers the last number that it stored and receives its records in order. So a repeated input
    skips exactly the records that are already stored, wherever the previous attempt stopped.
    """

    def __init__(
        self, writer: QueueWriter, *, durable_puts: bool, stored: dict[int, int] | None
    ) -> None:
        """Feed ``writer``.

        ``durable_puts``: a put is durable when it returns; otherwise only a flush makes it durable.

        ``stored``: under a write id, the last number that each bucket has stored.
        """
        self._writer, self._durable_puts, self._stored = writer, durable_puts, stored
        self._put = 0
        self._flushed = 0
        self._before = 0
        self.repeated = 0
        """Acknowledged records that an earlier run under the same write id had stored."""

    @property
    def acknowledged(self) -> int:
        """How many records are durable."""
        return self._put if self._durable_puts else self._flushed

    def writer_closed(self) -> None:
        """Note that the writer was closed, which flushes everything that was put."""
        self._flushed = self._put

    async def lines(self, batch: list[Line]) -> None:
        """Put records; an error names the line."""
        await _uninterrupted(self._lines(batch))

    async def arrow(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        """Put rows of a table; ``first`` is the number of the first row in its file."""
        await _uninterrupted(self._arrow(batch, first, where))

    async def finish_file(self, numbers: int) -> None:
        """Make everything durable at the end of a file that used ``numbers`` numbers."""
        self._before += numbers
        await self._flush()

    async def _lines(self, batch: list[Line]) -> None:
        groups, problem = self._by_bucket(batch)
        results = await asyncio.gather(
            *(self._group(bucket, rows) for bucket, rows in groups.items()),
            return_exceptions=True,
        )
        for result in [*results, problem]:
            if isinstance(result, BaseException):
                raise result
        await self._flush_if_due()

    def _by_bucket(self, batch: list[Line]) -> tuple[dict[int, list[Line]], SchemaError | None]:
        """Group lines by bucket, up to the first line without one; return its error as well.

        Each group is put on its own, so that each bucket succeeds or fails on its own.
        """
        groups: dict[int, list[Line]] = {}
        for line in batch:
            try:
                groups.setdefault(self._writer.bucket_of(line.record), []).append(line)
            except SchemaError as exc:
                return groups, SchemaError(f"line {line.number}: {exc}")
        return groups, None

    async def _group(self, bucket: int, rows: list[Line]) -> None:
        if self._stored is not None:
            fresh = [line for line in rows if self._before + line.number > self._stored[bucket]]
            self._count_repeated(len(rows) - len(fresh))
            rows = fresh
        if not rows:
            return
        try:
            records = [line.record for line in rows]
            await self._writer.put_batch(records, sequence=self._sequence(rows[-1].number))
            self._put += len(rows)
        except SchemaError:
            # A refused batch stores nothing. Put the records one by one to store those before the
            # bad line and to name it.
            await self._put_each(rows)

    async def _put_each(self, rows: list[Line]) -> None:
        for line in rows:
            try:
                await self._writer.put(line.record, sequence=self._sequence(line.number))
            except SchemaError as exc:
                raise SchemaError(
                    f"line {line.number}: {exc}. Some lines after it may be acknowledged; put the "
                    "input with --write-id to repeat it without duplicates"
                ) from exc
            self._put += 1

    async def _arrow(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        for part, number in await asyncio.to_thread(self._parts, batch, first):
            try:
                await self._writer.put_arrow(part, sequence=number)
            except SchemaError as exc:
                raise SchemaError(f"{where}: {exc}") from exc
            self._put += part.num_rows
        await self._flush_if_due()

    def _parts(self, batch: pa.RecordBatch, first: int) -> list[tuple[pa.Table, int | None]]:
        """Return the rows to store by bucket, each with the number of its last row."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table = pa.Table.from_batches([batch])
        if self._stored is None:
            return [(table, None)]
        start = self._before + first
        numbers = pa.array(range(start, start + table.num_rows), pa.int64())
        parts: list[tuple[pa.Table, int | None]] = []
        for bucket, part in self._writer.divided(table.append_column(_NUMBER, numbers)).items():
            fresh = part.filter(pc.greater(part.column(_NUMBER), self._stored[bucket]))
            self._count_repeated(part.num_rows - fresh.num_rows)
            if fresh.num_rows:
                last = fresh.column(_NUMBER)[-1].as_py()
                parts.append((fresh.drop_columns([_NUMBER]), last))
        return parts

    def _sequence(self, number: int) -> int | None:
        return None if self._stored is None else self._before + number

    def _count_repeated(self, count: int) -> None:
        self.repeated += count
        self._put += count

    async def _flush_if_due(self) -> None:
        if self._put - self._flushed >= _FLUSH_ROWS:
            await self._flush()

    async def _flush(self) -> None:
        if not self._durable_puts and self._put > self._flushed:
            stored = self._put
            await self._writer.flush()
            self._flushed = stored


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work even if the caller is cancelled: a put under way is stored and counts."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved, but the cancellation is what gets reported
        raise


class Source(Protocol):
    """An input whose records are put into a topic."""

    async def check(self, column: str) -> None:
        """Raise if the first record lacks the column."""

    async def feed(self, feed: Feed, progress: Progress) -> None:
        """Put all records."""


class JsonLines:
    """JSON lines of a file or pipe, put as they arrive."""

    def __init__(self, fd: int) -> None:
        self._batches = _batches(fd)
        self._first: list[Line] | None = None

    async def check(self, column: str) -> None:
        self._first = await anext(self._batches, None)
        if self._first is not None:
            line = self._first[0]
            if column not in line.record:
                raise SchemaError(_missing_field(f"line {line.number}", column, line.record))

    async def feed(self, feed: Feed, progress: Progress) -> None:
        last = 0
        async for batch in self._all():
            before, last = feed.acknowledged, batch[-1].number
            await feed.lines(batch)
            progress.advance(feed.acknowledged - before)
        await feed.finish_file(last)

    async def _all(self) -> AsyncIterator[list[Line]]:
        if self._first is not None:
            yield self._first
        async for batch in self._batches:
            yield batch


class ArrowRows:
    """The rows of a Parquet file or a Lance dataset."""

    def __init__(self, name: str, kind: str) -> None:
        self._name = name
        self._batches = batches(name, kind, _ARROW_ROWS)
        self._first: pa.RecordBatch | None = None

    async def check(self, column: str) -> None:
        self._first = await in_thread(next, self._batches, None)
        if self._first is not None and column not in self._first.schema.names:
            raise SchemaError(_missing_field(self._name, column, self._first.schema.names))

    async def feed(self, feed: Feed, progress: Progress) -> None:
        rows = 0
        async for batch in self._all():
            before = feed.acknowledged
            last = rows + batch.num_rows - 1
            await feed.arrow(batch, rows, f"{self._name}, rows {rows} to {last}")
            rows += batch.num_rows
            progress.advance(feed.acknowledged - before)
        await feed.finish_file(rows)

    async def _all(self) -> AsyncIterator[pa.RecordBatch]:
        if self._first is not None:
            yield self._first
        while (batch := await in_thread(next, self._batches, None)) is not None:
            yield batch


def _missing_field(what: str, column: str, names: Iterable[str]) -> str:
    return (
        f"{what} has no field {column!r}, which would decide the bucket of each record; its fields "
        f"are: {', '.join(names) or 'none'}. Choose one with --bucket-column"
    )


async def _batches(fd: int) -> AsyncIterator[list[Line]]:
    """Yield batches that a daemon thread reads, so that a blocked read does not delay the exit."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any](maxsize=4)

    def deliver(item: Any) -> None:
        put = queue.put(item)
        try:
            asyncio.run_coroutine_threadsafe(put, loop).result()
        except RuntimeError:
            put.close()  # the loop has ended and will never run it
            raise

    def work() -> None:
        with suppress(RuntimeError, CancelledError, asyncio.CancelledError):  # the loop has ended
            try:
                for batch in _decoded(_complete_lines(fd)):
                    deliver(batch)
                deliver(None)
            except Exception as exc:
                deliver(exc)  # the consumer must not wait forever

    threading.Thread(target=work, name="persisting-lines", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _complete_lines(fd: int) -> Iterator[list[bytes]]:
    """Yield the complete lines of each read: a slow pipe gives small batches, a file large ones."""
    rest = b""
    while data := os.read(fd, _READ_BYTES):
        *lines, tail = data.split(b"\n")
        if lines:
            lines[0] = rest + lines[0]
            rest = tail
            yield lines
        else:
            rest += tail
        if len(rest) > _LONGEST_LINE:
            raise InvalidArgument(f"a line is longer than {_LONGEST_LINE >> 20} MiB, the limit")
    if rest:
        yield [rest]


def _decoded(batches: Iterator[list[bytes]]) -> Iterator[list[Line]]:
    number = 0
    for lines in batches:
        if number == 0:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        records: list[Line] = []
        problem: InvalidArgument | None = None
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                records.append(Line(number, msgspec.json.decode(line, type=dict[str, Any])))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                problem = InvalidArgument(f"line {number} is not a JSON object: {exc}")
                problem.__cause__ = exc
                break
        if records:
            yield records
        if problem is not None:
            raise problem
