"""Trajectories: records with the same value of a field belong to one run. Blocking."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persisting.bucket.snapshot import Snapshot
from persisting.bucket.snapshot_search import condition
from persisting.topic.scan import OFFSET, TIME, read_snapshot
from persisting.topic.topic_files import TopicFolder
from persisting.ui.matches import matching
from persisting.ui.queries import RecordHit, Run

_MAX_RUNS = 200


def newest_runs(source: TopicFolder, field: str, most: int) -> list[Run]:
    """Return the runs among the ``most`` newest records, newest first."""
    found: dict[Any, Run] = {}
    share = max(1, most // max(1, len(source.buckets)))
    for bucket in source.buckets:
        snapshot = source.snapshot(bucket)
        first = max(snapshot.start, snapshot.end - share)
        for run in _runs(bucket, snapshot, first, field):
            other = found.get(run.value)
            if other is None:
                found[run.value] = run
                continue
            other.records += run.records
            other.first_time = min(other.first_time, run.first_time)
            if run.last_time >= other.last_time:
                other.last_time, other.bucket, other.offset = run.last_time, bucket, run.offset
    newest = sorted(found.values(), key=lambda run: run.last_time, reverse=True)
    return newest[:_MAX_RUNS]


def _runs(bucket: int, snapshot: Snapshot, first: int, field: str) -> list[Run]:
    """Return the runs of one bucket from an offset on."""
    if first >= snapshot.end or field not in snapshot.schema.names:
        return []
    batches = list(read_snapshot(snapshot, bucket, first, snapshot.end, [field]))
    table = pa.Table.from_batches(batches).select([field, OFFSET, TIME])
    table = table.rename_columns(["value", "offset", "time"])
    counted = table.filter(pc.is_valid(table["value"])).group_by("value", use_threads=False)
    rows = counted.aggregate([("offset", "count"), ("offset", "max"), ("time", "min_max")])
    return [
        Run(
            row["value"],
            row["offset_count"],
            row["time_min_max"]["min"].isoformat(),
            row["time_min_max"]["max"].isoformat(),
            bucket,
            row["offset_max"],
        )
        for row in rows.to_pylist()
    ]


def records_of_run(
    source: TopicFolder, field: str, value: Any, limit: int, order: str | None = None
) -> list[RecordHit]:
    """Return the first records of a run: by arrival, or by the field ``order`` and then by arrival.

    Records of one put arrive at the same time in several buckets, so that only a field that numbers
    the steps tells their order.
    """
    hits = [
        hit
        for bucket in source.buckets
        for hit in matching(source, condition(field, value), limit, [bucket])
    ]
    hits.sort(key=lambda hit: (hit.time or "", hit.bucket, hit.offset))
    if order is not None:
        hits.sort(key=lambda hit: step_key(hit.record.get(order)))
    return hits[:limit]


def step_key(value: Any) -> tuple[int, float, str]:
    """Return a key that orders steps: numbers, then texts, then records without the field."""
    if isinstance(value, (bool, int, float)) and value == value:
        return 0, value, ""
    return (1, 0.0, value) if isinstance(value, str) else (2, 0.0, "")
