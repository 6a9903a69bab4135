"""``head``, ``tail`` and ``get``: show records with their positions."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from persisting.actions.record_window import Found, by_arrival, record_window
from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Timestamp
from persisting.cli.record_text import brief, without_nulls

if TYPE_CHECKING:
    from persisting.bucket.snapshot import Snapshot
    from persisting.topic.topic_files import TopicFolder

_FOLLOW_SECONDS = 0.2
_FOLLOW_ROWS = 10_000


_lines = parameters.count("--lines", 10, "Number of records to show.")


@dataclass(frozen=True)
class _Chosen:
    """What to show of which topic, and how."""

    topic: str
    bucket: int | None
    columns: list[str] | None
    nulls: bool
    storage: str
    as_json: bool


_chosen = parameters.bundled(
    "chosen",
    _Chosen,
    parameters.topic,
    parameters.bucket,
    parameters.columns,
    parameters.nulls,
    parameters.storage,
    parameters.as_json,
)


@click.command()
@_chosen
@_lines
@prints("head", "persisting.cli.json_contract:Found", lines=True)
def head(
    chosen: _Chosen,
    lines: int,
) -> None:
    """Show the oldest records, in order of arrival.

    \b
    Examples:
      persisting head events -n 3
      persisting head events --json | jq -c .record
    """
    source = topics_access.find_followed(chosen.topic, chosen.storage)
    topics_access.note_unflushed(source, reads_log=True)
    found: list[Found] = []
    for number in topics_access.buckets(source, chosen.bucket):
        snapshot = source.snapshot(number)
        found += _window(source, number, snapshot, snapshot.start, lines, chosen.columns)
    _print(sorted(found, key=by_arrival)[:lines], chosen)


@click.command()
@_chosen
@_lines
@click.option("--follow", "-f", is_flag=True, help="Keep showing new records until Ctrl-C.")
@click.option(
    "--since",
    type=Timestamp(),
    help="Show only records that arrived since: 2h, or 2026-11-15T14:30.",
)
@prints("tail", "persisting.cli.json_contract:Found", lines=True)
def tail(
    chosen: _Chosen,
    lines: int,
    follow: bool,
    since: dt.datetime | None,
) -> None:
    """Show the newest records, in order of arrival; follow the topic with -f.

    Records that another process writes appear when they are acknowledged; without a write-ahead
    log, when they are flushed to the table.

    \b
    Examples:
      persisting tail events -n 20
      persisting tail events -f --columns id,score
      persisting tail events --since 15m -n 1000
    """
    source = topics_access.find_followed(chosen.topic, chosen.storage)
    if not follow:
        topics_access.note_unflushed(source, reads_log=True)
    positions = {}
    found: list[Found] = []
    for number in topics_access.buckets(source, chosen.bucket):
        snapshot = source.snapshot(number)
        first = max(snapshot.start, snapshot.end - lines)
        if since is not None:
            first = max(first, snapshot.offset_at(round(since.timestamp() * 1e6)))
        found += _window(source, number, snapshot, first, snapshot.end - first, chosen.columns)
        positions[number] = (snapshot.end, snapshot.epoch)
    _print(sorted(found, key=by_arrival)[-lines:] if lines else [], chosen)
    while follow:
        with _change_in(source, positions) as changed:
            new = sorted(_new_records(source, positions, chosen.columns), key=by_arrival)
            if not new:
                changed.wait(_FOLLOW_SECONDS)
        _print(new, chosen)


@contextmanager
def _change_in(source: TopicFolder, buckets: Iterable[int]) -> Iterator[threading.Event]:
    """Yield an event that is set when a bucket may have changed since the beginning."""
    changed = threading.Event()
    with ExitStack() as stack:
        for number in buckets:
            reader = source.reader(number)
            if reader is not None:
                stack.enter_context(reader.waiters.waiting(changed.set))
                reader.refresh(watch=True)
        yield changed


def _new_records(
    source: TopicFolder, positions: dict[int, tuple[int, int]], columns: list[str] | None
) -> Iterator[Found]:
    """Yield the records since the last call and advance ``positions`` (offset, epoch)."""
    for number, (offset, restores) in positions.items():
        snapshot = source.snapshot(number)
        if snapshot.epoch > restores:
            ends = [restore.end for restore in source.table(number).restores]
            least = min([offset, *ends[restores : snapshot.epoch]])
            if least < offset:
                output.say(
                    f"bucket {number} was restored to an older version, or lost records that were "
                    f"not flushed; it ended at {least} again"
                )
            offset = least
        first = max(offset, snapshot.start)
        count = max(0, min(_FOLLOW_ROWS, snapshot.end - first))
        if count:
            yield from _window(source, number, snapshot, first, count, columns)
        positions[number] = (first + count, snapshot.epoch)


@click.command()
@_chosen
@click.option(
    "--offset", "-o", type=click.IntRange(0), help="First offset to show.  [default: the oldest]"
)
@parameters.count("--limit", 1, "Number of records to show of each bucket.")
@parameters.tag("Show")
@parameters.at("Show")
@prints("get", "persisting.cli.json_contract:Found", lines=True)
def get(
    chosen: _Chosen,
    offset: int | None,
    limit: int,
    tag: str | None,
    timestamp: dt.datetime | None,
) -> None:
    """Show the records from an offset on, of one bucket or of every bucket.

    \b
    Examples:
      persisting get events --bucket 0 --offset 12
      persisting get events --tag before-cleanup --limit 5
      persisting get events --at 2h -n 1
    """
    if tag is not None and timestamp is not None:
        raise click.UsageError("Pass either --tag or --at, not both.")
    version = tag if tag is not None else timestamp
    find = topics_access.find_followed if version is None else topics_access.find_recovered
    source = find(chosen.topic, chosen.storage)
    versions = None if version is None else source.versions(version)
    if versions is None:
        topics_access.note_unflushed(source, reads_log=True)
    for number in topics_access.buckets(source, chosen.bucket):
        snapshot = source.snapshot(number) if versions is None else source.at(number, versions)
        first = snapshot.start if offset is None else offset
        if first < snapshot.start:
            _raise_removed(number, first, snapshot.start)
        _print(_window(source, number, snapshot, first, limit, chosen.columns), chosen)


def _raise_removed(bucket: int, offset: int, start: int) -> None:
    from persisting.errors import OffsetOutOfRange

    raise OffsetOutOfRange(
        f"retention removed offset {offset} of bucket {bucket}; the first remaining offset is "
        f"{start}"
    )


def _window(
    source: TopicFolder,
    bucket: int,
    snapshot: Snapshot,
    first: int,
    count: int,
    columns: list[str] | None,
) -> list[Found]:
    """Return records of a bucket with their positions and timestamps."""
    if first >= snapshot.end or not count:
        return []
    names = topics_access.columns(source, columns)
    return record_window(source, bucket, snapshot, first, count, names)


def _print(records: Sequence[Found], chosen: _Chosen) -> None:
    for found in records:
        if not chosen.nulls:
            found.record = without_nulls(found.record)
        if chosen.as_json:
            output.json_line(found)
        else:
            position = f"{found.bucket}:{found.offset}"
            output.part(f"{position:>8}", "cyan")
            output.line(brief(found.record))
