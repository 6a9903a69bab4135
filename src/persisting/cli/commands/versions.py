"""``tag``, ``versions`` and ``restore``: use earlier versions of a topic."""

from __future__ import annotations

import datetime as dt
from typing import Any

import click
import msgspec

from persisting.actions.restore_plan import Restore, restore_plan
from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Json, Timestamp


class TagResult(msgspec.Struct):
    """A tag of a topic."""

    name: str
    timestamp: dt.datetime
    rows: int
    buckets: dict[str, dict[str, int]]
    """By bucket: version, start_offset, end_offset."""


class TopicVersion(msgspec.Struct):
    """A version of a bucket that can be read."""

    bucket: int
    version: int
    timestamp: dt.datetime
    rows: int
    operation: str | None


@click.command()
@parameters.topic
@click.argument("name", required=False)
@click.option("--delete", is_flag=True, help="Delete the tag NAME.")
@parameters.storage
@parameters.as_json
@prints("tag", "persisting.cli.commands.versions:TagResult", many=True)
def tag(topic: str, name: str | None, delete: bool, storage: str, as_json: bool) -> None:
    """Tag the current state of a topic with a name; without a name, list the tags.

    A tagged state survives retention and the cleanup of old versions, and holds every record that
    was acknowledged before. Another process of the same user may have the topic open.

    \b
    Examples:
      persisting tag events before-cleanup
      persisting tag events
      persisting tag events before-cleanup --delete
    """
    if delete and name is None:
        raise click.UsageError("Name the tag to delete.")

    async def work() -> list[dict[str, Any]]:
        async with topics_access.reader(topic, storage) as reader:
            if name is None:
                return await reader.tags()
            if not delete:
                return [await reader.tag(name)]
            if not await reader.delete_tag(name):
                raise click.UsageError(f"The topic has no tag {name!r}.")
            return []

    found = [
        TagResult(
            found_tag["name"],
            found_tag["timestamp"],
            found_tag["rows"],
            {str(bucket): place for bucket, place in found_tag["buckets"].items()},
        )
        for found_tag in topics_access.run(work())
    ]
    output.show(found, as_json, lambda: _print_tags(found, name, delete))


def _print_tags(found: list[TagResult], name: str | None, deleted: bool) -> None:
    if deleted:
        output.line(f"tag {name} deleted")
    elif not found:
        output.say("no tags")
    else:
        output.table(
            ["tag", "time", "#rows"],
            [
                [found_tag.name, output.local_time(found_tag.timestamp), found_tag.rows]
                for found_tag in found
            ],
        )


@click.command()
@parameters.topic
@parameters.bucket
@parameters.storage
@parameters.as_json
@prints("versions", "persisting.cli.commands.versions:TopicVersion", many=True)
def versions(topic: str, bucket: int | None, storage: str, as_json: bool) -> None:
    """List the readable versions of the buckets, oldest first.

    \b
    Examples:
      persisting versions events
      persisting versions events --bucket 0 --json
    """

    async def work() -> list[dict[str, Any]]:
        async with topics_access.reader(topic, storage, bucket) as reader:
            return await reader.versions()

    found = msgspec.convert(topics_access.run(work()), list[TopicVersion])
    output.show(
        found,
        as_json,
        lambda: output.table(
            ["time", "#bucket", "#version", "#rows", "operation"],
            [
                [
                    output.local_time(version.timestamp),
                    version.bucket,
                    version.version,
                    version.rows,
                    version.operation,
                ]
                for version in found
            ],
        ),
    )


@click.command()
@parameters.topic
@click.option("--tag", "name", metavar="NAME", help="Restore the state of this tag.")
@click.option(
    "--at",
    "timestamp",
    type=Timestamp(),
    help="Restore what had been flushed at a time: 2h, or 2026-11-15.",
)
@click.option(
    "--version",
    "numbers",
    type=Json(),
    metavar="JSON",
    help='Restore these versions of buckets, as in {"0": 7, "1": 5}.',
)
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("restore", "persisting.actions.restore_plan:Restore")
def restore(
    topic: str,
    name: str | None,
    timestamp: dt.datetime | None,
    numbers: Any,
    dry_run: bool,
    yes: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Restore a topic to a tag, a point in time or given versions.

    The restored content becomes a new version. Removed records can still be read through their old
    version until it is cleaned up; tag the topic first to keep them for good. Groups that had
    committed more continue at the new end.

    \b
    Examples:
      persisting restore events --tag before-cleanup --dry-run
      persisting restore events --at 2h --yes
    """
    given = [value for value in (name, timestamp, numbers) if value is not None]
    if len(given) != 1:
        raise click.UsageError("Pass exactly one of --tag, --at and --version.")
    version = _by_bucket(numbers) if numbers is not None else given[0]
    plan = _plan(topic, storage, version)
    if dry_run:
        plan.dry_run = True
        output.show(plan, as_json, lambda: _print_restore(plan))
        return
    topics_access.confirm(
        f"Restore {plan.topic}? {output.plural(plan.removed, 'record')} will be removed.", yes
    )

    async def work() -> dict[str, Any]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.restore(version)

    done = topics_access.run(work())
    plan.removed, plan.groups = done["removed"], done["groups"]
    for bucket in plan.buckets:
        actual = done["buckets"][bucket.bucket]
        bucket.end_offset, bucket.removed = actual["end_offset"], actual["removed"]
    output.show(plan, as_json, lambda: _print_restore(plan))


def _by_bucket(given: Any) -> Any:
    if isinstance(given, dict):
        numbers = [version for version in given.values() if type(version) is int]
        if len(numbers) == len(given) and all(bucket.isdecimal() for bucket in given):
            return {int(bucket): version for bucket, version in given.items()}
    elif isinstance(given, int) and not isinstance(given, bool):
        return given
    raise click.UsageError(
        '--version must be a number, or versions by bucket as in {"0": 7, "1": 5}.'
    )


def _plan(topic: str, storage: str, version: Any) -> Restore:
    source = topics_access.find_recovered(topic, storage)
    if isinstance(version, int) and len(source.buckets) > 1:
        raise click.UsageError(
            "Each bucket numbers its own versions; pass --tag, --at, or "
            '--version \'{"0": 7, "1": 5}\'.'
        )
    return restore_plan(source, version)


def _print_restore(plan: Restore) -> None:
    output.table(
        ["#bucket", "#version", "#ends at", "#removed"],
        [
            [bucket.bucket, bucket.version, bucket.end_offset, bucket.removed]
            for bucket in plan.buckets
        ],
    )
    for group in plan.groups:
        output.line(
            f"group {group['group']} continues at {group['end']} instead of {group['committed']} "
            f"in bucket {group['bucket']}"
        )
    output.line(output.outcome(plan.removed, "record", "removed", dry_run=plan.dry_run))
