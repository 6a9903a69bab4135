"""``wal inspect`` and ``wal repair``."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import click
import msgspec

from persisting.cli import exit_codes, output, parameters, topics_access
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
    """The last sequence that a frame in it calls durable."""
    last_arrival: str | None
    broken: str | None
    """Why the rest of the file is not whole, if it is not."""


class InspectedLog(msgspec.Struct):
    """The log of a bucket."""

    bucket: int
    path: str
    state: str
    """empty, whole, torn (what follows was never promised) or damaged."""
    pending_frames: int
    """Frames that the table does not hold yet: opening the bucket brings them there."""
    table_sequence: int
    """The last sequence that the table holds."""
    torn_bytes: int
    owned: bool
    """Whether its owner may be writing to it just now."""
    problem: str | None
    segments: list[InspectedSegment]


class RepairedLog(msgspec.Struct):
    """What a repair did to the log of a bucket, or would do."""

    bucket: int
    path: str
    problem: str | None
    """The damage; None if there was none, and nothing is to be done."""
    kept_frames: int
    cut_bytes: int
    lost_sequences: tuple[int, int] | None
    copies: list[str]
    dry_run: bool = False


@click.group()
def wal() -> None:
    """Look into the write-ahead log, and cut off what is damaged.

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
    """Show the log of each bucket: segments, frames, what is torn or damaged.

    Changes nothing, and may be used while an owner writes. Ends with 5 on damage.

    \b
    Examples:
      persisting wal inspect events
      persisting wal inspect events --bucket 0 --json
    """
    source = topics_access.stored(topic, storage)
    found = [_inspected(source, number) for number in topics_access.buckets(source, bucket)]
    output.show(found, as_json, lambda: _tell(found))
    if any(one.state == "damaged" for one in found):
        raise exit_codes.Ended(exit_codes.DAMAGED)


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
        segments=[_segment(one) for one in report.segments],
    )


def _segment(one: SegmentReport) -> InspectedSegment:
    arrival = (
        None
        if one.last_arrival is None
        else dt.datetime.fromtimestamp(one.last_arrival / 1e6, dt.timezone.utc).isoformat()
    )
    return InspectedSegment(
        one.file,
        one.size,
        one.frames,
        one.first_sequence,
        one.last_sequence,
        one.synced,
        arrival,
        one.broken,
    )


def _tell(found: list[InspectedLog]) -> None:
    output.table(
        ["#bucket", "state", "#segments", "#size", "#to flush", "#table has", "owned"],
        [
            [
                one.bucket,
                one.state,
                len(one.segments),
                output.size(sum(segment.bytes for segment in one.segments)),
                one.pending_frames,
                one.table_sequence,
                "yes" if one.owned else "no",
            ]
            for one in found
        ],
    )
    rows = [(one.bucket, segment) for one in found for segment in one.segments]
    if rows:
        output.table(
            ["#bucket", "segment", "#size", "#frames", "#first", "#last", "#synced", "broken"],
            [
                [
                    bucket,
                    one.file,
                    output.size(one.bytes),
                    one.frames,
                    one.first_sequence,
                    one.last_sequence,
                    one.synced,
                    one.broken,
                ]
                for bucket, one in rows
            ],
        )
    for one in found:
        if one.problem is not None:
            output.line(f"bucket {one.bucket}: {one.problem}")


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

    For when no copy of the log can be had: acknowledged records behind the damage are lost to the
    queue. What is cut off is kept in the folder 'trimmed' beside the log. A torn tail needs no
    repair: opening the bucket cuts it off.

    \b
    Examples:
      persisting wal repair events --dry-run
      persisting wal repair events --bucket 2 --yes
    """
    source = topics_access.stored(topic, storage)
    plans = [
        _repaired(source, number, dry_run=True) for number in topics_access.buckets(source, bucket)
    ]
    broken = [one for one in plans if one.problem is not None]
    if broken and not dry_run:
        lost = ", ".join(
            f"bucket {one.bucket}: sequences {_range(one.lost_sequences)}" for one in broken
        )
        topics_access.confirm(f"Cut off {lost}? Their records are lost to the queue.", yes)
        done = {one.bucket: _repaired(source, one.bucket, dry_run=False) for one in broken}
        plans = [done.get(one.bucket, one) for one in plans]
    for one in plans:
        one.dry_run = dry_run
    output.show(plans, as_json, lambda: _tell_repaired(plans))


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


def _tell_repaired(plans: list[RepairedLog]) -> None:
    broken = [one for one in plans if one.problem is not None]
    for one in broken:
        output.line(f"bucket {one.bucket}: {one.problem}")
        would = "would be" if one.dry_run else "is"
        output.line(
            f"  {output.size(one.cut_bytes)} with the sequences {_range(one.lost_sequences)} "
            f"{would} cut off; {output.plural(one.kept_frames, 'frame')} before it stay"
        )
        for copy in one.copies:
            output.line(f"  kept as {copy}")
    if not broken:
        output.line("no log is damaged; nothing to do")


def _range(sequences: tuple[int, int] | None) -> str:
    if sequences is None:
        return "unknown"
    first, last = sequences
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
