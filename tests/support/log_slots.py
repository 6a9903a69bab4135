"""The slots of a log in an object store."""

from __future__ import annotations

from persisting.store.object_store import ObjectStore
from persisting.wal.object_log import ObjectLog
from persisting.wal.slots import slots_prefix


def slots_of(store: ObjectStore, log: ObjectLog) -> list[int]:
    """Return the numbers of the slots that a log has."""
    return [int(key.rpartition("/")[2]) for key in store.list(slots_prefix(log.name))]
