"""``head``, ``tail`` and ``get``: records, and where they lie."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import Found, prints
from persisting.cli.parameters import Moment
from persisting.cli.records import brief

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder

_FOLLOW_SECONDS = 0.2
_FOLLOW_ROWS = 10_000


def _shared(command: Any) -> Any:
    for option in (
        parameters.as_json,
        parameters.storage,
        parameters.columns,
        parameters.bucket,
        parameters.topic,
    ):
        command = option(command)
    return command


@click.command()
@_shared
@click.option(
    "--lines", "-n", default=10, show_default=True, type=click.IntRange(0), help="How many."
)
@prints("head", "persisting.cli.json_contract:Found", lines=True)
def head(
    topic: str,
    bucket: int | None,
    columns: list[str] | None,
    storage: str,
    as_json: bool,
    lines: int,
) -> None:
    """Show the first records that are left, in the order of their arrival.

    \b
    Examples:
      persisting head events -n 3
      persisting head events --json | jq -c .record
    """
    source = topics_access.readable(topic, storage)
    topics_access.tell_of_owner(source)
    found = [
        one
        for number in topics_access.buckets(source, bucket)
        for one in _window(source, number, source.view(number).start, lines, columns)
    ]
    _print(sorted(found, key=_by_arrival)[:lines], as_json)


@click.command()
@_shared
@click.option(
    "--lines", "-n", default=10, show_default=True, type=click.IntRange(0), help="How many."
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new records until Ctrl-C.")
@click.option("--since", type=Moment(), help="From this time on: 2h, or 2026-11-15T14:30.")
@prints("tail", "persisting.cli.json_contract:Found", lines=True)
def tail(
    topic: str,
    bucket: int | None,
    columns: list[str] | None,
    storage: str,
    as_json: bool,
    lines: int,
    follow: bool,
    since: dt.datetime | None,
) -> None:
    """Show the last records, in the order of their arrival; follow with -f.

    Another process may be writing: its records are seen when they are flushed to the table.

    \b
    Examples:
      persisting tail events -n 20
      persisting tail events -f --columns id,score
      persisting tail events --since 15m -n 1000
    """
    source = topics_access.readable(topic, storage)
    if not follow:
        topics_access.tell_of_owner(source)
    places = {}
    found: list[Found] = []
    for number in topics_access.buckets(source, bucket):
        view = source.view(number)
        first = max(view.start, view.end - lines)
        if since is not None:
            first = max(first, source.offset_at(number, since))
        found += _window(source, number, first, view.end - first, columns)
        places[number] = (view.end, len(source.table(number).restores))
    _print(sorted(found, key=_by_arrival)[-lines:] if lines else [], as_json)
    while follow:
        time.sleep(_FOLLOW_SECONDS)
        _print(sorted(_news(source, places, columns), key=_by_arrival), as_json)


def _news(
    source: TopicFolder, places: dict[int, tuple[int, int]], columns: list[str] | None
) -> Iterator[Found]:
    """What came since the last look; ``places`` (offset, restores so far) go on."""
    for number, (place, restores) in places.items():
        table = source.table(number)
        view, ends = table.view, [one.end for one in table.restores]
        if len(ends) > restores:
            place = min([place, *ends[restores:]])
            output.say(f"bucket {number} was restored to an older version, ending at {place}")
        first = max(place, view.start)
        count = max(0, min(_FOLLOW_ROWS, view.end - first))
        if count:
            yield from _window(source, number, first, count, columns)
        places[number] = (first + count, len(ends))


@click.command()
@_shared
@click.option("--offset", "-o", type=click.IntRange(0), help="First offset; default: the first.")
@click.option(
    "--limit", "-n", default=1, show_default=True, type=click.IntRange(0), help="How many each."
)
@click.option("--tag", metavar="NAME", help="As the topic was at a tag.")
@click.option("--at", "moment", type=Moment(), help="As it was at a time: 2h, or 2026-11-15.")
@prints("get", "persisting.cli.json_contract:Found", lines=True)
def get(
    topic: str,
    bucket: int | None,
    columns: list[str] | None,
    storage: str,
    as_json: bool,
    offset: int | None,
    limit: int,
    tag: str | None,
    moment: dt.datetime | None,
) -> None:
    """Show the records at an offset, of one bucket or of each.

    \b
    Examples:
      persisting get events --bucket 0 --offset 12
      persisting get events --tag before-cleanup --limit 5
      persisting get events --at 2h -n 1
    """
    if tag is not None and moment is not None:
        raise click.UsageError("Give --tag or --at, not both.")
    source = topics_access.readable(topic, storage)
    version = tag if tag is not None else moment
    versions = None if version is None else source.versions(version)
    if versions is None:
        topics_access.tell_of_owner(source)
    for number in topics_access.buckets(source, bucket):
        view = (
            source.view(number) if versions is None else source.table(number).at(versions[number])
        )
        first = view.start if offset is None else offset
        if first < view.start:
            _removed(number, first, view.start)
        _print(
            _window(
                source,
                number,
                first,
                limit,
                columns,
                None if versions is None else versions[number],
            ),
            as_json,
        )


def _removed(bucket: int, offset: int, start: int) -> None:
    from persisting.errors import OffsetOutOfRange

    raise OffsetOutOfRange(
        f"offset {offset} of bucket {bucket} was removed by retention: the first left is {start}"
    )


def _window(
    source: TopicFolder,
    bucket: int,
    first: int,
    count: int,
    columns: list[str] | None,
    version: int | None = None,
) -> list[Found]:
    """Some records of a bucket, with their places and times."""
    from persisting.cli.records import records
    from persisting.topic.scan import Slice, divided, read

    table = source.table(bucket)
    view = table.view if version is None else table.at(version)
    end = min(view.end, first + count)
    if first >= end:
        return []
    part = Slice(str(source.folder), bucket, first, end, len(table.restores), version)
    schema = source.schema()
    names = topics_access.columns(source, columns)
    found = []
    for batch in read(part, names, metadata=True):
        rows, *places = divided(batch)
        kept = records(rows, schema, names, source.config)
        found += [
            Found(number, offset, record, moment.isoformat())
            for number, offset, moment, record in zip(
                *(column.to_pylist() for column in places), kept, strict=True
            )
        ]
    return found


def _by_arrival(one: Found) -> tuple[str, int, int]:
    return one.time or "", one.bucket, one.offset


def _print(found: Sequence[Found], as_json: bool) -> None:
    for one in found:
        if as_json:
            output.json_line(one)
        else:
            place = f"{one.bucket}:{one.offset}"
            output.out().print(f"{place:>8}", style="cyan", end="  ", markup=False)
            output.line(brief(one.record))
