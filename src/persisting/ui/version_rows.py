"""The versions of a topic's tables, kept between requests: a version never changes. Blocking."""

from __future__ import annotations

import datetime as dt
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from persisting.table import versions
from persisting.table.table import FOLDER as TABLE
from persisting.topic.spec import bucket_folder
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder

_MAX_OPERATIONS = 10_000
_AT_ONCE = 4


@dataclass
class VersionRow:
    bucket: int
    version: int
    time: dt.datetime
    rows: int
    operation: str | None = None


@dataclass
class _KnownVersions:
    """What is known about an open topic."""

    rows: dict[int, tuple[Any, list[VersionRow]]] = field(default_factory=dict)
    """By bucket, its versions and what changes when one is added or removed."""
    operations: dict[tuple[int, int], str | None] = field(default_factory=dict)


_kept: WeakKeyDictionary[TopicFolder, _KnownVersions] = WeakKeyDictionary()


def all_versions(source: TopicFolder) -> list[VersionRow]:
    """Return the versions of all buckets without their operations, newest first."""
    kept = _kept.setdefault(source, _KnownVersions())
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # each reads files of its own
        parts = list(pool.map(lambda bucket: _versions(source, kept, bucket), source.buckets))
    found = [row for part in parts for row in part]
    found.sort(key=lambda row: (row.time, row.bucket), reverse=True)
    return found


def _versions(source: TopicFolder, kept: _KnownVersions, bucket: int) -> list[VersionRow]:
    dataset: Any = source.view(bucket).dataset
    if dataset is None:
        return []
    state = _changed(source, bucket), dataset.version
    if bucket not in kept.rows or kept.rows[bucket][0] != state:
        entries = versions.listing(dataset, operations=False)
        kept.rows[bucket] = state, [_row(bucket, entry) for entry in entries]
    return kept.rows[bucket][1]


def _changed(source: TopicFolder, bucket: int) -> int:
    """Return what changes when an old version is removed."""
    if isinstance(source, StoreTopic):
        return source.count_versions(bucket)
    return os.stat(bucket_folder(source.folder, bucket) / TABLE / "_versions").st_mtime_ns


def _row(bucket: int, entry: dict[str, Any]) -> VersionRow:
    return VersionRow(bucket, entry["version"], entry["timestamp"], entry["rows"])


def add_operations(source: TopicFolder, rows: list[VersionRow]) -> None:
    """Find out what made some versions; each is in a file of its own."""
    operations = _kept.setdefault(source, _KnownVersions()).operations
    if len(operations) > _MAX_OPERATIONS:
        operations.clear()
    unknown = [row for row in rows if (row.bucket, row.version) not in operations]
    datasets: dict[int, Any] = {b: source.view(b).dataset for b in {row.bucket for row in unknown}}

    def find(row: VersionRow) -> None:
        found = versions.operation(datasets[row.bucket], row.version)
        operations[row.bucket, row.version] = found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(find, unknown))
    for row in rows:
        row.operation = operations[row.bucket, row.version]
