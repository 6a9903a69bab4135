"""``compact``, ``retain`` and ``verify``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Duration, Size

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder


class Compacted(msgspec.Struct):
    """What a compaction did."""

    topic: str
    fragments_before: int
    fragments_after: int
    versions_removed: int
    seconds: float


class Retained(msgspec.Struct):
    """What a retention did, or would do at most."""

    topic: str
    dropped: int
    start_offsets: dict[str, int]
    """By bucket, the first offset that is left."""
    dry_run: bool = False


class Damage(msgspec.Struct):
    """A file that is not what was written."""

    bucket: int
    file: str
    problem: str
    start_offset: int | None = None
    end_offset: int | None = None


class LogState(msgspec.Struct):
    """The log of a bucket."""

    bucket: int
    state: str
    problem: str | None = None


class Verified(msgspec.Struct):
    """What a verification found."""

    topic: str
    ok: bool
    rows: int
    files: int
    damaged: list[Damage]
    unchecked: list[str]
    """Files that were written without a checksum."""
    logs: list[LogState]
    seconds: float


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("compact", "persisting.cli.commands.maintenance:Compacted")
def compact(topic: str, storage: str, as_json: bool) -> None:
    """Rewrite small fragments as larger ones; offsets, order and content stay.

    An owner does this by itself, beside its work. For large topics see 'persisting pipeline
    compact', which spreads it over a cluster.

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
            f"{result.fragments_before:,} fragments are {result.fragments_after:,} now "
            f"({output.seconds(result.seconds)})"
        ),
    )


@click.command()
@parameters.topic
@click.option("--rows", type=click.IntRange(1), help="Keep so many of the newest in each bucket.")
@click.option("--bytes", "nbytes", type=Size(), help="Keep so much in each bucket: 500MB, 2G.")
@click.option("--age", type=Duration(), help="Keep what arrived within: 12h, 7d.")
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("retain", "persisting.cli.commands.maintenance:Retained")
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
    """Drop the oldest records beyond a limit, by whole fragments; offsets stay.

    What a tag holds can still be read by the tag. To have an owner do this by itself, set
    retention_rows, retention_bytes or retention_seconds.

    \b
    Examples:
      persisting retain events --age 7d --dry-run
      persisting retain events --rows 1000000 --yes
    """
    if rows is None and nbytes is None and age is None:
        raise click.UsageError("Say what to keep: --rows, --bytes or --age.")
    source = topics_access.readable(topic, storage)
    plan = _plan(source, rows, nbytes, age)
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
    output.show(plan, as_json, lambda: _tell_retained(plan))


def _plan(source: TopicFolder, rows: int | None, nbytes: int | None, age: float | None) -> Retained:
    from persisting.table.retention import Limits, droppable

    limits = Limits(rows=rows, nbytes=nbytes, seconds=age)
    limits.check()
    starts = {}
    for bucket in source.buckets:
        view = source.view(bucket)
        count = droppable(view, limits)
        starts[str(bucket)] = view.start + sum(size.rows for size in view.sizes[:count])
    dropped = sum(start - source.view(int(bucket)).start for bucket, start in starts.items())
    return Retained(source.config.topic, dropped, starts, dry_run=True)


def _tell_retained(result: Retained) -> None:
    output.table(["#bucket", "#starts at"], list(result.start_offsets.items()))
    output.line(output.happens(result.dropped, "record", "dropped", dry_run=result.dry_run))


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("verify", "persisting.cli.commands.maintenance:Verified")
def verify(topic: str, storage: str, as_json: bool) -> None:
    """Compare every stored file with its checksum; check order and log. Ends with 5 on damage.

    \b
    Examples:
      persisting verify events
      persisting verify events --json | jq .damaged
    """
    from persisting.topic.inspect import log_of

    source, started = topics_access.stored(topic, storage), time.monotonic()
    topics_access.tell_of_owner(source)
    # Before a reader is opened, which brings a left-over log into the table.
    logs = [(bucket, log_of(source, bucket)) for bucket in source.buckets]
    broken = any(log.state == "damaged" for _, log in logs)

    async def work() -> dict[str, Any]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.verify()

    empty: dict[str, Any] = {"ok": False, "rows": 0, "files": 0, "damaged": [], "unchecked": []}
    found = empty if broken else topics_access.run(work())
    result = Verified(
        topic=source.config.topic,
        ok=bool(found["ok"]) and not broken,
        rows=found["rows"],
        files=found["files"],
        damaged=[_damage(one) for one in found["damaged"]],
        unchecked=found["unchecked"],
        logs=[LogState(bucket, log.state, log.problem) for bucket, log in logs],
        seconds=time.monotonic() - started,
    )
    output.show(result, as_json, lambda: _tell_verified(result))
    if not result.ok:
        raise exit_codes.Ended(exit_codes.DAMAGED)


def _damage(one: dict[str, Any]) -> Damage:
    offsets = one.get("offsets") or (None, None)
    return Damage(one["bucket"], one["file"], one["problem"], *offsets)


def _tell_verified(result: Verified) -> None:
    for one in result.damaged:
        output.line(f"damaged: bucket {one.bucket}, {one.file}: {one.problem}")
    for log in result.logs:
        if log.problem is not None:
            output.line(f"damaged: log of bucket {log.bucket}: {log.problem}")
    if result.unchecked:
        output.line(f"{output.plural(len(result.unchecked), 'file')} without a checksum")
    state = "all is well" if result.ok else "DAMAGE FOUND; see the guide 'integrity'"
    output.line(
        f"{output.plural(result.rows, 'record')} in {output.plural(result.files, 'file')}: "
        f"{state} ({output.seconds(result.seconds)})"
    )
