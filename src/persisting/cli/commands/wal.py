"""``wal inspect`` and ``wal repair``: examine and repair write-ahead logs."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.actions.text_values import format_size
from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints

if TYPE_CHECKING:
    from persisting.bucket.log_inspection import LogRepair, OwnerLogReport
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


class InspectedBucket(msgspec.Struct):
    """What a log holds of one bucket."""

    bucket: int
    noted: bool
    """Whether the bucket needs the log: its table may lack records of it."""
    table_sequence: int
    """The last sequence in the bucket's table."""
    pending_frames: int
    pending_records: int
    """Records that are not in the table yet; opening the bucket replays them."""
    first_offset: int | None
    end_offset: int | None
    """The first pending offset and the one after the last, if any are pending."""


class InspectedLog(msgspec.Struct):
    """A log: of one bucket, or one that the buckets of an owner share."""

    bucket: int | None
    """None for a log that buckets share."""
    path: str
    state: str
    """empty, whole, torn (the rest was never acknowledged), damaged or missing."""
    pending_frames: int
    """Frames that are not in the tables yet; opening the buckets replays them."""
    table_sequence: int
    """The last sequence in the table; of a shared log, the lowest of the buckets that need it."""
    torn_bytes: int
    owned: bool
    """Whether an owner has the log open and may be writing."""
    problem: str | None
    segments: list[InspectedSegment]
    owner: dict[str, Any] | None = None
    """The process that has a shared log open, or had it open last."""
    buckets: list[InspectedBucket] = []
    """The buckets with records in a shared log, or that need it."""


class LostBucket(msgspec.Struct):
    """What one bucket loses by a repair, as far as known."""

    bucket: int
    first_sequence: int
    last_sequence: int | None
    first_offset: int
    last_offset: int | None
    """None if unknown."""


class RepairedLog(msgspec.Struct):
    """The effect of a repair on a log, or of its dry run."""

    bucket: int | None
    """None for a log that buckets share."""
    path: str
    problem: str | None
    """The damage; None if the log is sound and needs no repair."""
    kept_frames: int
    cut_bytes: int
    lost_sequences: tuple[int, int] | None
    copies: list[str]
    dry_run: bool = False
    lost: list[LostBucket] = []
    """What each bucket of a shared log loses."""


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
    """Show the logs of a topic: owner, segments, frames, torn tails, damage, records to flush.

    The buckets that one process owns share a log. Changes nothing and is safe while an owner
    writes. Exits with 5 if a log is damaged or missing.

    \b
    Examples:
      persisting wal inspect events
      persisting wal inspect events --bucket 0 --json
    """
    source = topics_access.find_topic(topic, storage)
    shared, alone = _logs(source, topics_access.buckets(source, bucket))
    logs = [
        *(_inspected_shared(source, report) for report in shared),
        *(_inspected(source, number) for number in alone),
    ]
    output.show(logs, as_json, lambda: _print_logs(logs))
    if any(log.state in ("damaged", "missing") for log in logs):
        raise exit_codes.CommandExit(exit_codes.DAMAGED)


def _logs(source: TopicFolder, chosen: list[int]) -> tuple[list[OwnerLogReport], list[int]]:
    """Return the shared logs with records of the chosen buckets, and the buckets whose own log is
    to be shown: it has segments, or the bucket needs no shared log."""
    from persisting.topic.inspect import logs_of
    from persisting.topic.spec import bucket_folder
    from persisting.topic.store_files import StoreTopic
    from persisting.wal import FOLDER

    reports = logs_of(source)
    everything = set(chosen) == set(source.buckets)
    shared = [r for r in reports if everything or {b.bucket for b in r.buckets} & set(chosen)]
    if isinstance(source, StoreTopic):
        return shared, []  # no bucket has a log of its own
    noting = {bucket.bucket for report in reports for bucket in report.noting}
    alone = [
        bucket
        for bucket in chosen
        if bucket not in noting
        or any((bucket_folder(source.folder, bucket) / FOLDER).glob("*.wal"))
    ]
    return shared, alone


def _inspected_shared(source: TopicFolder, report: OwnerLogReport) -> InspectedLog:
    from persisting.topic.inspect import place_of_log

    return InspectedLog(
        bucket=None,
        path=place_of_log(source, report),
        state=report.state,
        pending_frames=report.pending_frames,
        table_sequence=min((bucket.table_sequence for bucket in report.noting), default=0),
        torn_bytes=report.torn_bytes,
        owned=report.owned,
        problem=report.problem,
        segments=[_segment(segment) for segment in report.segments],
        owner=report.owner,
        buckets=[
            InspectedBucket(
                part.bucket,
                part.noted,
                part.table_sequence,
                part.pending_frames,
                part.pending_records,
                part.first_offset,
                part.end_offset,
            )
            for part in report.buckets
        ],
    )


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
        ["log", "state", "#segments", "#size", "#to flush", "#flushed", "owned"],
        [
            [
                _name(log),
                log.state,
                len(log.segments),
                format_size(sum(segment.bytes for segment in log.segments)),
                log.pending_frames,
                log.table_sequence,
                _owner(log),
            ]
            for log in logs
        ],
    )
    parts = [(log, part) for log in logs for part in log.buckets]
    if parts:
        output.table(
            ["log", "#bucket", "#to flush", "#records", "#from", "#to", "#flushed", "needed"],
            [
                [
                    _name(log),
                    part.bucket,
                    part.pending_frames,
                    part.pending_records,
                    part.first_offset,
                    part.end_offset,
                    part.table_sequence,
                    "yes" if part.noted else "no",
                ]
                for log, part in parts
            ],
        )
    rows = [(log, segment) for log in logs for segment in log.segments]
    if rows:
        output.table(
            ["log", "segment", "#size", "#frames", "#first", "#last", "#synced", "broken"],
            [
                [
                    _name(log),
                    segment.file,
                    format_size(segment.bytes),
                    segment.frames,
                    segment.first_sequence,
                    segment.last_sequence,
                    segment.synced,
                    segment.broken,
                ]
                for log, segment in rows
            ],
        )
    for log in logs:
        if log.problem is not None:
            output.line(f"{_name(log)}: {log.problem}")


def _name(log: InspectedLog | RepairedLog) -> str:
    """Return a short name of a log: its bucket, or the end of its folder's name."""
    return f"bucket {log.bucket}" if log.bucket is not None else f"log …{log.path[-8:]}"


def _owner(log: InspectedLog) -> str:
    if log.bucket is not None or not log.owner:
        return "yes" if log.owned else "no"
    process = f"pid {log.owner.get('pid', '?')}"
    return process if log.owned else f"no ({process} ended)"


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
    """Cut a damaged log off where the damage begins, so that its buckets open again.

    Use this only if no intact copy of the log exists: the queue loses the acknowledged records
    after the damage, of all buckets that share the log. The bytes that are cut off are kept in a
    folder 'trimmed' next to the log. A log that is missing is given up. A torn tail needs no
    repair: opening the bucket skips it.

    \b
    Examples:
      persisting wal repair events --dry-run
      persisting wal repair events --bucket 2 --yes
    """
    from persisting.bucket.log_inspection import plan_repair

    source = topics_access.find_topic(topic, storage)
    shared, alone = _logs(source, topics_access.buckets(source, bucket))
    plans = [
        *(_repaired_shared(source, plan_repair(report), dry_run=True) for report in shared),
        *(_repaired(source, number, dry_run=True) for number in alone),
    ]
    broken = [plan for plan in plans if plan.problem is not None]
    if broken and not dry_run:
        topics_access.confirm(_question(broken), yes)
        done = {plan.path: _repair_now(source, plan) for plan in broken}
        plans = [done.get(plan.path, plan) for plan in plans]
    for plan in plans:
        plan.dry_run = dry_run
    output.show(plans, as_json, lambda: _print_repaired(plans))


def _question(broken: list[RepairedLog]) -> str:
    lost = []
    for plan in broken:
        if plan.bucket is not None:
            lost.append(f"bucket {plan.bucket}: sequences {_range(plan.lost_sequences)}")
        lost += [
            f"bucket {part.bucket}: records from offset {part.first_offset:,} on"
            for part in plan.lost
        ]
    if not lost:
        return "Remove the damaged parts? The tables hold all their records."
    return f"Cut off {', '.join(lost)}? The queue loses their records."


def _repair_now(source: TopicFolder, plan: RepairedLog) -> RepairedLog:
    if plan.bucket is not None:
        return _repaired(source, plan.bucket, dry_run=False)
    return _repair_shared(source, plan)


def _repair_shared(source: TopicFolder, plan: RepairedLog) -> RepairedLog:
    """Repair a shared log, which no process may have open."""
    from persisting import fs
    from persisting.bucket.log_inspection import exclusive, inspect_log, repair
    from persisting.lock import BucketLock, briefly
    from persisting.topic.ownership import recover
    from persisting.topic.spec import bucket_folder

    folder = Path(plan.path)
    if folder.is_dir():
        with exclusive(folder):
            pass  # before any change: its owner must not be alive

    def inspected() -> OwnerLogReport | None:
        return inspect_log(
            folder, list(source.buckets), lambda b: source.table(b).sequence, fs.current()
        )

    before = inspected()
    noting = [] if before is None else before.noting
    for part in noting:
        if part.lost is None:  # it can be opened as the log is, and then loses nothing
            recover(source.folder, source.config, part.bucket)
    locks = []
    try:
        for part in noting:
            with briefly():
                locks.append(BucketLock(bucket_folder(source.folder, part.bucket)))
        report = inspected()
        if report is None:
            return plan
        return _repaired_shared(source, repair(report, fs.current()), dry_run=False)
    finally:
        for lock in locks:
            lock.release(clean=False)


def _repaired_shared(source: TopicFolder, done: LogRepair, *, dry_run: bool) -> RepairedLog:
    lost = []
    for part in done.lost:
        assert part.lost is not None
        first = part.lost.first_offset
        lost.append(
            LostBucket(
                part.bucket,
                part.lost.first_sequence,
                part.lost.last_sequence,
                source.view(part.bucket).end if first is None else first,
                part.lost.last_offset,
            )
        )
    sequences = [(part.first_sequence, part.last_sequence or part.first_sequence) for part in lost]
    return RepairedLog(
        None,
        str(done.report.folder),
        done.report.damage,
        done.report.pending_frames if done.report.intact_from is None else 0,
        done.cut_bytes,
        (min(first for first, _ in sequences), max(last for _, last in sequences))
        if sequences
        else None,
        [str(copy) for copy in done.copies],
        dry_run,
        lost,
    )


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
        output.line(f"{_name(plan)}: {plan.problem}")
        would = "would be " if plan.dry_run else ""
        sequences = f" with sequences {_range(plan.lost_sequences)}" if plan.lost_sequences else ""
        output.line(
            f"  {format_size(plan.cut_bytes)}{sequences} {would}cut off; "
            f"{output.plural(plan.kept_frames, 'frame')} before the damage kept"
        )
        for part in plan.lost:
            last = "unknown" if part.last_offset is None else f"at least {part.last_offset:,}"
            output.line(
                f"  bucket {part.bucket} {'would lose' if plan.dry_run else 'loses'} the records "
                f"from offset {part.first_offset:,} on; last offset: {last}"
            )
        if plan.bucket is None and not plan.lost:
            output.line("  no bucket loses a record: the tables hold them")
        for copy in plan.copies:
            output.line(f"  cut bytes saved as {copy}")
    if not broken:
        output.line("no log is damaged; nothing to repair")


def _range(sequences: tuple[int, int] | None) -> str:
    if sequences is None:
        return "unknown"
    first, last = sequences
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
