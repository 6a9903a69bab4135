"""What a retention would drop. Blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder


class Retained(msgspec.Struct):
    """What a retention dropped, or in a dry run would drop at most."""

    topic: str
    dropped: int
    start_offsets: dict[str, int]
    """By bucket, the first remaining offset."""
    dry_run: bool = False


def retention_plan(
    source: TopicFolder, rows: int | None, nbytes: int | None, age: float | None
) -> Retained:
    """Return what retaining the newest records within these limits would drop at most."""
    from persisting.table.retention import Limits, droppable

    limits = Limits(rows=rows, nbytes=nbytes, seconds=age)
    limits.check()
    starts, dropped = {}, 0
    for bucket in source.buckets:
        view = source.view(bucket)
        count = droppable(view, limits)
        rows_dropped = sum(size.rows for size in view.sizes[:count])
        starts[str(bucket)] = view.start + rows_dropped
        dropped += rows_dropped
    return Retained(source.config.topic, dropped, starts, dry_run=True)
