"""``groups``: shows and changes consumer groups and work groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from persisting.actions.group_reset import reset_offsets
from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints

if TYPE_CHECKING:
    from persisting.topic.group_admin import GroupProgress, Span
    from persisting.topic.topic_files import TopicFolder
    from persisting.topic.work_status import WorkStatus


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

    Of a work group it shows what the keeper stored last, which it does every two seconds. A group
    with an open reader cannot be changed: close its readers first. In an object store a change
    waits until the lease of a reader that was not closed expires.

    \b
    Examples:
      persisting groups events
      persisting groups events trainers
      persisting groups events trainers --reset-to earliest
      persisting groups events trainers --reset-to 2h --dry-run
    """
    from persisting.topic import inspect
    from persisting.topic.group_control import control_of

    if group is None and (reset_to is not None or delete):
        raise click.UsageError("Name the group to reset or delete.")
    if reset_to is not None and delete:
        raise click.UsageError("Pass either --reset-to or --delete, not both.")
    source = topics_access.find_followed(topic, storage)
    admin = control_of(source)

    def spans() -> dict[int, Span]:
        return inspect.spans_of(source)

    def progress(name: str) -> GroupProgress:
        return admin.progress(name, source.buckets, spans)

    if delete and group is not None:
        found = [progress(group)]
        if not dry_run:
            topics_access.confirm(f"Delete group {group} and its committed offsets?", yes)
            admin.delete(group, list(source.buckets))
            found = []
        output.say(f"group {group} {'would be ' if dry_run else ''}deleted")
        output.show(found, as_json, lambda: _print_groups(found, details=True) if found else None)
        return
    if reset_to is not None and group is not None:
        now = spans()
        offsets = _offsets(source, now, reset_to, bucket)
        if dry_run:
            found = [admin.after_reset(group, offsets, source.buckets, spans)]
            output.show(found, as_json, lambda: _print_groups(found, details=True))
            return
        topics_access.confirm(f"Reset group {group} to {reset_to}?", yes)
        admin.reset(group, offsets, now)
    found = admin.groups(source.buckets, spans) if group is None else [progress(group)]
    output.show(found, as_json, lambda: _print_groups(found, details=group is not None))


def _print_groups(groups: list[GroupProgress], *, details: bool) -> None:
    if not groups:
        output.say("no groups")
        return
    output.table(
        ["group", "#members", "#lag"], [[group.group, group.members, group.lag] for group in groups]
    )
    working = [(group.group, group.work) for group in groups if group.work is not None]
    if working:
        output.table(
            ["work group", "#in flight", "#retries", "#oldest", "#dead", "state"],
            [
                [
                    name,
                    work.in_flight,
                    work.retrying,
                    _age(work.oldest_seconds),
                    work.dead,
                    _state(work),
                ]
                for name, work in working
            ],
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


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.0f} s"


def _state(work: WorkStatus) -> str:
    if work.dead_letter_error is not None:
        return f"{work.dying} dead letters cannot be written: {work.dead_letter_error}"
    if work.breaker_open:
        return "slowed down: most deliveries fail"
    return "open" if work.kept else "nobody reads it"


def _offsets(
    source: TopicFolder, spans: dict[int, Span], where: str, bucket: int | None
) -> dict[int, int]:
    try:
        return reset_offsets(source, spans, where, topics_access.buckets(source, bucket))
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
