"""Search, lookup, random access and indexes of a bucket, as coroutines."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from persisting.backends.bucket_access import BucketAccess
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import (
    DISTANCE,
    SCORE,
    SnapshotSearch,
    condition,
    fuse_rankings,
    only_equal,
)
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument
from persisting.table import indexes
from persisting.table.search import SearchRequest


class TableSearch:
    """Finds records of one bucket, in the table and in the buffer."""

    def __init__(self, access: BucketAccess) -> None:
        self._access, self._bucket = access, access.bucket

    async def rankings(self, *, columns: Sequence[str] | None, **query: Any) -> list[Any]:
        """Return the hits for the vector, for the text, or one list for each."""

        def find(snapshot: Snapshot) -> list[list[dict[str, Any]]]:
            search = self._search(snapshot)
            fields = _fields(columns, search)
            rankings = []
            for request in search.requests(**query):
                value = DISTANCE if isinstance(request, SearchRequest) else SCORE
                rankings.append(search.records(search.hits(request), value, fields))
            return rankings

        with self._bucket.metrics.searching():
            return await self._access.read(find)

    async def take(
        self, offsets: Sequence[int], columns: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Return the records at ``offsets``, in that order."""
        numbers = _offsets(offsets)

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            return snapshot.take(numbers, _fields(columns, self._search(snapshot)))

        return await self._access.read(find)

    async def query(
        self, where: str | None, columns: Sequence[str] | None, limit: int | None
    ) -> list[dict[str, Any]]:
        """Return the records that match an SQL condition, in order."""

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            search = self._search(snapshot)
            return search.matching(where, _fields(columns, search), limit)

        return await self._access.read(find)

    async def count(self, where: str | None) -> int:
        """Return the number of records that match an SQL condition."""
        return await self._access.read(lambda snapshot: self._search(snapshot).count(where))

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Return the records whose field equals a value."""

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            search = self._search(snapshot)
            _fields(columns, search)
            indexes.field_of(search.known, column)
            names = None if columns is None else list(dict.fromkeys([*columns, column]))
            candidates = search.matching(condition(column, value), _fields(names, search), None)
            return only_equal(candidates, column, value, columns)

        return await self._access.read(find)

    def _search(self, snapshot: Snapshot) -> SnapshotSearch:
        bucket = self._bucket
        return SnapshotSearch(
            snapshot, bucket.known_schema(), bucket.maintenance.index_specs, bucket.buffer_view
        )

    # Indexes

    async def create_index(
        self, column: str, kind: str | None, metric: str, language: str | None = None
    ) -> dict[str, Any]:
        """Flush, then build an index and keep it up to date from now on."""
        await self._access.flush()

        def create() -> dict[str, Any]:
            spec = indexes.spec_for(self._bucket.known_schema(), column, kind, metric, language)
            return self._bucket.maintenance.create_index(spec)

        return await self._access.write(create)

    async def drop_index(self, column: str, kind: str | None) -> int:
        """Drop the indexes of a field; return how many."""
        return await self._access.write(self._bucket.maintenance.drop_index, column, kind)

    async def indexes(self) -> list[dict[str, Any]]:
        """Describe each index."""
        self._bucket.lifecycle.check_open()
        await self._access.refresh()
        maintenance = self._bucket.maintenance

        def describe() -> list[dict[str, Any]]:
            specs = indexes.usable(self._bucket.known_schema(), maintenance.index_specs)
            return [maintenance.describe_index(spec) for spec in specs]

        return await in_thread(describe)


def ranked(rankings: list[list[dict[str, Any]]], k: int, key: Any) -> list[dict[str, Any]]:
    """Return the best ``k`` hits of one ranking, or of several by rank fusion."""
    if len(rankings) == 1:
        return rankings[0][:k]
    best = []
    for hit, score in fuse_rankings(rankings, key, k):
        fields = {name: value for name, value in hit.items() if name not in (DISTANCE, SCORE)}
        best.append({**fields, SCORE: score})
    return best


def _offsets(given: Any) -> list[int]:
    """Return offsets as non-negative integers, or raise."""
    offsets = []
    for offset in given if isinstance(given, Iterable) else [given]:
        try:
            number = -1 if isinstance(offset, bool) else operator.index(offset)
        except TypeError:
            number = -1
        if number < 0 or not isinstance(given, Iterable):
            raise InvalidArgument(f"take needs a list of whole numbers from 0, got {given!r:.80}")
        offsets.append(number)
    return offsets


def _fields(columns: Sequence[str] | None, search: SnapshotSearch) -> pa.Schema | None:
    """Return the fields to read, None for all."""
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise InvalidArgument(f"columns must be a list of field names, got {columns!r}")
    return pa.schema([indexes.field_of(search.known, name) for name in columns])
