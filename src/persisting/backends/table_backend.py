"""The async interface of a bucket, shared by the backends that keep a table.

Nothing here decides about durability. Puts that are cheap run here; everything else is done by the
parts that the backend is composed of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pyarrow as pa

from persisting.backends.bucket_access import BucketAccess
from persisting.backends.bucket_reader import BucketReader
from persisting.backends.bucket_writer import BucketWriter
from persisting.backends.fairness import FairYield
from persisting.backends.table_maintenance import TableMaintenance
from persisting.backends.table_search import TableSearch, ranked
from persisting.backends.table_versions import TableVersions
from persisting.bucket.bucket import Bucket
from persisting.bucket.chunk import prepare, prepare_arrow
from persisting.bucket.handover_inbox import Inbox
from persisting.bucket.put_cost import check_records, is_light
from persisting.bucket.snapshot import Page
from persisting.bucket.snapshot_search import OFFSET
from persisting.concurrency.closing import AsyncClosing
from persisting.concurrency.coalesced import CoalescedTask, weak_callback
from persisting.concurrency.loop_bridge import LoopWaiter
from persisting.concurrency.pool import in_thread
from persisting.options import BucketOptions, check_window
from persisting.records.record_columns import RecordColumns
from persisting.table.layout import EFFECTIVE
from persisting.table.retention import Limits
from persisting.table.versions import Version


class TableBackend(AsyncClosing):
    """A bucket with async methods: a queue, and what its table can do beyond a queue."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._puts = bucket, bucket.puts
        self._fairness = FairYield()
        access = BucketAccess(bucket)
        self._writer = BucketWriter(bucket, self._fairness)
        self._reader = BucketReader(access, self._fairness)
        self._versions = TableVersions(access)
        self._search = TableSearch(access)
        self._maintenance = TableMaintenance(access)
        self._access = access
        self._closing = CoalescedTask(weak_callback(self, TableBackend._close))
        self._finished = False
        self._opened = bucket.end
        self._inbox: Inbox | None = None
        if bucket.takes_notes:
            self._inbox = Inbox(bucket, bucket.new_notes())
            self._take_handed_over(self._inbox)

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise :class:`InvalidArgument` for options that the constructor would refuse."""
        cls._options(**{"bucket_id": 0, "storage_path": ".", **options})

    @classmethod
    def _options(cls, **given: Any) -> BucketOptions:
        raise NotImplementedError

    @property
    def bucket(self) -> Bucket:
        """The synchronous core, for blocking code such as bulk writers that own the bucket."""
        return self._bucket

    def _take_handed_over(self, inbox: Inbox) -> None:
        """Store what was handed over to the bucket before anything is put to it: an overwrite that
        was decided must not remove records that were acknowledged after it."""
        try:
            inbox.complete()
            inbox.start()
        except BaseException:
            try:
                self._close()
            except Exception:
                if self._bucket.counts[1]:  # rows that only the log has
                    self._bucket.abandon()
                    self._bucket.metrics.remove()
                else:
                    self._bucket.begin_close()
                    self._bucket.finish_close()
            raise

    # Putting

    async def put(self, record: dict[str, Any]) -> None:
        """Store a single record."""
        puts = self._puts
        if puts.is_full:
            await self._writer.make_room()
        if puts.group_commit is None:
            if puts.add_row(record):
                return await self._fairness.checkpoint()
        else:
            waiter = puts.group_commit.enqueue_row(self._bucket, record, LoopWaiter)
            if waiter is not None:
                return await waiter.future
        await self._writer.store(
            lambda encoder: prepare(encoder, [record]), small=is_light([record])
        )

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        """Store multiple records, all or none."""
        if self._puts.is_full:
            await self._writer.make_room()
        rows = check_records(records)
        await self._writer.store(lambda encoder: prepare(encoder, rows), small=is_light(rows))

    async def put_arrow(self, data: pa.Table | pa.RecordBatch) -> None:
        """Store the rows of an Arrow table or batch, all or none."""
        if self._puts.is_full:
            await self._writer.make_room()
        await self._writer.store(lambda encoder: prepare_arrow(encoder, data), small=False)

    async def put_once(
        self, rows: list[dict[str, Any]] | pa.Table | RecordColumns, writer: str, number: int
    ) -> None:
        """Store rows unless the writer has stored this number, or a later one, before.

        The number is stored with the rows, in the log and in the table: a retry is safe across a
        crash of either side.
        """
        await self._writer.store_once(rows, writer, number)

    def last_number(self, writer: str) -> int:
        """Return the last number that :meth:`put_once` stored for a writer, -1 if none."""
        return self._puts.producers.last(writer)

    async def flush(self) -> None:
        """Persist buffered data; returns when it is in the table and synced."""
        await self._access.flush()

    async def make_durable(self, offset: int) -> int:
        """Have the records before ``offset`` survive power loss, without a flush if there is a log.

        Returns up to which offset all records do. The owner of a bucket without a log does nothing.
        """
        durable: int = await in_thread(self._bucket.sync_through, offset)
        return durable

    # Reading

    async def get(
        self, offset: int = 0, limit: int | None = None, *, version: Version | None = None
    ) -> list[dict[str, Any]]:
        """Retrieve records: persisted rows, then the buffer, in order.

        ``version`` reads an older state of the table: a number, a tag's name, or a datetime.
        """
        if version is not None:
            check_window(offset, limit)
            return await self._versions.records(version, offset, limit)
        records: list[dict[str, Any]] = (await self._reader.read(offset, limit)).rows
        return records

    async def read(self, offset: int = 0, limit: int | None = None) -> Page:
        """Like :meth:`get`, but with the offset of the first record and the bucket's epoch."""
        return await self._reader.read(offset, limit)

    async def get_arrow(
        self, offset: int = 0, limit: int | None = None, *, version: Version | None = None
    ) -> pa.Table:
        """Retrieve records as an Arrow table; ``version`` as in :meth:`get`."""
        if version is not None:
            check_window(offset, limit)
            return await self._versions.arrow(version, offset, limit)
        return (await self._reader.read_arrow(offset, limit)).rows

    async def read_arrow(self, offset: int = 0, limit: int | None = None) -> Page:
        """Like :meth:`get_arrow`, but with the offset of the first row and the bucket's epoch."""
        return await self._reader.read_arrow(offset, limit)

    def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream single records; with ``block`` wait for new ones when caught up.

        Records are read in pages of ``batch_size``, as in :meth:`get_pages`.
        """
        return self._reader.stream(offset, limit, block)

    def get_pages(
        self,
        offset: int = 0,
        limit: int | None = None,
        block: bool = False,
        epoch: int | None = None,
    ) -> AsyncGenerator[Page]:
        """Stream records in pages of ``batch_size`` rows.

        A page has fewer rows at the end of what is stored, and where its rows take several
        megabytes. An empty page says that the bucket was restored and its epoch is not ``epoch``.
        """
        return self._reader.pages(offset, limit, block, epoch)

    async def wait_beyond(self, offset: int, epoch: int | None = None) -> None:
        """Wait until there may be records beyond ``offset``, or the epoch is not ``epoch``.

        Raise once the backend is closed.
        """
        await self._reader.wait_beyond(offset, epoch)

    async def offset_at(self, timestamp: int) -> int:
        """Return the first offset whose record arrived at ``timestamp`` (µs of Unix time) or
        later."""
        return await self._reader.offset_at(timestamp)

    async def arrival_of(self, offset: int) -> int:
        """Return the time at which a record arrived (µs of Unix time), 0 if it is not there."""
        return await self._reader.arrival_of(offset)

    def rows_within(self, offset: int, nbytes: int) -> int:
        """Return how many rows from ``offset`` take about ``nbytes`` on average, at least one."""
        return self._bucket.snapshot().rows_within(offset, nbytes)

    def epoch(self) -> int:
        """Return how many times the bucket was restored, or an owner without a log was killed."""
        return self._bucket.epoch

    def end_offset(self) -> int:
        """Return the offset after the last record."""
        self._refresh_now()
        return self._bucket.end

    def total_count(self) -> int:
        """Get total record count (buffer + persisted)."""
        self._refresh_now()
        return sum(self._bucket.counts)

    def _refresh_now(self) -> None:
        if self._bucket.options.read_only and not self._bucket.lifecycle.closed:
            self._bucket.refresh()

    # Versions

    async def versions(self) -> list[dict[str, Any]]:
        """List the versions that can be read, oldest first: ``version``, ``timestamp``, ``rows``
        and ``operation`` of each."""
        return await self._versions.listing()

    async def tag(self, name: str, *, empty: bool = False) -> dict[str, Any]:
        """Pin everything acknowledged before this call under a name.

        A tag is read with ``version=name`` and outlives retention and the removal of versions. A
        tag of the same name is replaced. A bucket without records raises, unless ``empty``.
        """
        return await self._versions.tag(name, empty)

    async def tags(self) -> list[dict[str, Any]]:
        """List the tags: ``name`` and ``version`` of each."""
        tags = await self._versions.tags()
        return [{"name": name, "version": version} for name, version in tags.items()]

    async def delete_tag(self, name: str) -> bool:
        """Delete a tag and return whether it existed.

        Data that only this tag kept is removed with the next cleaning of versions.
        """
        return await self._versions.delete_tag(name)

    async def restore(self, version: Version, *, token: str | None = None) -> dict[str, Any]:
        """Go back to a version, as a new version with the old content.

        The end goes back, and ``epoch`` rises: readers and groups beyond the end continue there.
        Repeated calls with the same ``token`` restore once.
        """
        return await self._versions.restore(version, token)

    async def resolve(self, version: Version) -> int:
        """Return the number of a version, 0 for a time before the first one; raise if there is no
        such version."""
        return await self._versions.resolve(version)

    async def read_at(
        self, version: Version, offset: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Read records of a version, as ``get(…, version=…)`` does."""
        return await self._versions.records(version, offset, limit)

    async def arrow_at(
        self, version: Version, offset: int = 0, limit: int | None = None
    ) -> pa.Table:
        """Read records of a version as an Arrow table."""
        return await self._versions.arrow(version, offset, limit)

    async def restores(self) -> list[int]:
        """Return the end of the bucket after each restore so far."""
        return await self._versions.restore_ends()

    async def delays(self) -> list[tuple[int, int, int]]:
        """Return the delayed puts whose time has not come: first offset, rows and time of each."""
        return self._bucket.delays.all()

    # Search and random access

    async def search(
        self,
        vector: Sequence[float] | None = None,
        text: str | None = None,
        column: str | Sequence[str] | None = None,
        k: int = 10,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        metric: str | None = None,
        exact: bool = False,
        match: str = "any",
        fuzziness: int = 0,
    ) -> list[dict[str, Any]]:
        """Return the ``k`` records nearest to a vector, best for a text, or both by rank fusion.

        Each has its ``_distance`` or ``_score`` and its ``_offset``. A record is found as soon as
        it is put, index or not. ``where`` is an SQL condition that every record must meet.

        ``match`` says how the words of ``text`` are combined: ``"any"``, ``"all"``, ``"phrase"``,
        or ``"query"`` for the syntax ``+word -word "a phrase" begin* typo~``. ``fuzziness`` is the
        number of typing errors that a word may have.
        """
        rankings = await self.rankings(
            vector=vector,
            text=text,
            column=column,
            k=k,
            where=where,
            columns=columns,
            metric=metric,
            exact=exact,
            match=match,
            fuzziness=fuzziness,
        )
        return ranked(rankings, k, lambda hit: hit[OFFSET])

    async def rankings(self, *, columns: Sequence[str] | None, **asked: Any) -> list[Any]:
        """Return the hits for the vector, for the text, or one list for each: what
        :meth:`search` merges."""
        return await self._search.rankings(columns=columns, **asked)

    async def create_index(
        self,
        column: str,
        kind: str | None = None,
        *,
        metric: str = "l2",
        language: str | None = None,
    ) -> dict[str, Any]:
        """Index a field: vectors by ``vector``, words by ``text``, values by ``scalar``.

        Without ``kind`` the field's type decides; text fields get ``text``. An existing index is
        replaced. It is kept up to date, and rows that it does not cover yet are found too. With a
        ``language``, words of a text that have the same stem match each other.
        """
        return await self._search.create_index(column, kind, metric, language)

    async def drop_index(self, column: str, kind: str | None = None) -> int:
        """Drop the indexes of a field, or the one of that kind; return how many."""
        return await self._search.drop_index(column, kind)

    async def indexes(self) -> list[dict[str, Any]]:
        """List the indexes: field, kind, rows covered and rows not covered yet."""
        return await self._search.indexes()

    async def take(
        self, offsets: Sequence[int], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the records at ``offsets``, in that order; raise if an offset has no record."""
        return await self._search.take(offsets, columns)

    async def query(
        self,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the records that match an SQL condition, in order."""
        return await self._search.query(where, columns, limit)

    async def count(self, where: str | None = None) -> int:
        """Return the number of records, or of those that match an SQL condition."""
        return await self._search.count(where)

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the records whose field equals a value; fast with a ``scalar`` index on it."""
        return await self._search.lookup(column, value, columns)

    # Maintenance

    async def compact(self) -> dict[str, int]:
        """Rewrite all small fragments as larger ones; offsets, order and content do not change."""
        return await self._maintenance.compact()

    async def retain(
        self,
        *,
        rows: int | None = None,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Drop the oldest rows beyond any of the limits, by whole fragments.

        ``rows`` and ``bytes`` say how much of the newest data to keep at least, ``seconds`` how
        long to keep a row after its arrival. The offsets of the remaining rows do not change.
        """
        return await self._maintenance.retain(Limits(rows=rows, nbytes=bytes, seconds=seconds))

    async def verify(self) -> dict[str, Any]:
        """Compare every stored file with the checksum of what was written.

        ``ok`` says whether all files are intact; ``damaged`` names each damaged file and the
        offsets it holds.
        """
        return await self._maintenance.verify()

    async def stats(self) -> dict[str, Any]:
        """Get storage statistics."""
        await self._access.refresh()
        await self._fairness.checkpoint()
        bucket, options = self._bucket, self._bucket.options
        snapshot = bucket.snapshot_even_if_closed()
        persisted = snapshot.persisted - snapshot.start
        buffered = snapshot.end - snapshot.persisted
        return {
            "bucket_id": options.bucket_id,
            "backend": type(self).__name__,
            "total_count": persisted + buffered,
            "buffer_count": buffered,
            "persisted_count": persisted,
            "start_offset": snapshot.start,
            "opened_offset": self._opened,
            "end_offset": snapshot.end,
            "delayed_count": sum(rows for _, rows, _ in bucket.delays.all()),
            "epoch": snapshot.epoch,
            "storage_path": str(options.storage_path),
            "version": snapshot.view.version,
            "fragments": len(snapshot.view.sizes),
            "table_bytes": sum(size.nbytes for size in snapshot.view.sizes),
            "upkeep_error": bucket.maintenance.error,
            "retention_held_by": bucket.maintenance.held_by,
            "flush_count": bucket.flusher.count,
            "flush_seconds": bucket.flusher.seconds,
            "flush_error": bucket.flusher.error,
            "compression": options.compression,
            "compression_effective": EFFECTIVE[options.compression],
            "read_only": options.read_only,
        }

    # Closing

    async def close(self) -> None:
        """Flush and release the bucket; may be called twice.

        If the flush fails the error is raised, the backend stays open and keeps every record, and
        ``close`` can be called again once the cause is fixed.
        """
        # All callers, from whichever loop, share one close; cancelling one does not stop it.
        await asyncio.shield(asyncio.wrap_future(self._closing.request()))

    def close_now(self) -> None:
        """Close in this thread, for a caller that has the backend to itself."""
        self._close()

    def _close(self) -> None:
        """Close in one thread from start to end.

        Waiting for another job of the pool here could deadlock: all its threads may be closing.
        """
        if self._finished:
            return
        bucket = self._bucket
        bucket.begin_close()
        try:
            if bucket.group_commit is not None:
                bucket.group_commit.write_now()
            if not bucket.options.read_only:
                bucket.flusher.flush()
        except BaseException:
            bucket.cancel_close()
            raise
        bucket.finish_close()
        if self._inbox is not None:
            self._inbox.stop()
        self._finished = True
