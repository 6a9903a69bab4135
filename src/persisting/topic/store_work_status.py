"""The numbers of work groups in an object store: ``groups/<group>/work/status.json``. Blocking."""

from __future__ import annotations

import threading

import msgspec

from persisting.bucket.group_offsets import WORK_FOLDER
from persisting.bucket.store_groups import GROUPS, keeper_register
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore
from persisting.store.register import Held, Register
from persisting.topic.work_status import WorkStatus
from persisting.wal.lease import lease_register

_FORMAT = 1


class StoredStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object."""

    status: WorkStatus
    format: int = _FORMAT


def _status_register(store: ObjectStore, group: str) -> Register[StoredStatus]:
    key = f"{GROUPS}/{group}/{WORK_FOLDER}/status.json"
    return Register(store, key, StoredStatus, _FORMAT)


class StatusWriter:
    """Notes the numbers of a group that this process keeps, if they have changed."""

    def __init__(self, store: ObjectStore, group: str) -> None:
        self._register = _status_register(store, group)
        self._held: Held[StoredStatus] | None = None
        self._guard = threading.Lock()

    def write(self, status: WorkStatus) -> None:
        with self._guard:
            last = None if self._held is None else self._held.content.status
            if last is not None and msgspec.structs.replace(status, time=last.time) == last:
                return
            content = StoredStatus(status=status)
            if self._held is None:
                self._held = self._register.read()
            try:
                self._held = self._swapped(content)
            except (ObjectExists, ObjectChanged) as exc:  # written by the keeper before
                self._held = None if exc.found is None else self._register.decode(exc.found)

    def _swapped(self, content: StoredStatus) -> Held[StoredStatus]:
        if self._held is None:
            return self._register.create(content)
        return self._register.swap(self._held, content)


def read_status(store: ObjectStore, group: str) -> WorkStatus:
    """Return the numbers of a work group that were noted last."""
    held = _status_register(store, group).read()
    status = WorkStatus(time=0.0) if held is None else held.content.status
    status.kept = _is_kept(store, group)
    return status


def _is_kept(store: ObjectStore, group: str) -> bool:
    """Whether a process keeps the group, or has died while it did: its lease does not tell."""
    keeper = keeper_register(store, group).read()
    if keeper is None or not keeper.content.owner:
        return False
    lease = lease_register(store, keeper.content.owner).read()
    return lease is not None and not lease.content.taken_by
