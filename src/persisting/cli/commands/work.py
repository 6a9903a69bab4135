"""``work``: leases and dead letters of work groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints
from persisting.cli.records import without_nulls

if TYPE_CHECKING:
    from persisting.work.reader import WorkReader


class Released(msgspec.Struct):
    """How many leases were released."""

    topic: str
    group: str
    released: int


class DeadLetter(msgspec.Struct):
    """A record that a work group has given up, and why."""

    number: int
    bucket: int
    """Where the record is in its topic."""
    offset: int
    attempts: int
    time: str
    reason: str
    history: list[str]
    """A line for every time that the record was given up."""
    record: dict[str, Any]


class Redriven(msgspec.Struct):
    """How many dead letters were re-driven, or in a dry run would be."""

    topic: str
    group: str
    redriven: int
    dry_run: bool = False


@click.group(cls=CommandGroup)
def work() -> None:
    """Release leases of a work group; list, show and re-drive its dead letters.

    \b
    Example:
      persisting work dead tasks solvers
    """


_group = click.argument("group")
_where = click.option(
    "--where", metavar="SQL", help="Only letters that match: dead_letter.attempts > 3."
)


@work.command()
@parameters.topic
@_group
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("work release", "persisting.cli.commands.work:Released")
def release(topic: str, group: str, dry_run: bool, yes: bool, storage: str, as_json: bool) -> None:
    """Release all leases of a group: its members lose them, and the records are delivered again.

    \b
    Example:
      persisting work release tasks solvers
    """

    async def count() -> int:
        async with _member(topic, group, storage) as member:
            return int((await member.stats())["in_flight"])

    async def release_all() -> int:
        async with _member(topic, group, storage) as member:
            return await member.release_all()

    if dry_run:
        leases = topics_access.run(count())
    else:
        topics_access.confirm(f"Release all leases of group {group}?", yes)
        leases = topics_access.run(release_all())
    result = Released(topic, group, leases)
    output.show(
        result,
        as_json,
        lambda: output.line(output.outcome(leases, "lease", "released", dry_run=dry_run)),
    )


@work.command()
@parameters.topic
@_group
@_where
@parameters.storage
@parameters.as_json
@prints("work dead", "persisting.cli.commands.work:DeadLetter", many=True)
def dead(topic: str, group: str, where: str | None, storage: str, as_json: bool) -> None:
    """List the dead letters of a group that were not re-driven.

    \b
    Examples:
      persisting work dead tasks solvers
      persisting work dead tasks solvers --where "dead_letter.attempts > 3"
    """

    async def find() -> list[dict[str, Any]]:
        async with _member(topic, group, storage) as member:
            return await member.dead_letters(where)

    letters = [_letter(letter) for letter in topics_access.run(find())]
    output.show(letters, as_json, lambda: _print_letters(letters))


@work.command()
@parameters.topic
@_group
@click.argument("number", type=click.IntRange(min=1))
@parameters.storage
@parameters.as_json
@prints("work show", "persisting.cli.commands.work:DeadLetter")
def show(topic: str, group: str, number: int, storage: str, as_json: bool) -> None:
    """Show a dead letter: the record, why it failed, and its history.

    \b
    Example:
      persisting work show tasks solvers 17
    """

    async def find() -> list[dict[str, Any]]:
        async with _member(topic, group, storage) as member:
            return await member.dead_letters(f"dead_letter.number = {number}")

    letters = topics_access.run(find())
    if not letters:
        from persisting.errors import InvalidArgument

        raise InvalidArgument(
            f"group {group!r} has no dead letter {number} that was not re-driven; "
            f"'persisting work dead {topic} {group}' lists them"
        )
    letter = _letter(letters[0])
    output.show(letter, as_json, lambda: _print_letter(letter))


@work.command()
@parameters.topic
@_group
@_where
@click.option(
    "--number", "numbers", type=int, multiple=True, help="Only this letter; may be repeated."
)
@click.option(
    "--offset",
    "offsets",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only the letter at this offset of bucket 0 of the dead letters; may be repeated.",
)
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("work redrive", "persisting.cli.commands.work:Redriven")
def redrive(
    topic: str,
    group: str,
    where: str | None,
    numbers: tuple[int, ...],
    offsets: tuple[int, ...],
    dry_run: bool,
    yes: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Deliver dead records to the group again: all, or those that match; each letter once.

    \b
    Examples:
      persisting work redrive tasks solvers --dry-run
      persisting work redrive tasks solvers --where "dead_letter.reason LIKE '%timeout%'"
    """

    async def run(dry: bool) -> int:
        async with _member(topic, group, storage) as member:
            return await member.redrive(
                where, numbers=numbers or None, offsets=offsets or None, dry_run=dry
            )

    count = topics_access.run(run(True))
    if not dry_run:
        letters = output.plural(count, "dead letter")
        topics_access.confirm(f"Deliver the records of {letters} to group {group} again?", yes)
        count = topics_access.run(run(False))
    result = Redriven(topic, group, count, dry_run)
    output.show(
        result,
        as_json,
        lambda: output.line(output.outcome(count, "dead letter", "re-driven", dry_run=dry_run)),
    )


@asynccontextmanager
async def _member(topic: str, group: str, storage: str) -> AsyncIterator[WorkReader]:
    """Open a work group that exists as a member that takes no records."""
    from persisting.queue import read_queue
    from persisting.work.group_place import check_group

    check_group(topics_access.find_topic(topic, storage), group)
    place = topics_access.place_of(topic, storage)
    async with await read_queue(
        place.name, storage_path=place.root, group=group, mode="work"
    ) as member:
        yield member


def _letter(letter: dict[str, Any]) -> DeadLetter:
    origin = letter["dead_letter"]
    return DeadLetter(
        origin["number"],
        origin["bucket"],
        origin["offset"],
        origin["attempts"],
        str(origin["time"]),
        origin["reason"],
        origin["history"].split("\n"),
        without_nulls({name: value for name, value in letter.items() if name != "dead_letter"}),
    )


def _print_letters(letters: list[DeadLetter]) -> None:
    if not letters:
        output.say("no dead letters")
        return
    output.table(
        ["#number", "#bucket", "#offset", "#attempts", "time", "reason"],
        [[d.number, d.bucket, d.offset, d.attempts, d.time[:19], d.reason] for d in letters],
    )


def _print_letter(letter: DeadLetter) -> None:
    output.line(f"letter {letter.number}: bucket {letter.bucket}, offset {letter.offset}")
    for line in letter.history:
        output.line(line)
    output.line(output.encoded(letter.record).decode())
