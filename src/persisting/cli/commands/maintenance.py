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
    """The result of a compaction."""

    topic: str
    fragments_before: int
    fragments_after: int
    versions_removed: int
    seconds: float


class Retained(msgspec.Struct):
    """What a retention dropped, or in a dry run would drop at most."""

    topic: str
    dropped: int
    start_offsets: dict[str, int]
    """By bucket, the first remaining offset."""
    dry_run: bool = False


class Damage(msgspec.Struct):
    """A file that differs from what was written."""

    bucket: int
    file: str
    problem: str
    start_offset: int | None = None
    end_offset: int | None = None


class LogState(msgspec.Struct):
    """The state of a log: of one bucket, or one that buckets share."""

    bucket: int | None
    """None for a log that buckets share."""
    state: str
    """empty, whole, torn, damaged, missing, or unused: nothing needs it any more."""
    problem: str | None = None
    path: str | None = None
    buckets: list[int] = []
    """The buckets that need it."""


class Verified(msgspec.Struct):
    """The result of a verification."""

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
    output.show(plan, as_json, lambda: _print_retained(plan))


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


def _print_retained(result: Retained) -> None:
    output.table(["#bucket", "#starts at"], list(result.start_offsets.items()))
    output.line(output.outcome(result.dropped, "record", "dropped", dry_run=result.dry_run))


@click.command()
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("verify", "persisting.cli.commands.maintenance:Verified")
def verify(topic: str, storage: str, as_json: bool) -> None:
    """Compare every stored file with its checksum, check order and logs; exit with 5 on damage.

    \b
    Examples:
      persisting verify events
      persisting verify events --json | jq .damaged
    """
    source, started = topics_access.find_topic(topic, storage), time.monotonic()
    topics_access.note_unflushed(source)
    # Before a reader is opened: opening replays a log that a crashed owner left.
    logs = _log_states(source)
    log_damaged = any(log.state in ("damaged", "missing") for log in logs)

    async def work() -> dict[str, Any]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.verify()

    unverified: dict[str, Any] = {
        "ok": False,
        "rows": 0,
        "files": 0,
        "damaged": [],
        "unchecked": [],
    }
    report = unverified if log_damaged else topics_access.run(work())
    result = Verified(
        topic=source.config.topic,
        ok=bool(report["ok"]) and not log_damaged,
        rows=report["rows"],
        files=report["files"],
        damaged=[_damage(file) for file in report["damaged"]],
        unchecked=report["unchecked"],
        logs=logs,
        seconds=time.monotonic() - started,
    )
    output.show(result, as_json, lambda: _print_verified(result))
    if not result.ok:
        raise exit_codes.CommandExit(exit_codes.DAMAGED)


def _log_states(source: TopicFolder) -> list[LogState]:
    """Return the shared logs of a topic, and the logs of buckets that need none of them."""
    from persisting.topic.inspect import log_of, logs_of
    from persisting.topic.spec import bucket_folder
    from persisting.wal import FOLDER

    states, sharing = [], set()
    for shared in logs_of(source):
        buckets = [bucket.bucket for bucket in shared.noting]
        sharing |= set(buckets)
        used = shared.owned or bool(buckets)
        problem = shared.problem if used else None
        state = shared.state if used else "unused"
        states.append(LogState(None, state, problem, str(shared.folder), buckets))
    for bucket in source.buckets:
        log = log_of(source, bucket)
        if bucket not in sharing or log.state != "empty":
            path = bucket_folder(source.folder, bucket) / FOLDER
            states.append(LogState(bucket, log.state, log.problem, str(path), [bucket]))
    return states


def _damage(file: dict[str, Any]) -> Damage:
    offsets = file.get("offsets") or (None, None)
    return Damage(file["bucket"], file["file"], file["problem"], *offsets)


def _print_verified(result: Verified) -> None:
    for damage in result.damaged:
        output.line(f"damaged: bucket {damage.bucket}, {damage.file}: {damage.problem}")
    for log in result.logs:
        if log.state == "unused":
            output.line(f"not needed any more, the next owner removes it: {log.path}")
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
