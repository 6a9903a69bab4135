"""``groups``: shows and changes consumer groups."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import click

from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Timestamp

if TYPE_CHECKING:
    from persisting.topic.group_admin import GroupProgress, Span
    from persisting.topic.topic_files import TopicFolder


@click.command()
@parameters.topic
@click.argument("group", required=False)
@click.option(
    "--reset-to",
    metavar="WHERE",
    help="Move the group to: earliest, latest, an offset, or a time (2h, 2026-11-15T14:30).",
)
@click.option("--delete", is_flag=True, help="Delete the group and its committed offsets.")
@parameters.bucket
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("groups", "persisting.topic.group_admin:GroupProgress", many=True)
def groups(
    topic: str,
    group: str | None,
    reset_to: str | None,
    delete: bool,
    bucket: int | None,
    dry_run: bool,
    yes: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Show consumer groups and their lag; reset or delete a group.

    A group with an open reader cannot be changed: close its readers first.

    \b
    Examples:
      persisting groups events
      persisting groups events trainers
      persisting groups events trainers --reset-to earliest
      persisting groups events trainers --reset-to 2h --dry-run
    """
    from persisting import fs
    from persisting.topic import group_admin, inspect

    if group is None and (reset_to is not None or delete):
        raise click.UsageError("Name the group to reset or delete.")
    if reset_to is not None and delete:
        raise click.UsageError("Pass either --reset-to or --delete, not both.")
    source = topics_access.find_followed(topic, storage)

    def spans() -> dict[int, Span]:
        return inspect.spans_of(source)

    def progress(name: str) -> GroupProgress:
        return group_admin.progress(source.folder, name, source.buckets, spans, fs.current())

    if delete and group is not None:
        found = [progress(group)]
        if not dry_run:
            topics_access.confirm(f"Delete group {group} and its committed offsets?", yes)
            group_admin.delete(source.folder, group, list(source.buckets), fs.current())
            found = []
        output.say(f"group {group} {'would be ' if dry_run else ''}deleted")
        output.show(found, as_json, lambda: _print_groups(found, details=True) if found else None)
        return
    if reset_to is not None and group is not None:
        now = spans()
        offsets = _offsets(source, now, reset_to, bucket)
        if dry_run:
            found = [
                group_admin.after_reset(
                    source.folder, group, offsets, source.buckets, spans, fs.current()
                )
            ]
            output.show(found, as_json, lambda: _print_groups(found, details=True))
            return
        topics_access.confirm(f"Reset group {group} to {reset_to}?", yes)
        group_admin.reset(source.folder, group, offsets, now, fs.current())
    if group is None:
        found = group_admin.groups(source.folder, source.buckets, spans, fs.current())
    else:
        found = [progress(group)]
    output.show(found, as_json, lambda: _print_groups(found, details=group is not None))


def _print_groups(groups: list[GroupProgress], *, details: bool) -> None:
    if not groups:
        output.say("no groups")
        return
    output.table(
        ["group", "#members", "#lag"], [[group.group, group.members, group.lag] for group in groups]
    )
    if details:
        output.table(
            ["#bucket", "#committed", "#end", "#lag"],
            [
                [bucket.bucket, bucket.committed, bucket.end_offset, bucket.lag]
                for group in groups
                for bucket in group.buckets
            ],
        )


def _offsets(
    source: TopicFolder, spans: dict[int, Span], where: str, bucket: int | None
) -> dict[int, int]:
    chosen = {b: spans[b] for b in topics_access.buckets(source, bucket)}
    if where == "earliest":
        return {b: span.start for b, span in chosen.items()}
    if where == "latest":
        return {b: span.end for b, span in chosen.items()}
    if where.isdecimal():
        return {b: min(max(int(where), span.start), span.end) for b, span in chosen.items()}
    timestamp: dt.datetime = Timestamp().convert(where, None, None)
    since = round(timestamp.timestamp() * 1e6)
    return {b: source.snapshot(b).offset_at(since) for b in chosen}
