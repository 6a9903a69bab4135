"""The methods of a writer and a reader that treat the topic as a table.

They have the names and arguments of the backends' methods, and cover all buckets; a reader of some
buckets covers those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persisting.concurrency.closing import AsyncClosing
from persisting.options import check_window
from persisting.topic.bucket_client import Topic
from persisting.topic.bucket_set import BucketSet
from persisting.topic.table_calls import Compact, Retain, Verify
from persisting.topic.topic_search import TopicSearch
from persisting.topic.topic_versions import TopicVersion, TopicVersions


class TopicTable(AsyncClosing):
    """Base of writer and reader: the public table methods, each delegated to one part."""

    def __init__(self, topic: Topic, buckets: list[int], user: str) -> None:
        self._topic = topic
        self._buckets = BucketSet(topic, buckets, user)
        self._versions = TopicVersions(self._buckets)
        self._search = TopicSearch(self._buckets)
        self._loop = asyncio.get_running_loop()

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._topic.name

    @property
    def folder(self) -> Path | None:
        """The folder of the topic; None for a topic in memory or in an object store."""
        folder = self._topic.folder
        return None if folder is None else Path(folder)

    # Versions and tags

    async def versions(self) -> list[dict[str, Any]]:
        """Return the readable versions of all buckets, oldest first, each with its ``bucket``."""
        return await self._versions.all_versions()

    async def tag(self, name: str) -> dict[str, Any]:
        """Pin one consistent point of the whole topic under a name, for a reproducible read.

        The tag holds everything acknowledged before this call and nothing put after it returned.
        Read it with ``version=name``. It outlives retention and the removal of old versions. A tag
        of the same name is replaced.
        """
        return await self._versions.tag(name)

    async def tags(self) -> list[dict[str, Any]]:
        """Return the tags: ``name``, ``timestamp``, ``rows``, and the part of each bucket."""
        return await self._versions.tags()

    async def delete_tag(self, name: str) -> bool:
        """Delete a tag; return whether it existed.

        The next cleaning removes the versions that only this tag held.
        """
        return await self._versions.delete_tag(name)

    async def restore(self, version: TopicVersion) -> dict[str, Any]:
        """Go back to a tag or a point in time, bucket by bucket; if it fails midway, repeat it.

        The result names the groups that had committed more than is left. They continue at the new
        end, or where the records first differ from those that they have read.
        """
        return await self._versions.restore(version)

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
        match: str = "any",
        fuzziness: int = 0,
    ) -> list[dict[str, Any]]:
        """Return the ``k`` records of the topic that are nearest to a vector, match words, or both.

        Each has its ``_distance`` or ``_score``, its ``_bucket`` and ``_offset``. A record is found
        as soon as it is put, indexed or not; the results of the buckets are merged into one top-k.
        ``where`` is an SQL condition that every hit must meet.

        ``match`` says how the words of ``text`` are combined: ``"any"``, ``"all"``, ``"phrase"``,
        or ``"query"`` for the syntax ``+word -word "a phrase" begin* typo~``. ``fuzziness`` is the
        number of typing errors that a word may have.
        """
        return await self._search.search(
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

    async def create_index(
        self,
        column: str,
        kind: str | None = None,
        *,
        metric: str = "l2",
        language: str | None = None,
    ) -> dict[str, Any]:
        """Index a field in every bucket: vectors by ``vector``, words by ``text``, values by
        ``scalar``.

        Without ``kind`` the field's type decides. An existing index is replaced. With a
        ``language``, words of a text that have the same stem match each other.
        """
        return await self._search.create_index(column, kind, metric, language)

    async def drop_index(self, column: str, kind: str | None = None) -> int:
        """Drop the indexes of a field, or the one of that kind; return how many there were."""
        return await self._search.drop_index(column, kind)

    async def indexes(self) -> list[dict[str, Any]]:
        """Return the indexes: field, kind, rows covered and rows not covered yet, over all
        buckets."""
        return await self._search.indexes()

    # Random access

    async def take(
        self,
        offsets: Sequence[tuple[int, int]] | Sequence[int],
        columns: Sequence[str] | None = None,
        *,
        bucket_id: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the records at (bucket, offset) pairs, or at offsets of ``bucket_id``, in that
        order."""
        return await self._search.take(offsets, columns, bucket_id)

    async def query(
        self,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the records that match an SQL condition, bucket by bucket, in order."""
        check_window(0, limit)
        return await self._search.query(where, columns, limit)

    async def count(self, where: str | None = None) -> int:
        """Return the number of records, or of those that match an SQL condition."""
        return await self._search.count(where)

    async def lookup(
        self, column: str, value: Any, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the records whose field has a value; fast with a ``scalar`` index on the field."""
        return await self._search.lookup(column, value, columns)

    # Maintenance

    async def compact(self) -> dict[str, Any]:
        """Rewrite all small fragments as larger ones; offsets, order and content stay."""
        parts = list((await self._buckets.call_each(Compact())).values())
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    async def retain(
        self,
        *,
        rows: int | None = None,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """In each bucket, drop the oldest rows beyond any of the limits; offsets stay.

        If a group or a tag holds more rows back, ``held_by`` names it by bucket.
        """
        by_bucket = await self._buckets.call_each(Retain(rows, bytes, seconds))
        held = {b: part["held_by"] for b, part in by_bucket.items() if part.get("held_by")}
        return {
            "dropped": sum(part["dropped"] for part in by_bucket.values()),
            "start_offsets": {b: part["start_offset"] for b, part in by_bucket.items()},
            **({"held_by": held} if held else {}),
        }

    async def verify(self) -> dict[str, Any]:
        """Compare every stored file with the checksum taken when it was written.

        ``ok`` says whether all files match; ``damaged`` names each file that does not, its bucket
        and the offsets it holds.
        """
        by_bucket = await self._buckets.call_each(Verify())
        return {
            "ok": all(part["ok"] for part in by_bucket.values()),
            "rows": sum(part["rows"] for part in by_bucket.values()),
            "files": sum(part["files"] for part in by_bucket.values()),
            "damaged": [
                {"bucket": bucket, **damage}
                for bucket, part in by_bucket.items()
                for damage in part["damaged"]
            ],
            "unchecked": [
                f"bucket_{bucket}/{name}"
                for bucket, part in by_bucket.items()
                for name in part["unchecked"]
            ],
        }
