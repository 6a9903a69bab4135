"""Search, indexes and random access over all buckets of a topic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from persisting.backends.table_search import ranked
from persisting.bucket.snapshot_search import DISTANCE, OFFSET, SCORE, condition, only_equal
from persisting.errors import InvalidArgument
from persisting.table.search import check_where
from persisting.table.text_query import check_how
from persisting.topic.bucket_set import BucketSet
from persisting.topic.routing import route
from persisting.topic.table_calls import (
    Count,
    CreateIndex,
    DropIndex,
    Indexes,
    Query,
    Rankings,
    Take,
)

BUCKET = "_bucket"


class TopicSearch:
    """What :class:`~persisting.topic.topic_table.TopicTable` offers of search and access."""

    def __init__(self, buckets: BucketSet) -> None:
        self._buckets = buckets

    async def search(
        self, *, vector: Any, text: Any, column: Any, k: Any, where: Any, columns: Any, **how: Any
    ) -> list[dict[str, Any]]:
        if not isinstance(k, int):
            raise InvalidArgument(f"k must be a whole number, got {k!r}")
        check_where(where)
        if text is not None and not isinstance(text, str):
            raise InvalidArgument(f"text must be words to search for, got {text!r}")
        check_how(how["match"], how["fuzziness"])
        call = Rankings(
            vector=_plain_vector(vector),
            text=text,
            column=column if column is None or isinstance(column, str) else _plain_names(column),
            k=k,
            where=where,
            columns=_plain_names(columns),
            **how,
        )
        results = await self._buckets.call_each(call)
        by_bucket = {bucket: rankings for bucket, rankings in results.items() if rankings}
        merged: list[list[dict[str, Any]]] = []
        for rankings in zip(*by_bucket.values(), strict=True):
            hits = [
                {**hit, BUCKET: bucket}
                for bucket, ranking in zip(by_bucket, rankings, strict=True)
                for hit in ranking
            ]
            merged.append(sorted(hits, key=_rank))
        return ranked(merged, k, lambda hit: (hit[BUCKET], hit[OFFSET])) if merged else []

    async def create_index(
        self, column: str, kind: str | None, metric: str, language: str | None
    ) -> dict[str, Any]:
        self._buckets.require_all("create_index")
        by_bucket = await self._buckets.call_each(CreateIndex(column, kind, metric, language))
        return _merged_index(list(by_bucket.values()))

    async def drop_index(self, column: str, kind: str | None) -> int:
        self._buckets.require_all("drop_index")
        return max((await self._buckets.call_each(DropIndex(column, kind))).values())

    async def indexes(self) -> list[dict[str, Any]]:
        parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for indexes in (await self._buckets.call_each(Indexes())).values():
            for index in indexes:
                parts.setdefault((index["column"], index["kind"]), []).append(index)
        return [_merged_index(same) for same in parts.values()]

    async def take(
        self, offsets: Any, columns: Sequence[str] | None, bucket_id: int | None
    ) -> list[dict[str, Any]]:
        if not isinstance(offsets, Iterable):
            raise InvalidArgument(f"take needs a list of offsets, got {offsets!r}")
        numbers = self._buckets.numbers
        pairs = [_bucket_and_offset(place, bucket_id) for place in offsets]
        by_bucket: dict[int, list[int]] = {}
        for bucket, offset in pairs:
            if bucket not in numbers:
                raise InvalidArgument(f"there is no bucket {bucket!r} here; there are {numbers}")
            by_bucket.setdefault(bucket, []).append(offset)
        names = _plain_names(columns)
        self._buckets.check_open()
        taken = await self._buckets.call_all(
            {bucket: Take(places, names) for bucket, places in by_bucket.items()}
        )
        records = {bucket: iter(rows) for bucket, rows in taken.items()}
        return [next(records[bucket]) for bucket, _ in pairs]

    async def query(
        self, where: str | None, columns: Sequence[str] | None, limit: int | None
    ) -> list[dict[str, Any]]:
        return await self._query(self._buckets.numbers, where, columns, limit)

    async def count(self, where: str | None) -> int:
        check_where(where)
        return sum((await self._buckets.call_each(Count(where))).values())

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        topic, buckets = self._buckets.topic, self._buckets.numbers
        if column == topic.bucket_column and isinstance(value, str):
            home = route({column: value}, column, topic.num_buckets)
            buckets = [home] if home in buckets else []
        names = _plain_names(columns)
        needed = None if names is None else list(dict.fromkeys([*names, column]))
        records = await self._query(buckets, condition(column, value), needed, None)
        return only_equal(records, column, value, names)

    async def _query(
        self,
        buckets: Sequence[int],
        where: str | None,
        columns: Sequence[str] | None,
        limit: int | None,
    ) -> list[dict[str, Any]]:
        names = _plain_names(columns)
        check_where(where)
        by_bucket = await self._buckets.call_each(Query(where, names, limit), buckets)
        return [record for records in by_bucket.values() for record in records][:limit]


def _plain_vector(vector: Any) -> list[float] | None:
    """Return a vector as floats that can cross to another process."""
    if vector is None:
        return None
    try:
        floats: list[float] = np.asarray(vector, dtype=np.float64).tolist()
        return floats
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"vector must be a list of floats, got {vector!r:.80}") from exc


def _plain_names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise InvalidArgument(f"columns must be a list of field names, got {columns!r}")
    names = list(columns)
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgument(f"columns must be a list of field names, got {name!r} in it")
    return names


def _rank(hit: dict[str, Any]) -> tuple[Any, ...]:
    value = hit[DISTANCE] if DISTANCE in hit else -hit[SCORE]
    return value, hit[BUCKET], hit[OFFSET]


def _bucket_and_offset(place: Any, bucket: int | None) -> tuple[int, int]:
    if bucket is not None and isinstance(place, int):
        return bucket, place
    if isinstance(place, (tuple, list)) and len(place) == 2:
        return place[0], place[1]
    raise InvalidArgument(f"take needs (bucket, offset) pairs, or bucket_id=…, got {place!r}")


def _merged_index(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an index of the topic from its parts in the buckets."""
    rows, behind = sum(p["rows"] for p in parts), sum(p["behind"] for p in parts)
    return {**parts[0], "rows": rows, "behind": behind}
