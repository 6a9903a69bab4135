"""Topics that stay open in the processes with which Spark plans, from one query to the next.

Such a process plans one query at a time, and ends when it was idle for a minute. Its tables follow
the newest version, as those of any reader do: a manifest that is not the same file as before is
loaded again.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from persisting.spark.worker_exit import is_planner
from persisting.store_address import StoreAddress
from persisting.topic.topic_files import TopicFolder, open_stored

_MOST_TABLES = 16
_CACHE_BYTES = 8 * 1024 * 1024
"""What Lance may keep in memory of the indexes of a table, and as much of its metadata."""

_kept: OrderedDict[Path, TopicFolder] = OrderedDict()


def open_topic(place: Path | StoreAddress) -> TopicFolder:
    """Like :func:`open_stored`, but where Spark plans, the tables may still be open."""
    if isinstance(place, StoreAddress) or not is_planner():
        return open_stored(place)
    topic = TopicFolder.open(place, cache_bytes=_CACHE_BYTES)
    kept = _kept.pop(place, None)
    if kept is not None and kept.config == topic.config and kept.has_its_tables():
        topic = kept
    _kept[place] = topic
    while sum(len(other.buckets) for other in _kept.values()) > _MOST_TABLES:
        _kept.popitem(last=False)
    return topic
