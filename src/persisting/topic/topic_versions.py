"""Versions and tags of a whole topic: one point in time over all its buckets."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import group_offsets, store_groups
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError
from persisting.table.versions import check_tag, utc
from persisting.topic import groups, tags
from persisting.topic.bucket_set import BucketSet
from persisting.topic.table_calls import (
    ArrowAt,
    BucketVersion,
    DeleteTag,
    ReadAt,
    Resolve,
    Restore,
    Restores,
    Tag,
    Tags,
    Versions,
)
from persisting.topic.tags import BucketTag, TopicTag

TopicVersion: TypeAlias = "str | dt.datetime | int | dict[int, int]"
"""A tag's name, a point in time, or a version by bucket; a number if there is only one bucket."""

log = logging.getLogger("persisting")


class TopicVersions:
    """What :class:`~persisting.topic.topic_table.TopicTable` offers of versions and tags."""

    def __init__(self, buckets: BucketSet) -> None:
        self._buckets = buckets

    async def all_versions(self) -> list[dict[str, Any]]:
        by_bucket = await self._buckets.call_each(Versions())
        versions = [
            {"bucket": bucket, **version}
            for bucket, versions in by_bucket.items()
            for version in versions
        ]
        return sorted(versions, key=lambda v: (v["timestamp"], v["bucket"], v["version"]))

    async def tag(self, name: str) -> dict[str, Any]:
        check_tag(name)
        self._buckets.require_all("tag")
        tag_files = self._buckets.tag_files("tag")
        pin = tags.new_pin()
        pinned = await self._buckets.call_each(Tag(pin, empty=True))
        parts = {
            bucket: BucketTag(part["version"], part["start_offset"], part["end_offset"])
            for bucket, part in pinned.items()
        }
        tag = TopicTag(name, dt.datetime.now(dt.timezone.utc), pin, parts)
        replaced = await asyncio.shield(in_thread(tag_files.save, tag))
        if replaced is not None:
            await self._buckets.call_each(DeleteTag(replaced.pin))
        await self._drop_lost_pins()
        return tag.described()

    async def tags(self) -> list[dict[str, Any]]:
        self._buckets.check_open()
        tag_files = self._buckets.tag_files("tags")

        def read() -> list[dict[str, Any]]:
            return [tag.described() for tag in tag_files.all()]

        return await in_thread(read)

    async def delete_tag(self, name: str) -> bool:
        self._buckets.check_open()
        check_tag(name)
        self._buckets.require_all("delete_tag")
        tag_files = self._buckets.tag_files("delete_tag")
        removed = await in_thread(tag_files.remove, name)
        if removed is not None:
            await self._buckets.call_each(DeleteTag(removed.pin))
        await self._drop_lost_pins()
        return removed is not None

    async def _drop_lost_pins(self) -> None:
        """Drop the pins of a tag() that died before it had written its file."""
        try:
            used = await in_thread(self._buckets.tag_files("tags").pins)
        except StorageError as exc:
            log.warning("cannot remove pins that no tag uses; keeping them for now: %s", exc)
            return
        by_bucket = await self._buckets.call_each(Tags())
        pins = {tag["name"] for bucket_tags in by_bucket.values() for tag in bucket_tags}
        for pin in pins:
            if tags.is_lost(pin, used):
                await self._buckets.call_each(DeleteTag(pin))

    async def restore(self, version: TopicVersion) -> dict[str, Any]:
        self._buckets.check_open()
        self._buckets.require_all("restore")
        chosen = await self._by_bucket(version)
        numbers = await self._buckets.call_all({b: Resolve(v) for b, v in chosen.items()})
        token = uuid.uuid4().hex
        results = await self._buckets.call_all(
            {b: Restore(number, token=f"{token}-{b}") for b, number in numbers.items()}
        )
        restores = await self._buckets.call_each(Restores(), list(chosen))
        ends = {bucket: after[-1] for bucket, after in restores.items() if after}
        return {
            "buckets": results,
            "removed": sum(result["removed"] for result in results.values()),
            "groups": await in_thread(self._groups_beyond, ends),
        }

    def _groups_beyond(self, ends: dict[int, int]) -> list[dict[str, Any]]:
        """Return the groups that had committed more than a restore has left."""
        beyond = []
        for group, bucket, offset in self._committed(list(ends)):
            if offset > ends[bucket]:
                found = {"group": group, "bucket": bucket, "committed": offset, "end": ends[bucket]}
                beyond.append(found)
        return beyond

    def _committed(self, buckets: list[int]) -> Iterator[tuple[str, int, int]]:
        """Yield group, bucket and committed offset."""
        folder, store, fs = self._buckets.topic.folder, self._buckets.store, filesystem.current()
        if store is not None:
            for name in store_groups.groups_in(store):
                for bucket in buckets:
                    yield name, bucket, store_groups.read_committed(store, name, bucket).offset
        elif folder is not None:
            for group in group_offsets.groups_in(folder / groups.FOLDER, fs):
                for bucket in buckets:
                    offset = group_offsets.read_committed(group, bucket, fs).offset
                    yield group.name, bucket, offset

    async def read(
        self, version: TopicVersion, offset: int, limit: int | None
    ) -> list[dict[str, Any]]:
        """Return records of a version, bucket by bucket, from ``offset`` on in each."""
        self._buckets.check_open()
        records: list[dict[str, Any]] = []
        for bucket, number in (await self._by_bucket(version)).items():
            left = None if limit is None else limit - len(records)
            if left == 0:
                break
            part = await self._buckets.call(bucket, ReadAt(number, offset, left))
            records += part
        return records

    async def read_arrow(self, version: TopicVersion, offset: int, limit: int | None) -> pa.Table:
        """Return records of a version as one Arrow table."""
        self._buckets.check_open()
        tables: list[pa.Table] = []
        left = limit
        for bucket, number in (await self._by_bucket(version)).items():
            table = await self._buckets.call(bucket, ArrowAt(number, offset, left))
            if table.num_rows or not tables:
                tables.append(table)
            left = None if left is None else left - table.num_rows
            if left == 0:
                break
        return pa.concat_tables(tables, promote_options="permissive")

    async def _by_bucket(self, version: TopicVersion) -> dict[int, BucketVersion]:
        """Return the version of each bucket that ``version`` means."""
        numbers = self._buckets.numbers
        if isinstance(version, str):
            tag = await in_thread(self._buckets.tag_files("version").load, version)
            return {b: tag.versions.get(b, 0) for b in numbers}
        if isinstance(version, dict):
            if not version:
                raise InvalidArgument("version={} names no bucket")
            unknown = [b for b in version if b not in numbers]
            if unknown:
                raise InvalidArgument(
                    f"version names bucket {unknown[0]!r}, which is not read here"
                )
            return {bucket: _in_utc(number) for bucket, number in version.items()}
        if isinstance(version, dt.datetime):
            return dict.fromkeys(numbers, utc(version))
        if isinstance(version, int) and not isinstance(version, bool) and len(numbers) == 1:
            return {numbers[0]: version}
        raise InvalidArgument(
            f"version={version!r}: each bucket counts its own versions; give a tag's name, a "
            "datetime, or {bucket: version}"
        )


def _in_utc(version: Any) -> Any:
    return utc(version) if isinstance(version, dt.datetime) else version
