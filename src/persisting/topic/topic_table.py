"""The topic as a table: what a bucket offers, over all buckets, with the same words."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from persisting import fs as filesystem
from persisting.backends.table_search import ranked
from persisting.bucket import group_offsets
from persisting.bucket.snapshot_search import DISTANCE, OFFSET, SCORE, condition, only_equal
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError
from persisting.options import check_window
from persisting.table.search import check_where
from persisting.table.versions import check_tag, utc
from persisting.topic import groups, tags
from persisting.topic.bucket_client import Topic
from persisting.topic.routing import route
from persisting.topic.tags import BucketTag, TopicTag

TopicVersion: TypeAlias = "str | dt.datetime | int | dict[int, int]"
"""A tag's name, a moment, or a version by bucket; a number where there is one bucket."""

BUCKET = "_bucket"

log = logging.getLogger("persisting")


class TopicTable:
    """Mixed into writer and reader; a reader of some buckets speaks of those."""

    _topic: Topic
    _all: list[int]

    def _check_open(self) -> None:
        raise NotImplementedError

    async def _each(self, op: str, buckets: Sequence[int] | None = None, **args: Any) -> list[Any]:
        """The same call to every bucket, at the same time."""
        self._check_open()
        chosen = self._all if buckets is None else buckets
        return await _all_of([self._topic.port(b).do(op, **args) for b in chosen])

    # Versions and tags

    async def versions(self) -> list[dict[str, Any]]:
        """The versions of all buckets that can be read, oldest first; each says its ``bucket``."""
        found = await self._each("versions")
        every = [
            {"bucket": bucket, **one}
            for bucket, versions in zip(self._all, found, strict=True)
            for one in versions
        ]
        return sorted(every, key=lambda one: (one["timestamp"], one["bucket"], one["version"]))

    async def tag(self, name: str) -> dict[str, Any]:
        """Pin one consistent point of the whole topic under a name, for a reproducible read.

        It holds everything acknowledged before this call and nothing put after it returned. It is
        read with ``version=name``, and outlives retention and the cleaning of old versions.
        """
        check_tag(name)
        self._whole("tag")
        folder, fs = self._folder("tag"), filesystem.current()
        pin = tags.new_pin()
        pinned = await self._each("tag", name=pin, empty=True)
        buckets = {
            bucket: BucketTag(one["version"], one["start_offset"], one["end_offset"])
            for bucket, one in zip(self._all, pinned, strict=True)
        }
        tag = TopicTag(name, dt.datetime.now(dt.timezone.utc), pin, buckets)
        before = await asyncio.shield(in_thread(tags.save, folder, tag, fs))
        if before is not None:
            await self._each("delete_tag", name=before.pin)
        await self._drop_lost_pins()
        return tag.described()

    async def tags(self) -> list[dict[str, Any]]:
        """The tags of the topic: ``name``, ``timestamp``, ``rows``, and each bucket's part."""
        self._check_open()
        folder, fs = self._folder("tags"), filesystem.current()

        def look() -> list[dict[str, Any]]:
            return [tag.described() for tag in tags.all_in(folder, fs)]

        return await in_thread(look)

    async def delete_tag(self, name: str) -> bool:
        """Whether there was such a tag; what only it held goes with the next cleaning."""
        self._check_open()
        check_tag(name)
        self._whole("delete_tag")
        there = await in_thread(tags.remove, self._folder("delete_tag"), name, filesystem.current())
        if there is not None:
            await self._each("delete_tag", name=there.pin)
        await self._drop_lost_pins()
        return there is not None

    async def _drop_lost_pins(self) -> None:
        """Drop pins of a tag() that died before it had written its file."""
        try:
            known = await in_thread(tags.pins_in, self._folder("tags"), filesystem.current())
        except StorageError as exc:
            log.warning("pins of tags that were never made stay for now: %s", exc)
            return
        pins = {one["name"] for bucket in await self._each("tags") for one in bucket}
        for pin in pins:
            if tags.is_lost(pin, known):
                await self._each("delete_tag", name=pin)

    async def restore(self, version: TopicVersion) -> dict[str, Any]:
        """Go back to a tag or a moment, bucket by bucket; if it fails in between, repeat it.

        Groups that had come further are set back to the new end, or where the records part from
        those that they have read, and named in what is returned.
        """
        self._check_open()
        self._whole("restore")
        chosen = await self._chosen_versions(version)
        numbers = await _all_of(
            [self._topic.port(b).do("resolve", version=v) for b, v in chosen.items()]
        )
        token = uuid.uuid4().hex
        results = await _all_of(
            [
                self._topic.port(b).do("restore", version=number, token=f"{token}-{b}")
                for b, number in zip(chosen, numbers, strict=True)
            ]
        )
        restores = await self._each("restores", list(chosen))
        ends = {b: ends[-1] for b, ends in zip(chosen, restores, strict=True) if ends}
        return {
            "buckets": dict(zip(chosen, results, strict=True)),
            "removed": sum(one["removed"] for one in results),
            "groups": await in_thread(self._groups_beyond, ends),
        }

    def _groups_beyond(self, ends: dict[int, int]) -> list[dict[str, Any]]:
        folder, fs = self._topic.folder, filesystem.current()
        if folder is None:
            return []
        found = []
        for group in group_offsets.groups_in(folder / groups.FOLDER, fs):
            for bucket, end in ends.items():
                offset = group_offsets.read_committed(group, bucket, fs).offset
                if offset > end:
                    found.append(
                        {"group": group.name, "bucket": bucket, "committed": offset, "end": end}
                    )
        return found

    async def _chosen_versions(self, version: TopicVersion) -> dict[int, Any]:
        """The version that is meant in each bucket."""
        if isinstance(version, str):
            tag = await in_thread(tags.load, self._folder("version"), version, filesystem.current())
            return {b: tag.versions.get(b, 0) for b in self._all}
        if isinstance(version, dict):
            if not version:
                raise InvalidArgument("version={} names no bucket")
            unknown = [b for b in version if b not in self._all]
            if unknown:
                raise InvalidArgument(
                    f"version names bucket {unknown[0]!r}, which is not read here"
                )
            return {b: _plain_version(one) for b, one in version.items()}
        if isinstance(version, dt.datetime):
            return dict.fromkeys(self._all, _plain_version(version))
        if isinstance(version, int) and not isinstance(version, bool) and len(self._all) == 1:
            return {self._all[0]: version}
        raise InvalidArgument(
            f"version={version!r}: buckets count their versions each for itself; name a tag, a "
            "datetime, or {bucket: version}"
        )

    async def _get_at(
        self, version: TopicVersion, offset: int, limit: int | None
    ) -> list[dict[str, Any]]:
        self._check_open()
        found: list[dict[str, Any]] = []
        for bucket, one in (await self._chosen_versions(version)).items():
            left = None if limit is None else limit - len(found)
            if left == 0:
                break
            found += await self._topic.port(bucket).do(
                "read_at", version=one, offset=offset, limit=left
            )
        return found

    async def _arrow_at(self, version: TopicVersion, offset: int, limit: int | None) -> pa.Table:
        self._check_open()
        found: list[pa.Table] = []
        left = limit
        for bucket, one in (await self._chosen_versions(version)).items():
            table = await self._topic.port(bucket).do(
                "arrow_at", version=one, offset=offset, limit=left
            )
            if table.num_rows or not found:
                found.append(table)
            left = None if left is None else left - table.num_rows
            if left == 0:
                break
        return pa.concat_tables(found, promote_options="permissive")

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
        """The ``k`` records of the topic nearest to a vector, best for words, or both.

        Each has its ``_distance`` or ``_score``, its ``_bucket`` and ``_offset``. A record is
        found as soon as it is put, index or not; the buckets' results merge by distance into one
        top-k. ``where`` is an SQL condition that all must meet.
        """
        if not isinstance(k, int):
            raise InvalidArgument(f"k must be a whole number, got {k!r}")
        check_where(where)
        if text is not None and not isinstance(text, str):
            raise InvalidArgument(f"text must be words to look for, got {text!r}")
        per_bucket = await self._each(
            "rankings",
            vector=_plain_vector(vector),
            text=text,
            column=column if column is None or isinstance(column, str) else _plain_names(column),
            k=k,
            where=where,
            columns=_plain_names(columns),
            metric=metric,
            exact=exact,
        )
        merged: list[list[dict[str, Any]]] = []
        for rankings in zip(*(one for one in per_bucket if one), strict=True):
            hits = [
                {**hit, BUCKET: bucket}
                for bucket, ranking in zip(self._with_hits(per_bucket), rankings, strict=True)
                for hit in ranking
            ]
            merged.append(sorted(hits, key=_order))
        return ranked(merged, k, lambda hit: (hit[BUCKET], hit[OFFSET])) if merged else []

    def _with_hits(self, per_bucket: list[Any]) -> list[int]:
        return [bucket for bucket, one in zip(self._all, per_bucket, strict=True) if one]

    async def create_index(
        self, column: str, kind: str | None = None, *, metric: str = "l2"
    ) -> dict[str, Any]:
        """Index a field in every bucket: vectors by ``vector``, words by ``text``, values by
        ``scalar``; without ``kind`` the field's type decides. An index that is there is replaced.
        """
        self._whole("create_index")
        return _together(await self._each("create_index", column=column, kind=kind, metric=metric))

    async def drop_index(self, column: str, kind: str | None = None) -> int:
        """Do without the indexes of a field, or the one of that kind; how many there were."""
        self._whole("drop_index")
        return max(await self._each("drop_index", column=column, kind=kind))

    async def indexes(self) -> list[dict[str, Any]]:
        """The indexes: field, kind, rows covered and rows not covered yet, over all buckets."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for bucket in await self._each("indexes"):
            for one in bucket:
                found.setdefault((one["column"], one["kind"]), []).append(one)
        return [_together(parts) for parts in found.values()]

    # Random access

    async def take(
        self,
        offsets: Sequence[tuple[int, int]] | Sequence[int],
        columns: Sequence[str] | None = None,
        *,
        bucket_id: int | None = None,
    ) -> list[dict[str, Any]]:
        """The records at (bucket, offset) pairs, in that order; at offsets of ``bucket_id``."""
        if not isinstance(offsets, Iterable):
            raise InvalidArgument(f"take needs a list of places, got {offsets!r}")
        pairs = [_pair(one, bucket_id) for one in offsets]
        by_bucket: dict[int, list[int]] = {}
        for bucket, offset in pairs:
            if bucket not in self._all:
                raise InvalidArgument(f"there is no bucket {bucket!r} here; there are {self._all}")
            by_bucket.setdefault(bucket, []).append(offset)
        names = _plain_names(columns)
        self._check_open()
        lists = await _all_of(
            [
                self._topic.port(bucket).do("take", offsets=wanted, columns=names)
                for bucket, wanted in by_bucket.items()
            ]
        )
        found = {bucket: iter(rows) for bucket, rows in zip(by_bucket, lists, strict=True)}
        return [next(found[bucket]) for bucket, _ in pairs]

    async def query(
        self,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """The records that an SQL condition keeps, bucket by bucket, in order within each."""
        check_window(0, limit)
        return await self._query(self._all, where, columns, limit)

    async def _query(
        self,
        buckets: Sequence[int],
        where: str | None,
        columns: Sequence[str] | None,
        limit: int | None,
    ) -> list[dict[str, Any]]:
        names = _plain_names(columns)
        check_where(where)
        lists = await self._each("query", buckets, where=where, columns=names, limit=limit)
        return [record for rows in lists for record in rows][:limit]

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The records whose field has a value; quick with a ``scalar`` index on it."""
        buckets = self._all
        if column == self._topic.bucket_column and isinstance(value, str):
            home = route({column: value}, column, self._topic.num_buckets)
            buckets = [home] if home in self._all else []
        names = _plain_names(columns)
        wanted = None if names is None else list(dict.fromkeys([*names, column]))
        found = await self._query(buckets, condition(column, value), wanted, None)
        return only_equal(found, column, value, names)

    # Upkeep

    async def compact(self) -> dict[str, Any]:
        """Rewrite all small fragments as larger ones; offsets, order and content stay."""
        return _added(await self._each("compact"))

    async def retain(
        self,
        *,
        rows: int | None = None,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """In each bucket, drop the oldest rows beyond any of the limits; offsets stay."""
        found = await self._each("retain", rows=rows, bytes=bytes, seconds=seconds)
        starts = {b: one["start_offset"] for b, one in zip(self._all, found, strict=True)}
        return {"dropped": sum(one["dropped"] for one in found), "start_offsets": starts}

    async def verify(self) -> dict[str, Any]:
        """Compare every stored file with the checksum of what was written.

        ``ok`` says whether all is well; ``damaged`` names each file that is not what it was, its
        bucket and the offsets it holds.
        """
        found = await self._each("verify")
        return {
            "ok": all(one["ok"] for one in found),
            "rows": sum(one["rows"] for one in found),
            "files": sum(one["files"] for one in found),
            "damaged": [
                {"bucket": bucket, **damage}
                for bucket, one in zip(self._all, found, strict=True)
                for damage in one["damaged"]
            ],
            "unchecked": [
                f"bucket_{bucket}/{name}"
                for bucket, one in zip(self._all, found, strict=True)
                for name in one["unchecked"]
            ],
        }

    def _folder(self, what: str) -> Any:
        folder = self._topic.folder
        if folder is None:
            raise StorageError(
                f"topic {self._topic.name!r} is in memory and knows no {what!r}; use the backend "
                "'lance' or 'persisting'"
            )
        return folder

    def _whole(self, what: str) -> None:
        if len(self._all) != self._topic.num_buckets:
            raise InvalidArgument(
                f"{what} is for the whole topic; this reader has only the buckets {self._all}"
            )


async def _all_of(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls at the same time; an error is raised when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _plain_vector(vector: Any) -> Any:
    """A vector as floats that can cross to another process."""
    if vector is None:
        return None
    try:
        return np.asarray(vector, dtype=np.float64).tolist()
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


def _plain_version(version: Any) -> Any:
    return utc(version) if isinstance(version, dt.datetime) else version


def _order(hit: dict[str, Any]) -> tuple[Any, ...]:
    value = hit[DISTANCE] if DISTANCE in hit else -hit[SCORE]
    return value, hit[BUCKET], hit[OFFSET]


def _pair(one: Any, bucket: int | None) -> tuple[int, int]:
    if bucket is not None and isinstance(one, int):
        return bucket, one
    if isinstance(one, (tuple, list)) and len(one) == 2:
        return one[0], one[1]
    raise InvalidArgument(f"take needs (bucket, offset) pairs, or bucket_id=…, got {one!r}")


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """An index from its parts in the buckets."""
    rows, behind = sum(p["rows"] for p in parts), sum(p["behind"] for p in parts)
    return {**parts[0], "rows": rows, "behind": behind}


def _added(parts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}
