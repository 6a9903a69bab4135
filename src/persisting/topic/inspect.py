"""Facts about stored topics, for users and tools that inspect them from outside. Blocking.

Nothing is opened for writing and nothing is recovered: owners are not disturbed, and what a crashed
owner left in its log is reported as log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from persisting import fs as filesystem
from persisting.bucket import log_note
from persisting.bucket.log_inspection import OwnerLogReport, inspect_logs
from persisting.bucket.store_log_inspection import inspect_store_logs
from persisting.errors import StorageError
from persisting.lock import owner_of
from persisting.options import storage_folder
from persisting.store_address import is_store_address
from persisting.table import indexes as index_file
from persisting.table.view import TableView
from persisting.topic import spec as topics
from persisting.topic import store_inspect
from persisting.topic.group_admin import GroupProgress, Span
from persisting.topic.group_control import control_of
from persisting.topic.spec import DEFAULT_ROOT, bucket_folder
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder
from persisting.wal import FOLDER as LOG_FOLDER
from persisting.wal.inspection import LogReport, inspect
from persisting.wal.slots import LOGS


class BucketFacts(msgspec.Struct):
    """One bucket."""

    bucket: int
    rows: int = 0
    """Rows in the table, without what its owner has buffered."""
    start_offset: int = 0
    end_offset: int = 0
    version: int = 0
    fragments: int = 0
    bytes: int = 0
    """Everything on disk: all versions of the table, indexes and log."""
    log_bytes: int = 0
    """Its own log, and its share of a log that it shares with other buckets: the size of the log
    divided by the number of buckets that need it."""
    owner: dict[str, Any] | None = None
    """The owner that has it open for writing: process, host, node."""
    problem: str | None = None
    """Why the bucket cannot be read; None if it can."""


class TopicFacts(msgspec.Struct):
    """One topic, as shown in a list of topics."""

    topic: str
    path: str
    backend: str | None = None
    num_buckets: int = 0
    rows: int = 0
    bytes: int = 0
    log_bytes: int = 0
    owners: list[dict[str, Any]] = []
    lag: dict[str, int] = {}
    """By group, the number of records that it has not committed."""
    problem: str | None = None


class FieldFacts(msgspec.Struct):
    name: str
    type: str


class IndexFacts(msgspec.Struct):
    column: str
    kind: str
    metric: str | None
    buckets: list[int]


class TagFacts(msgspec.Struct):
    name: str
    timestamp: str
    rows: int


class BucketLog(msgspec.Struct):
    """The log of one bucket, which may share it with other buckets."""

    bucket: int
    state: str
    bytes: int
    """Of a shared log the bucket's share."""
    segments: int
    pending_frames: int
    """Frames with records that the bucket's table does not hold yet."""
    problem: str | None = None
    path: str | None = None


class Description(msgspec.Struct):
    """Everything about a topic that can be seen from outside."""

    topic: str
    path: str
    backend: str
    num_buckets: int
    bucket_column: str
    batch_size: int
    options: dict[str, Any]
    rows: int
    bytes: int
    fields: list[FieldFacts]
    buckets: list[BucketFacts]
    versions: int
    """Number of readable versions of all buckets."""
    tags: list[TagFacts]
    indexes: list[IndexFacts]
    groups: list[GroupProgress]
    logs: list[BucketLog]


class Look(NamedTuple):
    """A topic with those of its buckets and groups that can be read."""

    facts: TopicFacts
    buckets: list[BucketFacts]
    groups: list[GroupProgress]


def topics_in(root: str | Path | None) -> list[TopicFacts]:
    """Return every topic in a storage folder, with its problem if it cannot be read."""
    return [seen.facts for seen in looks_in(root)]


def looks_in(root: str | Path | None) -> list[Look]:
    """Return every topic in a storage folder, with its buckets and groups."""
    if is_store_address(root):
        return [look_in_store(name, str(root)) for name in store_inspect.topic_names(str(root))]
    place = storage_folder(root or DEFAULT_ROOT)
    if not place.is_dir():
        raise StorageError(
            f"there is no folder {place}: give the storage folder, which is the storage_path of "
            "write_queue()"
        )
    return [
        look(place / name)
        for name in sorted(os.listdir(place))
        if not name.startswith(".") and _may_be_topic(place / name)
    ]


def _may_be_topic(folder: Path) -> bool:
    """Whether there is a topic in a folder, or one that this user may not read."""
    try:
        return topics.has_file(folder)
    except StorageError:
        return True


def look(folder: Path) -> Look:
    """Return a topic with its buckets and groups, with its problem if it cannot be read."""
    return _look(TopicFacts(folder.name, str(folder)), lambda: TopicFolder.open(folder))


def look_in_store(topic: str, root: str) -> Look:
    """The same for a topic below an address."""
    return _look(TopicFacts(topic, f"{root}/{topic}"), partial(StoreTopic.find, topic, root))


def _look(facts: TopicFacts, open_topic: Callable[[], TopicFolder]) -> Look:
    seen = Look(facts, [], [])
    try:
        stored = open_topic()
        facts.backend, facts.num_buckets = stored.config.backend, stored.config.num_buckets
        seen = Look(facts, buckets := buckets_of(stored), [])
        facts.problem = next((bucket.problem for bucket in buckets if bucket.problem), None)
        facts.rows = sum(bucket.rows for bucket in buckets)
        facts.bytes = sum(bucket.bytes for bucket in buckets)
        facts.log_bytes = sum(bucket.log_bytes for bucket in buckets)
        facts.owners = distinct_owners(buckets)
        if facts.problem is None:
            seen = seen._replace(groups=groups_of(stored))
            facts.lag = {group.group: group.lag for group in seen.groups}
    except StorageError as exc:
        facts.problem = str(exc)
    return seen


def describe(stored: TopicFolder, *, most_log_bytes: int | None = None) -> Description:
    """Describe one topic; a bucket that cannot be read has its problem in ``problem``.

    Inspecting a log reads it: ``most_log_bytes`` leaves the logs out if they are larger.
    """
    config = stored.config
    buckets = buckets_of(stored)
    readable = [facts.bucket for facts in buckets if facts.problem is None]
    log_bytes = sum(facts.log_bytes for facts in buckets)
    inspected = buckets if most_log_bytes is None or log_bytes <= most_log_bytes else []
    return Description(
        topic=config.topic,
        path=stored.place,
        backend=config.backend,
        num_buckets=config.num_buckets,
        bucket_column=config.bucket_column,
        batch_size=config.batch_size,
        options=config.options,
        rows=sum(facts.rows for facts in buckets),
        bytes=sum(facts.bytes for facts in buckets),
        fields=[FieldFacts(field.name, str(field.type)) for field in stored.schema(readable)],
        buckets=buckets,
        versions=sum(stored.count_versions(bucket) for bucket in readable),
        tags=[
            TagFacts(tag.name, tag.timestamp.isoformat(), tag.rows)
            for tag in stored.tag_files.all()
        ],
        indexes=_indexes(stored),
        groups=groups_of(stored, readable),
        logs=_bucket_logs(stored, [facts for facts in inspected if facts.problem is None]),
    )


def buckets_of(stored: TopicFolder) -> list[BucketFacts]:
    """Return the buckets of a topic, each with its problem if it cannot be read."""
    if isinstance(stored, StoreTopic):
        logged = stored.log_shares()
        return [_bucket_in_store(stored, bucket, logged) for bucket in stored.buckets]
    shares = log_shares(stored)
    return [_bucket(stored, bucket, shares[bucket]) for bucket in stored.buckets]


def distinct_owners(buckets: list[BucketFacts]) -> list[dict[str, Any]]:
    """Return the owners of a topic's buckets, each once."""
    owners: list[dict[str, Any]] = []
    for bucket in buckets:
        if bucket.owner is not None and bucket.owner not in owners:
            owners.append(bucket.owner)
    return owners


def groups_of(stored: TopicFolder, buckets: Iterable[int] | None = None) -> list[GroupProgress]:
    """Return the consumer groups of a topic with offsets and lag, in all or some buckets."""
    chosen = list(stored.buckets if buckets is None else buckets)
    return control_of(stored).groups(chosen, lambda: spans_of(stored, chosen))


def spans_of(stored: TopicFolder, buckets: Iterable[int] | None = None) -> dict[int, Span]:
    """Return the range of offsets of all or some buckets, with the records of their owner's log."""
    spans = {}
    for bucket in stored.buckets if buckets is None else buckets:
        snapshot = stored.snapshot(bucket)
        restores = [restore.end for restore in stored.table(bucket).restores[: snapshot.epoch]]
        spans[bucket] = Span(snapshot.start, snapshot.end, restores)
    return spans


def log_of(stored: TopicFolder, bucket: int) -> LogReport:
    """Inspect the log in a bucket's own folder, against the table at the same point in time.

    Only topics that no version since 0.4.0 has opened have logs there.
    """
    folder = bucket_folder(stored.folder, bucket) / LOG_FOLDER
    while True:
        sequence = stored.table(bucket).sequence
        report = inspect(folder, sequence)
        # The owner may have flushed in between and released the first segments.
        if report.state != "damaged" or stored.table(bucket).sequence == sequence:
            return report


def logs_of(stored: TopicFolder) -> list[OwnerLogReport]:
    """Inspect the logs that the buckets of a topic share."""
    if isinstance(stored, StoreTopic):
        return inspect_store_logs(stored.store, stored.config.num_buckets, stored.table_sequence)
    return inspect_logs(
        stored.folder, lambda bucket: stored.table(bucket).sequence, filesystem.current()
    )


def place_of_log(stored: TopicFolder, log: OwnerLogReport) -> str:
    """Return the folder of a log, or its address."""
    if isinstance(stored, StoreTopic):
        return f"{stored.place}/{LOGS}/{log.folder.parent.name}"
    return str(log.folder)


def log_shares(stored: TopicFolder) -> dict[int, int]:
    """Return, by bucket, its share of the bytes below the topic's ``log``.

    A log is shared equally by the buckets that note it, and all else there by all buckets, so that
    the shares add up to what is on disk.
    """
    shares = dict.fromkeys(stored.buckets, 0)
    noted: dict[str, list[int]] = {}
    for bucket in stored.buckets:
        with suppress(StorageError):  # a damaged note, which an inspection reports
            log = log_note.noted_log(bucket_folder(stored.folder, bucket), filesystem.current())
            if log is not None:
                noted.setdefault(log.name, []).append(bucket)
    place = stored.folder / log_note.LOGS_FOLDER
    for name in sorted(os.listdir(place)) if place.is_dir() else []:
        buckets = noted.get(name) or list(stored.buckets)
        each, rest = divmod(_size(place / name), len(buckets))
        for number, bucket in enumerate(buckets):
            shares[bucket] += each + (number < rest)
    return shares


def find(topic: str, root: str | Path | None) -> TopicFolder:
    """Open a topic by its name in ``root``, or by the path of its folder, or its address."""
    if is_store_address(topic):
        parent, _, name = topic.rstrip("/").rpartition("/")
        return StoreTopic.find(name, parent)
    if is_store_address(root) and not _is_path(topic):
        return StoreTopic.find(topic, str(root))
    return TopicFolder.open(storage_folder(topic) if _is_path(topic) else folder_of(topic, root))


def folder_of(topic: str, root: str | Path | None) -> Path:
    """Return the folder that a topic has or would have, by its name in ``root`` or by a path."""
    if _is_path(topic):
        folder = storage_folder(topic)
        return topics.topic_folder(folder.parent, folder.name)
    return topics.topic_folder(root, topic)


def _is_path(topic: str) -> bool:
    return os.sep in topic or topic in (".", "..")


def _bucket(stored: TopicFolder, number: int, log_share: int) -> BucketFacts:
    folder = bucket_folder(stored.folder, number)
    facts = BucketFacts(
        number,
        bytes=_size(folder) + log_share,
        log_bytes=_size(folder / LOG_FOLDER) + log_share,
    )
    with _problems_noted(facts):
        facts.owner = _plain_owner(owner_of(folder))
        _note_view(facts, stored.view(number))
    return facts


def _bucket_in_store(stored: StoreTopic, number: int, logged: dict[int, int]) -> BucketFacts:
    facts = BucketFacts(number, log_bytes=logged[number])
    with _problems_noted(facts):
        facts.bytes = stored.bucket_bytes(number) + facts.log_bytes
        facts.owner = stored.owner(number)
        _note_view(facts, stored.view(number))
    return facts


@contextmanager
def _problems_noted(facts: BucketFacts) -> Iterator[None]:
    try:
        yield
    except StorageError as exc:
        facts.problem = str(exc)


def _note_view(facts: BucketFacts, view: TableView) -> None:
    facts.rows, facts.start_offset, facts.end_offset = view.rows, view.start, view.end
    facts.version, facts.fragments = view.version, len(view.sizes)


def _plain_owner(note: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what identifies an owner; other contents of the lock file are left out."""
    if note is None:
        return None
    return {name: value for name, value in note.items() if name in _OWNER_NAMES}


_OWNER_NAMES = ("pid", "host", "node", "address")


def _bucket_logs(stored: TopicFolder, buckets: list[BucketFacts]) -> list[BucketLog]:
    """Return the log of each bucket: that of its own folder, else the shared log that it notes."""
    logs: list[BucketLog] = []
    try:
        shared, unreadable = logs_of(stored), None
    except StorageError as exc:
        shared, unreadable = [], str(exc)
    if isinstance(stored, StoreTopic):
        return _store_logs(stored, buckets, shared, unreadable)
    for facts in buckets:
        bucket = facts.bucket
        own = log_of(stored, bucket)
        entry = BucketLog(
            bucket,
            own.state,
            own.size,
            len(own.segments),
            own.pending_frames,
            own.problem,
            str(bucket_folder(stored.folder, bucket) / LOG_FOLDER),
        )
        noted = next((log for log in shared if bucket in [b.bucket for b in log.noting]), None)
        if own.state == "empty" and noted is not None:
            entry = _shared_log(facts, noted)
        elif own.state == "empty" and unreadable is not None:
            entry.state, entry.problem = "damaged", unreadable
        logs.append(entry)
    return logs


def _store_logs(
    stored: StoreTopic,
    buckets: list[BucketFacts],
    shared: list[OwnerLogReport],
    unreadable: str | None,
) -> list[BucketLog]:
    logs = []
    for facts in buckets:
        noted = next(
            (log for log in shared if facts.bucket in [b.bucket for b in log.noting]), None
        )
        if noted is not None:
            entry = _shared_log(facts, noted)
            entry.path = place_of_log(stored, noted)
            logs.append(entry)
        else:
            state = "empty" if unreadable is None else "damaged"
            logs.append(BucketLog(facts.bucket, state, facts.log_bytes, 0, 0, unreadable))
    return logs


def _shared_log(facts: BucketFacts, log: OwnerLogReport) -> BucketLog:
    part = next(part for part in log.buckets if part.bucket == facts.bucket)
    is_hit = part.lost is not None or log.state not in ("damaged", "missing")
    return BucketLog(
        facts.bucket,
        log.state if is_hit else "whole",
        facts.log_bytes,
        len(log.segments),
        part.pending_frames,
        log.problem if is_hit else None,
        str(log.folder),
    )


def _indexes(stored: TopicFolder) -> list[IndexFacts]:
    indexes: dict[tuple[str, str], IndexFacts] = {}
    schema = stored.schema([])  # of the topic's file: a damaged table does not hide the others
    for bucket in stored.buckets:
        for spec in index_file.usable(schema, stored.index_specs(bucket)):
            metric = spec.metric if spec.family == "vector" else None
            facts = indexes.setdefault(
                (spec.column, spec.kind), IndexFacts(spec.column, spec.kind, metric, [])
            )
            facts.buckets.append(bucket)
    return list(indexes.values())


def _size(folder: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; they may disappear meanwhile."""
    total = 0
    if folder.is_file():
        with suppress(OSError):
            return folder.lstat().st_size
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
