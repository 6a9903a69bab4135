"""Versions and tags: a timeline, comparisons, and restoring an earlier state."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from persisting.actions.record_window import Found, bounded_window
from persisting.actions.restore_plan import restore_plan
from persisting.bucket.snapshot import Snapshot
from persisting.errors import InvalidArgument
from persisting.queue import QueueReader
from persisting.topic.tags import TopicTag
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages
from persisting.ui.console import Console, topic_of
from persisting.ui.requests import Parameters, address
from persisting.ui.version_rows import VersionRow, add_operations, all_versions

_PAGE = 50
_SAMPLE = 10
_SAMPLE_BYTES = 4 << 20
NOW = "(now)"
"""The current state in a comparison; no tag has such a name."""


@dataclass
class BucketDifference:
    """How one bucket differs between two states."""

    bucket: int
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def added(self) -> int:
        return max(0, self.after[1] - self.before[1])

    @property
    def removed(self) -> int:
        """Records at the end that only the first state has."""
        return max(0, self.before[1] - self.after[1])

    @property
    def expired(self) -> int:
        """Records at the beginning that retention dropped."""
        return max(0, min(self.after[0], self.before[1]) - self.before[0])


@dataclass
class Difference:
    buckets: list[BucketDifference]
    new_fields: list[str]
    lost_fields: list[str]
    sample: list[Found]
    sample_is_removed: bool


async def show(request: Request) -> Response:
    """Show tags and versions."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)

    page = given.number("page", 1, least=1)

    def read(source: TopicFolder) -> tuple[list[TopicTag], list[VersionRow], int, int]:
        found = all_versions(source)
        last_page = max(1, -(-len(found) // _PAGE))
        first = (min(page, last_page) - 1) * _PAGE
        shown = found[first : first + _PAGE]
        add_operations(source, shown)
        known = sorted(source.tag_files.all(), key=lambda tag: tag.timestamp)
        return known, shown, len(found), last_page

    known, rows, total, last_page = await console.view.read(topic, read)
    return pages.render(
        request,
        "versions.html",
        topic=topic,
        tags=list(reversed(known)),
        rows=rows,
        total=total,
        page=min(page, last_page),
        last_page=last_page,
        now=NOW,
        done=given.text("done", 200),
    )


async def compare(request: Request) -> Response:
    """Show what differs between two tags, or a tag and the current state."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    first, second = given.required("first"), given.text("second", 128) or NOW

    def read(source: TopicFolder) -> Difference:
        return _difference(source, first, second)

    difference = await console.view.read(topic, read)
    return pages.render(
        request,
        "compare.html",
        topic=topic,
        first=first,
        second=second,
        now=NOW,
        difference=difference,
    )


def _difference(source: TopicFolder, first: str, second: str) -> Difference:
    before, after = _snapshots(source, first), _snapshots(source, second)
    buckets = [
        BucketDifference(b, (before[b].start, before[b].end), (after[b].start, after[b].end))
        for b in source.buckets
    ]
    old, new = _fields(before), _fields(after)
    removed = not any(bucket.added for bucket in buckets)
    return Difference(
        buckets,
        [name for name in new if name not in old],
        [name for name in old if name not in new],
        _sampled(source, before if removed else after, buckets, removed=removed),
        removed,
    )


def _snapshots(source: TopicFolder, state: str) -> dict[int, Snapshot]:
    if state == NOW:
        return {bucket: source.snapshot(bucket) for bucket in source.buckets}
    numbers = source.versions(state)
    return {bucket: source.at(bucket, numbers) for bucket in source.buckets}


def _fields(snapshots: dict[int, Snapshot]) -> list[str]:
    names: dict[str, pa.DataType] = {}
    for snapshot in snapshots.values():
        for field in snapshot.schema:
            names.setdefault(field.name, field.type)
    return list(names)


def _sampled(
    source: TopicFolder,
    snapshots: dict[int, Snapshot],
    buckets: list[BucketDifference],
    *,
    removed: bool,
) -> list[Found]:
    """Return some of the records that only one of the states has."""
    sample: list[Found] = []
    for bucket in buckets:
        count = bucket.removed if removed else bucket.added
        snapshot = snapshots[bucket.bucket]
        first = max(bucket.after[1] if removed else bucket.before[1], snapshot.start)
        wanted = min(count, _SAMPLE - len(sample), max(0, snapshot.end - first))
        if wanted > 0:
            end = first + wanted
            sample += bounded_window(
                source, bucket.bucket, snapshot, first, end, _SAMPLE_BYTES
            ).rows
    return sample


async def create_tag(request: Request) -> Response:
    """Tag the current state."""
    name = (await _changing(request)).required("name")
    async with await _reader(request) as reader:
        await reader.tag(name)
    return await _back(request, name)


async def delete_tag(request: Request) -> Response:
    """Delete a tag."""
    name = (await _changing(request)).required("name")
    async with await _reader(request) as reader:
        if not await reader.delete_tag(name):
            raise InvalidArgument(f"there is no tag {name!r}")
    return await _back(request, name)


async def preview_restore(request: Request) -> Response:
    """Show what a restore would remove."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    console.check_changes_allowed()
    version, fields = _version(given)
    plan = await console.view.read(topic, lambda source: restore_plan(source, version))
    return pages.render(
        request, "restore.html", topic=topic, plan=plan, fields=fields, version=version, done=None
    )


async def restore(request: Request) -> Response:
    """Restore an earlier state, if the reader has typed the name of the topic."""
    topic, given = topic_of(request), await _changing(request)
    if given.text("confirm") != topic:
        raise InvalidArgument(
            f"to restore, type the name of the topic, {topic!r}, into the field; nothing was "
            "changed"
        )
    version, fields = _version(given)
    expected = given.number("removed", 0)
    console = Console.of(request)
    plan = await console.view.read(topic, lambda source: restore_plan(source, version))
    if plan.removed != expected:
        raise InvalidArgument(
            f"the topic has changed since the preview: now {plan.removed:,} records would be "
            f"removed instead of {expected:,}. Nothing was changed; open the preview again"
        )
    async with await _reader(request) as reader:
        done = await reader.restore(version)
    await console.refresh(topic)
    return pages.render(
        request, "restore.html", topic=topic, plan=plan, fields=fields, version=version, done=done
    )


def _version(given: Parameters) -> tuple[str | dt.datetime, dict[str, str]]:
    """Return the state to restore, and the fields of a form that name it again."""
    tag, at = given.text("tag", 128), given.time("at")
    if (tag is None) == (at is None):
        raise InvalidArgument("choose a tag or a time to restore")
    if tag is not None:
        return tag, {"tag": tag}
    assert at is not None
    return at, {"at": at.isoformat()}


async def _changing(request: Request) -> Parameters:
    Console.of(request).check_changes_allowed()
    return await Parameters.of_form(request)


async def _reader(request: Request) -> QueueReader:
    return await Console.of(request).owners.open(topic_of(request))


async def _back(request: Request, done: str) -> Response:
    await Console.of(request).refresh(topic_of(request))
    path = f"/topics/{pages.segment(topic_of(request))}/versions"
    return RedirectResponse(address(path, done=done), status_code=303)
