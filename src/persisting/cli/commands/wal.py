"""``wal inspect`` and ``wal repair``: examine and repair write-ahead logs."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import click
import msgspec

from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder
    from persisting.wal.inspection import LogReport, RepairReport, SegmentReport


class InspectedSegment(msgspec.Struct):
    """A file of the log."""

    file: str
    bytes: int
    frames: int
    first_sequence: int | None
    last_sequence: int | None
    synced: int
    """The last sequence that a frame in this file records as durable."""
    last_arrival: str | None
    broken: str | None
    """Why the rest of the file cannot be read; None if all of it can."""


class InspectedLog(msgspec.Struct):
    """The log of a bucket."""

    bucket: int
    path: str
    state: str
    """empty, whole, torn (the rest was never acknowledged) or damaged."""
    pending_frames: int
    """Frames that are not in the table yet; opening the bucket replays them."""
    table_sequence: int
    """The last sequence in the table."""
    torn_bytes: int
    owned: bool
    """Whether an owner has the log open and may be writing."""
    problem: str | None
    segments: list[InspectedSegment]


class RepairedLog(msgspec.Struct):
    """The effect of a repair on the log of a bucket, or of its dry run."""

    bucket: int
    path: str
    problem: str | None
    """The damage; None if the log is sound and needs no repair."""
    kept_frames: int
    cut_bytes: int
    lost_sequences: tuple[int, int] | None
    copies: list[str]
    dry_run: bool = False


@click.group(cls=CommandGroup)
def wal() -> None:
    """Inspect the write-ahead log and cut off damage.

    \b
    Examples:
      persisting wal inspect events
      persisting wal repair events --dry-run
    """


@wal.command()
@parameters.topic
@parameters.bucket
@parameters.storage
@parameters.as_json
@prints("wal inspect", "persisting.cli.commands.wal:InspectedLog", many=True)
def inspect(topic: str, bucket: int | None, storage: str, as_json: bool) -> None:
    """Show the log of each bucket: segments, frames, torn tails, damage.

    Changes nothing and is safe while an owner writes. Exits with 5 if a log is damaged.

    \b
    Examples:
      persisting wal inspect events
      persisting wal inspect events --bucket 0 --json
    """
    source = topics_access.find_topic(topic, storage)
    logs = [_inspected(source, number) for number in topics_access.buckets(source, bucket)]
    output.show(logs, as_json, lambda: _print_logs(logs))
    if any(log.state == "damaged" for log in logs):
        raise exit_codes.CommandExit(exit_codes.DAMAGED)


def _inspected(source: TopicFolder, bucket: int) -> InspectedLog:
    from persisting.lock import owner_of
    from persisting.topic.inspect import log_of
    from persisting.topic.spec import bucket_folder
    from persisting.wal import FOLDER

    report: LogReport = log_of(source, bucket)
    folder = bucket_folder(source.folder, bucket)
    return InspectedLog(
        bucket=bucket,
        path=str(folder / FOLDER),
        state=report.state,
        pending_frames=report.pending_frames,
        table_sequence=source.table(bucket).sequence,
        torn_bytes=report.torn_bytes,
        owned=owner_of(folder) is not None,
        problem=report.problem,
        segments=[_segment(segment) for segment in report.segments],
    )


def _segment(segment: SegmentReport) -> InspectedSegment:
    arrival = (
        None
        if segment.last_arrival is None
        else dt.datetime.fromtimestamp(segment.last_arrival / 1e6, dt.timezone.utc).isoformat()
    )
    return InspectedSegment(
        segment.file,
        segment.size,
        segment.frames,
        segment.first_sequence,
        segment.last_sequence,
        segment.synced,
        arrival,
        segment.broken,
    )


def _print_logs(logs: list[InspectedLog]) -> None:
    output.table(
        ["#bucket", "state", "#segments", "#size", "#to flush", "#flushed", "owned"],
        [
            [
                log.bucket,
                log.state,
                len(log.segments),
                output.size(sum(segment.bytes for segment in log.segments)),
                log.pending_frames,
                log.table_sequence,
                "yes" if log.owned else "no",
            ]
            for log in logs
        ],
    )
    rows = [(log.bucket, segment) for log in logs for segment in log.segments]
    if rows:
        output.table(
            ["#bucket", "segment", "#size", "#frames", "#first", "#last", "#synced", "broken"],
            [
                [
                    bucket,
                    segment.file,
                    output.size(segment.bytes),
                    segment.frames,
                    segment.first_sequence,
                    segment.last_sequence,
                    segment.synced,
                    segment.broken,
                ]
                for bucket, segment in rows
            ],
        )
    for log in logs:
        if log.problem is not None:
            output.line(f"bucket {log.bucket}: {log.problem}")


@wal.command()
@parameters.topic
@parameters.bucket
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("wal repair", "persisting.cli.commands.wal:RepairedLog", many=True)
def repair(
    topic: str, bucket: int | None, dry_run: bool, yes: bool, storage: str, as_json: bool
) -> None:
    """Cut a damaged log off where the damage begins, so that the bucket opens again.

    Use this only if no intact copy of the log exists: the queue loses the acknowledged records
    after the damage. The bytes that are cut off are kept in the folder 'trimmed' next to the log. A
    torn tail needs no repair: opening the bucket trims it.

    \b
    Examples:
      persisting wal repair events --dry-run
      persisting wal repair events --bucket 2 --yes
    """
    source = topics_access.find_topic(topic, storage)
    plans = [
        _repaired(source, number, dry_run=True) for number in topics_access.buckets(source, bucket)
    ]
    broken = [plan for plan in plans if plan.problem is not None]
    if broken and not dry_run:
        lost = ", ".join(
            f"bucket {plan.bucket}: sequences {_range(plan.lost_sequences)}" for plan in broken
        )
        topics_access.confirm(f"Cut off {lost}? The queue loses their records.", yes)
        done = {plan.bucket: _repaired(source, plan.bucket, dry_run=False) for plan in broken}
        plans = [done.get(plan.bucket, plan) for plan in plans]
    for plan in plans:
        plan.dry_run = dry_run
    output.show(plans, as_json, lambda: _print_repaired(plans))


def _repaired(source: TopicFolder, bucket: int, *, dry_run: bool) -> RepairedLog:
    from persisting import fs
    from persisting.lock import BucketLock, briefly
    from persisting.topic.spec import bucket_folder
    from persisting.wal import FOLDER
    from persisting.wal.inspection import repair as cut

    folder = bucket_folder(source.folder, bucket)
    after = source.table(bucket).sequence
    if dry_run:
        report: RepairReport = cut(folder / FOLDER, after, None)
    else:
        with briefly():
            lock = BucketLock(folder)
        try:
            report = cut(folder / FOLDER, source.table(bucket).sequence, fs.current())
        finally:
            lock.release(clean=False)
    return RepairedLog(
        bucket,
        str(folder / FOLDER),
        report.problem,
        report.kept_frames,
        report.cut_bytes if report.problem else 0,
        report.lost_sequences,
        report.copies,
        dry_run,
    )


def _print_repaired(plans: list[RepairedLog]) -> None:
    broken = [plan for plan in plans if plan.problem is not None]
    for plan in broken:
        output.line(f"bucket {plan.bucket}: {plan.problem}")
        would = "would be " if plan.dry_run else ""
        output.line(
            f"  {output.size(plan.cut_bytes)} with sequences {_range(plan.lost_sequences)} "
            f"{would}cut off; {output.plural(plan.kept_frames, 'frame')} before the damage kept"
        )
        for copy in plan.copies:
            output.line(f"  cut bytes saved as {copy}")
    if not broken:
        output.line("no log is damaged; nothing to repair")


def _range(sequences: tuple[int, int] | None) -> str:
    if sequences is None:
        return "unknown"
    first, last = sequences
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
