"""Where a consumer group continues after a reset. Blocking."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from persisting.actions.text_values import parse_time

if TYPE_CHECKING:
    from persisting.topic.group_admin import Span
    from persisting.topic.topic_files import TopicFolder


def reset_offsets(
    source: TopicFolder, spans: dict[int, Span], where: str, buckets: Iterable[int]
) -> dict[int, int]:
    """Return the new offset by bucket for ``earliest``, ``latest``, an offset or a time.

    An offset outside the bucket's range is moved to the nearest end. Any other text raises
    ValueError.
    """
    chosen = {bucket: spans[bucket] for bucket in buckets}
    if where == "earliest":
        return {bucket: span.start for bucket, span in chosen.items()}
    if where == "latest":
        return {bucket: span.end for bucket, span in chosen.items()}
    if where.isdecimal():
        offset = int(where)
        return {b: min(max(offset, span.start), span.end) for b, span in chosen.items()}
    since = round(parse_time(where).timestamp() * 1e6)
    return {bucket: source.snapshot(bucket).offset_at(since) for bucket in chosen}
