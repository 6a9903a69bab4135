"""Records from files and pipes into a topic, with an exact count of what is stored."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persisting.cli.working import Progress
from persisting.errors import InvalidArgument, SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting.queue import QueueWriter

_READ_BYTES = 1 << 20
_LONGEST_LINE = 256 << 20
_FLUSH_ROWS = 50_000
_BATCH_ROWS = 1000
"""Lines of a batch under a write id: the same input must make the same batches."""


class Line(NamedTuple):
    """A record and the number of its line."""

    number: int
    record: dict[str, Any]


class Feed:
    """Puts batches into a topic and knows how many records are stored durably."""

    def __init__(self, writer: QueueWriter, *, at_once: bool, known: dict[int, int] | None) -> None:
        """``at_once``: a put is durable when it returns; else a flush makes it so.

        ``known``: the writer has a name, under which each bucket has stored batches up to this
        number.
        """
        self._writer, self._at_once, self._known = writer, at_once, known
        self.repeated = 0
        """Records among the acknowledged that had been stored before, under the same name."""
        self._put = 0
        self._flushed = 0
        self._batches = 0

    @property
    def acknowledged(self) -> int:
        """How many records are durable, whatever happens now."""
        return self._put if self._at_once else self._flushed

    async def lines(self, batch: list[Line]) -> None:
        """Put records; an error names the line."""
        if self._known is not None:
            await self._whole([line.record for line in batch], f"lines from {batch[0].number}")
        else:
            groups, problem = self._by_bucket(batch)
            results = await asyncio.gather(*map(self._group, groups), return_exceptions=True)
            for result in [*results, problem]:
                if isinstance(result, BaseException):
                    raise result
        await self._flush_now_and_then()

    async def arrow(self, batch: pa.RecordBatch, where: str) -> None:
        """Put rows of a table."""
        await self._whole(batch, where)
        await self._flush_now_and_then()

    async def finish(self) -> None:
        """Make everything durable."""
        if not self._at_once and self._put > self._flushed:
            await self._writer.flush()
            self._flushed = self._put

    async def _whole(self, rows: Any, where: str) -> None:
        self._batches += 1
        sequence = None if self._known is None else self._batches
        try:
            if isinstance(rows, list):
                await self._writer.put_batch(rows, sequence=sequence)
            else:
                await self._writer.put_arrow(rows, sequence=sequence)
        except SchemaError as exc:
            raise SchemaError(f"{where}: {exc}") from exc
        self._put += len(rows) if isinstance(rows, list) else rows.num_rows
        self.repeated += await asyncio.to_thread(self._count_repeated, rows)

    def _count_repeated(self, rows: Any) -> int:
        if not self._known or self._batches > max(self._known.values()):
            return 0
        records = rows if isinstance(rows, list) else rows.to_pylist()
        return sum(
            self._known[self._writer.bucket_of(record)] >= self._batches for record in records
        )

    def _by_bucket(self, batch: list[Line]) -> tuple[list[list[Line]], SchemaError | None]:
        """The lines by their buckets, as far as they have one; then what is wrong.

        A list goes to each bucket as one unit: put apart, each has a result of its own.
        """
        groups: dict[int, list[Line]] = {}
        for line in batch:
            try:
                groups.setdefault(self._writer.bucket_of(line.record), []).append(line)
            except SchemaError as exc:
                return list(groups.values()), SchemaError(f"line {line.number}: {exc}")
        return list(groups.values()), None

    async def _group(self, rows: list[Line]) -> None:
        try:
            await self._writer.put_batch([line.record for line in rows])
            self._put += len(rows)
        except SchemaError:
            # Nothing of it is stored: one by one, to store what comes before and name the line.
            for line in rows:
                try:
                    await self._writer.put(line.record)
                except SchemaError as exc:
                    raise SchemaError(
                        f"line {line.number}: {exc}. Lines behind it may be among the acknowledged "
                        "ones: with --write-id a repetition stores nothing twice"
                    ) from exc
                self._put += 1

    async def _flush_now_and_then(self) -> None:
        if not self._at_once and self._put - self._flushed >= _FLUSH_ROWS:
            await self.finish()


async def feed_lines(feed: Feed, fd: int, progress: Progress, *, numbered: bool) -> None:
    """JSON lines of a file or pipe, as they come."""
    async for batch in _batches(fd, numbered):
        before = feed.acknowledged
        await feed.lines(batch)
        progress.advance(feed.acknowledged - before)
    await feed.finish()


async def _batches(fd: int, numbered: bool) -> AsyncIterator[list[Line]]:
    """Batches that a thread reads; it does not hold the program up when that ends."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any](maxsize=4)

    def deliver(item: Any) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def work() -> None:
        with suppress(RuntimeError, asyncio.CancelledError):  # the loop has ended
            try:
                for batch in _decoded(_fixed(fd) if numbered else _as_they_come(fd)):
                    deliver(batch)
                deliver(None)
            except Exception as exc:
                deliver(exc)  # who waits for lines must not wait for ever

    threading.Thread(target=work, name="persisting-lines", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _as_they_come(fd: int) -> Iterator[list[bytes]]:
    """The whole lines of each read: a slow pipe gives small batches, a file large ones."""
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
            raise InvalidArgument(f"a line is longer than {_LONGEST_LINE >> 20} MiB")
    if rest:
        yield [rest]


def _fixed(fd: int) -> Iterator[list[bytes]]:
    """Batches that depend on the lines alone."""
    waiting: list[bytes] = []
    for lines in _as_they_come(fd):
        waiting += lines
        while len(waiting) >= _BATCH_ROWS:
            yield waiting[:_BATCH_ROWS]
            waiting = waiting[_BATCH_ROWS:]
    if waiting:
        yield waiting


def _decoded(batches: Iterator[list[bytes]]) -> Iterator[list[Line]]:
    number = 0
    for lines in batches:
        if number == 0:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        found: list[Line] = []
        problem: InvalidArgument | None = None
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                found.append(Line(number, msgspec.json.decode(line, type=dict[str, Any])))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                problem = InvalidArgument(f"line {number} is no JSON object: {exc}")
                problem.__cause__ = exc
                break
        if found:
            yield found
        if problem is not None:
            raise problem
