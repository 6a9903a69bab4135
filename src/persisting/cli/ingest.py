"""Puts records from files and pipes into a topic and counts exactly what is durable."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from persisting.cli import output
from persisting.cli.formats import FileFormat, batches
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
_SHOWN_PROBLEMS = 10


class Line(NamedTuple):
    """A record, its line number, and the line itself."""

    number: int
    record: dict[str, Any]
    text: bytes


class BadLines:
    """Keeps lines that cannot be stored in a file.

    The file is appended to. Lines that it contains at the beginning were set aside by an earlier
    run; they are skipped again and not added twice, so that an input can be repeated.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115
        self._before = set(Path(path).read_bytes().splitlines())
        self._lock = threading.Lock()
        self.count = 0

    def contains(self, text: bytes) -> bool:
        """Return whether an earlier run set this line aside."""
        return bool(self._before) and text.rstrip(b"\r") in self._before

    def keep(self, text: bytes, problem: str) -> None:
        """Write a line to the file durably and say what is wrong with it."""
        with self._lock:
            self.count += 1
            if not self.contains(text):
                self._file.write(text.rstrip(b"\r") + b"\n")
                os.fsync(self._file.fileno())
            if self.count <= _SHOWN_PROBLEMS:
                output.say(f"skipped: {problem}")

    def close(self) -> None:
        self._file.close()
        if self.count > _SHOWN_PROBLEMS:
            output.say(f"skipped: {self.count - _SHOWN_PROBLEMS:,} more")


class IngestFeed:
    """Puts records into a topic and counts how many are durable.

    Under a write id each record has a number, its position in the whole input. Each bucket
    remembers the last number that it stored and receives its records in order. So a repeated input
    skips exactly the records that are already stored, wherever the previous attempt stopped.
    """

    def __init__(
        self,
        writer: QueueWriter,
        *,
        durable_puts: bool,
        stored: dict[int, int] | None,
        bad: BadLines | None = None,
    ) -> None:
        """Feed ``writer``.

        ``durable_puts``: a put is durable when it returns; otherwise only a flush makes it durable.

        ``stored``: under a write id, the last number that each bucket has stored.

        ``bad``: where lines go that cannot be stored; None: they are errors.
        """
        self._bad = bad
        self._writer, self._durable_puts, self._stored = writer, durable_puts, stored
        self._put = 0
        self._flushed = 0
        self._before = 0
        self.repeated = 0
        """Acknowledged records that an earlier run under the same write id had stored."""

    @property
    def bucket_column(self) -> str:
        """The field that decides the bucket of a record."""
        return self._writer.bucket_column

    @property
    def numbered(self) -> bool:
        """Whether records have numbers, so that the input can be repeated."""
        return self._stored is not None

    @property
    def acknowledged(self) -> int:
        """How many records are durable."""
        return self._put if self._durable_puts else self._flushed

    def writer_closed(self) -> None:
        """Note that the writer was closed, which flushes everything that was put."""
        self._flushed = self._put

    async def lines(self, batch: list[Line], source: str = "") -> None:
        """Put records; an error names the line, and ``source`` if it is not empty."""
        await _uninterrupted(self._lines(batch, source))

    async def arrow(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        """Put rows of a table; ``first`` is the number of the first row in its file."""
        await _uninterrupted(self._arrow(batch, first, where))

    async def finish_file(self, numbers: int) -> None:
        """Make everything durable at the end of a file that used ``numbers`` numbers."""
        self._before += numbers
        await self._flush()

    async def _lines(self, batch: list[Line], source: str) -> None:
        groups, problem = self._by_bucket(batch, source)
        results = await asyncio.gather(
            *(self._group(bucket, rows, source) for bucket, rows in groups.items()),
            return_exceptions=True,
        )
        for result in [*results, problem]:
            if isinstance(result, BaseException):
                raise result
        await self._flush_if_due()

    def _by_bucket(
        self, batch: list[Line], source: str
    ) -> tuple[dict[int, list[Line]], SchemaError | None]:
        """Group lines by bucket, up to the first line without one; return its error as well.

        Each group is put on its own, so that each bucket succeeds or fails on its own.
        """
        groups: dict[int, list[Line]] = {}
        for line in batch:
            if self._bad is not None and self._bad.contains(line.text):
                self._bad.keep(line.text, f"{_place(source, line.number)}: skipped before")
                continue
            try:
                groups.setdefault(self._writer.bucket_of(line.record), []).append(line)
            except SchemaError as exc:
                problem = f"{_place(source, line.number)}: {exc}"
                if self._bad is None:
                    return groups, SchemaError(problem)
                self._bad.keep(line.text, problem)
        return groups, None

    async def _group(self, bucket: int, rows: list[Line], source: str) -> None:
        if self._stored is not None:
            fresh = [line for line in rows if self._before + line.number > self._stored[bucket]]
            self._count_repeated(len(rows) - len(fresh))
            rows = fresh
        if rows:
            await self._put_rows(rows, source)

    async def _put_rows(self, rows: list[Line], source: str) -> None:
        """Put records of one bucket in order, up to a bad line, or without the bad lines."""
        try:
            records = [line.record for line in rows]
            await self._writer.put_batch(records, sequence=self._sequence(rows[-1].number))
            self._put += len(rows)
        except SchemaError as exc:
            if len(rows) > 1:
                # A refused batch stores nothing. Halve it to find the bad line, in order.
                middle = len(rows) // 2
                await self._put_rows(rows[:middle], source)
                await self._put_rows(rows[middle:], source)
                return
            problem = f"{_place(source, rows[0].number)}: {exc}"
            if self._bad is None:
                raise SchemaError(problem) from exc
            self._bad.keep(rows[0].text, problem)

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

    async def feed(self, feed: IngestFeed, progress: Progress) -> None:
        """Put all records."""


class JsonLines:
    """JSON lines of a file or pipe, put as they arrive."""

    def __init__(
        self, read: Callable[[int], bytes], name: str = "", bad: BadLines | None = None
    ) -> None:
        """``name`` is part of the messages; empty if there is only one input."""
        self._name = name
        self._batches = _batches(read, name, bad)
        self._first: list[Line] | None = None

    async def check(self, column: str) -> None:
        self._first = await anext(self._batches, None)
        if self._first is not None:
            line = self._first[0]
            if column not in line.record:
                place = _place(self._name, line.number)
                raise SchemaError(_missing_field(place, column, line.record))

    async def feed(self, feed: IngestFeed, progress: Progress) -> None:
        last = 0
        async for batch in self._all():
            before, last = feed.acknowledged, batch[-1].number
            await feed.lines(batch, self._name)
            progress.advance(feed.acknowledged - before)
        await feed.finish_file(last)

    async def _all(self) -> AsyncIterator[list[Line]]:
        if self._first is not None:
            yield self._first
        async for batch in self._batches:
            yield batch


class ArrowRows:
    """The rows of a table file: Parquet, Lance, CSV or TSV."""

    def __init__(
        self, name: str, form: FileFormat, texts: list[str], bad: BadLines | None = None
    ) -> None:
        self._name, self._bad = name, bad
        invalid_row = None if bad is None else self._skip_row
        self._batches = batches(name, form, _ARROW_ROWS, texts, invalid_row)
        self._first: pa.RecordBatch | None = None

    def _skip_row(self, number: int | None, text: str) -> str:
        """Set a row of a CSV file aside that has a wrong number of values."""
        assert self._bad is not None
        problem = f"{self._name}, row {number}: wrong number of values"
        self._bad.keep(text.rstrip("\r\n").encode(), problem)
        return "skip"

    async def check(self, column: str) -> None:
        self._first = await in_thread(next, self._batches, None)
        if self._first is not None and column not in self._first.schema.names:
            raise SchemaError(_missing_field(self._name, column, self._first.schema.names))

    async def feed(self, feed: IngestFeed, progress: Progress) -> None:
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


def _place(source: str, number: int) -> str:
    return f"{source}, line {number}" if source else f"line {number}"


def _missing_field(what: str, column: str, names: Iterable[str]) -> str:
    return (
        f"{what} has no field {column!r}, which would decide the bucket of each record; its fields "
        f"are: {', '.join(names) or 'none'}. Choose one with --bucket-column"
    )


async def _batches(
    read: Callable[[int], bytes], name: str, bad: BadLines | None
) -> AsyncIterator[list[Line]]:
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
                for batch in _decoded(_complete_lines(read), name, bad):
                    deliver(batch)
                deliver(None)
            except Exception as exc:
                deliver(exc)  # the consumer must not wait forever

    threading.Thread(target=work, name="persisting-lines", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _complete_lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """Yield the complete lines of each read: a slow pipe gives small batches, a file large ones."""
    rest = b""
    while data := read(_READ_BYTES):
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


def _decoded(
    batches: Iterator[list[bytes]], name: str, bad: BadLines | None
) -> Iterator[list[Line]]:
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
                records.append(Line(number, msgspec.json.decode(line, type=dict[str, Any]), line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                message = f"{_place(name, number)} is not a JSON object: {exc}"
                if bad is not None:
                    bad.keep(line, message)
                    continue
                problem = InvalidArgument(message)
                problem.__cause__ = exc
                break
        if records:
            yield records
        if problem is not None:
            raise problem
