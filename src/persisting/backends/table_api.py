"""The bucket as a table: versions, search, random access and upkeep, as async methods."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from persisting.backends.async_backend import AsyncBackend
from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import (
    DISTANCE,
    OFFSET,
    SCORE,
    SnapshotSearch,
    condition,
    fused,
    only_equal,
)
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument
from persisting.table import indexes, verify, versions
from persisting.table.retention import Limits
from persisting.table.versions import Version

_T = TypeVar("_T")


class TableApi(AsyncBackend):
    """What a bucket offers beyond the queue."""

    async def _by_the_owner(self, call: Callable[..., _T], *args: Any) -> _T:
        """Run something that writes; a cancelled caller leaves it to its end."""
        self._bucket.check_writable()
        return await asyncio.shield(in_thread(call, *args))

    # Versions

    async def versions(self) -> list[dict[str, Any]]:
        """The versions that can be read, oldest first: ``version``, ``timestamp``, ``rows`` and
        ``operation`` of each."""
        self._bucket.check_open()
        await self._refresh()
        dataset = self._bucket.table.view.dataset
        return [] if dataset is None else await in_thread(versions.listing, dataset)

    async def tag(self, name: str, *, empty: bool = False) -> dict[str, Any]:
        """Pin all that was acknowledged before this call under a name.

        A tag is read with ``version=name`` and outlives retention and the cleaning of versions. A
        tag of the same name is replaced. A bucket without records raises, unless ``empty``.
        """
        versions.check_tag(name)
        await self.flush()
        return await self._by_the_owner(self._bucket.upkeep.tag, name, empty)

    async def tags(self) -> list[dict[str, Any]]:
        """The tags: ``name`` and ``version`` of each."""
        self._bucket.check_open()
        await self._refresh()
        dataset = self._bucket.table.view.dataset
        found = {} if dataset is None else await in_thread(versions.tags, dataset)
        return [{"name": name, "version": version} for name, version in found.items()]

    async def delete_tag(self, name: str) -> bool:
        """Whether there was such a tag; what only it held goes with the next cleaning."""
        return await self._by_the_owner(self._bucket.upkeep.delete_tag, name)

    async def restore(self, version: Version, *, token: str | None = None) -> dict[str, Any]:
        """Go back to a version, as a new version with the old content.

        The end goes back, and ``epoch`` rises: readers and groups beyond the end go on there.
        The same ``token`` restores once.
        """
        return await self._by_the_owner(self._bucket.upkeep.restore, version, token)

    async def resolve(self, version: Version) -> int:
        """The number of the version that is meant, 0 for the time before the first; or raise."""
        await self._refresh()

        def look() -> int:
            return self._bucket.at(version).view.version

        return await in_thread(look)

    async def read_at(
        self, version: Version, offset: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The records of a version, as ``get(…, version=…)`` gives them."""
        await self._refresh()
        snapshot = await in_thread(self._bucket.at, version)
        return await in_thread(snapshot.records, snapshot.first(offset), limit)

    async def arrow_at(
        self, version: Version, offset: int = 0, limit: int | None = None
    ) -> pa.Table:
        """The same as an Arrow table."""
        await self._refresh()
        snapshot = await in_thread(self._bucket.at, version)
        return await in_thread(snapshot.table, snapshot.first(offset), limit)

    async def restores(self) -> list[int]:
        """The end of the bucket after each restore so far."""
        await self._refresh()
        return [one.end for one in self._bucket.table.restores]

    # Search

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
    ) -> list[dict[str, Any]]:
        """The ``k`` records nearest to a vector, best for words, or both by rank fusion.

        Each has its ``_distance`` or ``_score`` and its ``_offset``. A record is found as soon as
        it is put, index or not. ``where`` is an SQL condition that all must meet.
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
        )
        return ranked(rankings, k, lambda hit: hit[OFFSET])

    async def rankings(self, *, columns: Sequence[str] | None, **asked: Any) -> list[Any]:
        """The hits for the vector, for the words, or for each: what :meth:`search` merges."""

        def find(snapshot: Snapshot) -> list[list[dict[str, Any]]]:
            finder = self._finder(snapshot)
            names = _fields(columns, finder)
            return [
                finder.found(finder.hits(ask), DISTANCE if ask.text is None else SCORE, names)
                for ask in finder.asks(**asked)
            ]

        with self._bucket.metrics.searching():
            return await self._reading(find)

    async def create_index(
        self, column: str, kind: str | None = None, *, metric: str = "l2"
    ) -> dict[str, Any]:
        """Index a field: vectors by ``vector``, words by ``text``, values by ``scalar``.

        Without ``kind`` the field's type decides; text fields get ``text``. An index that is there
        is replaced. It follows new rows by itself, and rows it does not cover yet are found too.
        """
        await self.flush()

        def create() -> dict[str, Any]:
            known = self._bucket.known_schema()
            wanted = indexes.spec_for(known, column, kind, metric)
            return self._bucket.upkeep.create_index(wanted)

        return await self._by_the_owner(create)

    async def drop_index(self, column: str, kind: str | None = None) -> int:
        """Do without the indexes of a field, or the one of that kind; how many there were."""
        return await self._by_the_owner(self._bucket.upkeep.drop_index, column, kind)

    async def indexes(self) -> list[dict[str, Any]]:
        """The indexes: field, kind, rows covered and rows not covered yet."""
        self._bucket.check_open()
        await self._refresh()
        keeper = self._bucket.upkeep

        def describe() -> list[dict[str, Any]]:
            return [keeper.describe(one) for one in keeper.wanted]

        return await in_thread(describe)

    # Random access

    async def take(
        self, offsets: Sequence[int], columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The records at ``offsets``, in that order; one that is not there raises."""
        places = _offsets(offsets)

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            return snapshot.take(places, _fields(columns, self._finder(snapshot)))

        return await self._reading(find)

    async def query(
        self,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """The records that an SQL condition keeps, in order."""

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            finder = self._finder(snapshot)
            return finder.matching(where, _fields(columns, finder), limit)

        return await self._reading(find)

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The records whose field has a value; quick with a ``scalar`` index on it."""

        def find(snapshot: Snapshot) -> list[dict[str, Any]]:
            finder = self._finder(snapshot)
            _fields(columns, finder)
            indexes.field_of(finder.known, column)
            names = None if columns is None else [*columns, column]
            names = names if names is None else list(dict.fromkeys(names))
            found = finder.matching(condition(column, value), _fields(names, finder), None)
            return only_equal(found, column, value, columns)

        return await self._reading(find)

    def _finder(self, snapshot: Snapshot) -> SnapshotSearch:
        bucket = self._bucket
        return SnapshotSearch(
            snapshot, bucket.known_schema(), bucket.upkeep.wanted, bucket.buffer_view
        )

    # Upkeep

    async def compact(self) -> dict[str, int]:
        """Rewrite all small fragments as larger ones; offsets, order and content stay."""
        await self.flush()
        return await self._by_the_owner(self._bucket.upkeep.compact)

    async def retain(
        self,
        *,
        rows: int | None = None,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, int]:
        """Drop the oldest rows that lie beyond any of the limits, by whole fragments.

        ``rows`` and ``bytes`` say how much of the newest to keep at least, ``seconds`` how long a
        row is kept after its arrival. The offsets of what is left do not change.
        """
        limits = Limits(rows=rows, nbytes=bytes, seconds=seconds)
        limits.check()
        if not limits.any:
            raise InvalidArgument("retain needs rows=…, bytes=… or seconds=…")
        await self.flush()
        return await self._by_the_owner(self._bucket.upkeep.retain, limits)

    async def verify(self) -> dict[str, Any]:
        """Compare every stored file with the checksum of what was written.

        ``ok`` says whether all is well; ``damaged`` names each file that is not what it was, and
        the offsets it holds.
        """
        await self._refresh()
        bucket = self._bucket
        view = bucket.snapshot().view
        report = await in_thread(verify.verify, bucket.table, view)
        while report.damaged and bucket.snapshot().view.version != view.version:
            view = bucket.snapshot().view  # what is missing may have been cleaned up meanwhile
            report = await in_thread(verify.verify, bucket.table, view)
        if bucket.options.read_only and bucket.snapshot().view.version == view.version:
            await in_thread(verify.check_signature, bucket.table, report)
        bucket.metrics.verified(len(report.damaged))
        return {
            "ok": report.ok,
            "rows": report.rows,
            "files": report.files,
            "damaged": report.damaged,
            "unchecked": report.unchecked,
        }


def ranked(rankings: list[list[dict[str, Any]]], k: int, key: Any) -> list[dict[str, Any]]:
    """One list of the best ``k`` hits from one ranking, or from two by rank fusion."""
    if len(rankings) == 1:
        return rankings[0][:k]
    found = []
    for hit, score in fused(rankings, key, k):
        rest = {name: value for name, value in hit.items() if name not in (DISTANCE, SCORE)}
        found.append({**rest, SCORE: score})
    return found


def _offsets(given: Any) -> list[int]:
    """Offsets as whole numbers from 0, or raise."""
    found = []
    for offset in given if isinstance(given, Iterable) else [given]:
        try:
            number = -1 if isinstance(offset, bool) else operator.index(offset)
        except TypeError:
            number = -1
        if number < 0 or not isinstance(given, Iterable):
            raise InvalidArgument(f"take needs a list of whole numbers from 0, got {given!r:.80}")
        found.append(number)
    return found


def _fields(columns: Sequence[str] | None, finder: SnapshotSearch) -> pa.Schema | None:
    """The fields to return; None where all are."""
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise InvalidArgument(f"columns must be a list of field names, got {columns!r}")
    return pa.schema([indexes.field_of(finder.known, name) for name in columns])
