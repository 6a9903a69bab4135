"""``compact``, ``retain`` and ``verify``."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from persisting.actions import verification
from persisting.actions.retention_plan import Retained, retention_plan
from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Duration, Size


class Compacted(msgspec.Struct):
    """The result of a compaction."""

    topic: str
    fragments_before: int
    fragments_after: int
    versions_removed: int
    seconds: float


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("compact", "persisting.cli.commands.maintenance:Compacted")
def compact(topic: str, storage: str, as_json: bool) -> None:
    """Merge small fragments into larger ones; offsets, order and content do not change.

    The owner of a topic does this by itself in the background. For large topics see 'persisting
    pipeline compact', which distributes the work over a cluster.

    \b
    Example:
      persisting compact events
    """
    started = time.monotonic()

    async def work() -> tuple[str, dict[str, Any]]:
        async with topics_access.reader(topic, storage) as reader:
            return reader.topic, await reader.compact()

    name, done = topics_access.run(work())
    result = Compacted(topic=name, seconds=time.monotonic() - started, **done)
    output.show(
        result,
        as_json,
        lambda: output.line(
            f"{result.fragments_before:,} fragments before, {result.fragments_after:,} after "
            f"({output.seconds(result.seconds)})"
        ),
    )


@click.command()
@parameters.topic
@click.option(
    "--rows", type=click.IntRange(1), help="Number of newest records to keep in each bucket."
)
@click.option(
    "--bytes",
    "nbytes",
    type=Size(),
    help="Size of newest records to keep in each bucket: 500MB, 2G.",
)
@click.option("--age", type=Duration(), help="Keep records that arrived within this time: 12h, 7d.")
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("retain", "persisting.actions.retention_plan:Retained")
def retain(
    topic: str,
    rows: int | None,
    nbytes: int | None,
    age: float | None,
    dry_run: bool,
    yes: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Drop the oldest records beyond a limit, in whole fragments; offsets do not change.

    Tagged records can still be read through their tag. To have the owner do this by itself, set
    retention_rows, retention_bytes or retention_seconds.

    \b
    Examples:
      persisting retain events --age 7d --dry-run
      persisting retain events --rows 1000000 --yes
    """
    if rows is None and nbytes is None and age is None:
        raise click.UsageError("Set at least one limit: --rows, --bytes or --age.")
    source = topics_access.find_recovered(topic, storage)
    plan = retention_plan(source, rows, nbytes, age)
    if not dry_run:
        topics_access.confirm(
            f"Drop up to {output.plural(plan.dropped, 'record')} of {plan.topic}?", yes
        )

        async def work() -> dict[str, Any]:
            async with topics_access.reader(topic, storage) as reader:
                return await reader.retain(rows=rows, bytes=nbytes, seconds=age)

        done = topics_access.run(work())
        starts = {str(bucket): start for bucket, start in done["start_offsets"].items()}
        plan = Retained(plan.topic, done["dropped"], starts)
    output.show(plan, as_json, lambda: _print_retained(plan))


def _print_retained(result: Retained) -> None:
    output.table(["#bucket", "#starts at"], list(result.start_offsets.items()))
    output.line(output.outcome(result.dropped, "record", "dropped", dry_run=result.dry_run))


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("verify", "persisting.actions.verification:Verified")
def verify(topic: str, storage: str, as_json: bool) -> None:
    """Compare every stored file with its checksum, check order and logs; exit with 5 on damage.

    \b
    Examples:
      persisting verify events
      persisting verify events --json | jq .damaged
    """
    source = topics_access.find_topic(topic, storage)
    topics_access.note_unflushed(source)

    async def verify_tables() -> dict[str, Any]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.verify()

    result = topics_access.run(verification.verify(source, verify_tables))
    output.show(result, as_json, lambda: _print_verified(result))
    if not result.ok:
        raise exit_codes.CommandExit(exit_codes.DAMAGED)


def _print_verified(result: verification.Verified) -> None:
    for damage in result.damaged:
        output.line(f"damaged: bucket {damage.bucket}, {damage.file}: {damage.problem}")
    for log in result.logs:
        if log.state == "unused":
            output.line(f"no longer needed; the next owner removes it: {log.path}")
        elif log.problem is not None:
            place = "shared log" if log.bucket is None else f"log of bucket {log.bucket}"
            output.line(f"damaged: {place}: {log.problem}")
    if result.unchecked:
        output.line(f"{output.plural(len(result.unchecked), 'file')} without a checksum")
    state = "no damage found" if result.ok else "DAMAGE FOUND; see the guide 'Check for damage'"
    output.line(
        f"{output.plural(result.rows, 'record')} in {output.plural(result.files, 'file')}: "
        f"{state} ({output.seconds(result.seconds)})"
    )
