"""Maintenance of a bucket in an object store.

The steps are those of a bucket in a folder; each commit is under the owner's fence. What differs is
where the requested indexes and the groups' offsets are stored, and when old versions are removed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from persisting.bucket import store_groups
from persisting.bucket.group_offsets import Hold
from persisting.bucket.maintenance import Maintenance
from persisting.bucket.store_notes import StoreNotes
from persisting.errors import StorageError
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore
from persisting.store.register import Held, Register
from persisting.table import files, indexes, versions
from persisting.table.indexes import IndexSpec
from persisting.table.versions import Version

_FORMAT = 1
_NEVER = -1


class IndexList(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``bucket_<i>/indexes.json``."""

    indexes: list[IndexSpec] = []
    format: int = _FORMAT


def index_register(store: ObjectStore, bucket: int) -> Register[IndexList]:
    """``store`` is that of the topic."""
    return Register(store, f"bucket_{bucket}/{indexes.FILE}", IndexList, _FORMAT)


class StoreMaintenance(Maintenance):
    """Maintains the table of one bucket in an object store."""

    def __init__(self, store: ObjectStore, notes: StoreNotes | None, *given: Any) -> None:
        """``store`` is that of the topic, ``notes`` those of hand-overs to the bucket, if it takes
        any; ``given`` are the arguments of :class:`Maintenance`."""
        super().__init__(*given)
        self._store, self._notes = store, notes
        self._register = index_register(store, self._options.bucket_id)
        self._held: Held[IndexList] | None = None
        """The requested indexes, as they were read or written last."""
        self._cleaned_version = _NEVER

    def _load_index_specs(self) -> list[IndexSpec]:
        self._held = self._register.read()
        return [] if self._held is None else list(self._held.content.indexes)

    def _store_index_specs(self, specs: list[IndexSpec]) -> None:
        """Replace what this process has read or written last. Call with the table's lock.

        Raises :class:`OwnershipLost` if the next owner has replaced it.
        """
        content = IndexList(indexes=specs)
        while True:
            try:
                if self._held is None:
                    self._held = self._register.create(content)
                else:
                    self._held = self._register.swap(self._held, content)
                return
            except (ObjectExists, ObjectChanged) as exc:
                self._table.committer.checkpoint()  # raises if another process has taken over
                self._held = None if exc.found is None else self._register.decode(exc.found)

    def _group_holds(self, restored: list[int]) -> list[Hold]:
        return store_groups.holds(
            self._store,
            self._options.bucket_id,
            restored,
            consumers="groups" in self._options.retention_waits_for,
            workers=not self._options.retention_drops_unacknowledged,
        )

    def _bucket_needs_files(self) -> bool:
        """Whether cleaning would remove files that are handed over, decided and not adopted: it
        removes what no version names once it is 7 days old."""
        return self._notes is not None and self._notes.has_decided

    @property
    def _cleaning_due(self) -> bool:
        """The age of a version counts back from the newest one, so without a new version there is
        nothing more to remove, and an idle bucket costs no request."""
        return super()._cleaning_due and self._table.view.version != self._cleaned_version

    def _clean(self) -> int:
        if self._bucket_needs_files():
            return 0
        due = self._cleaning_due
        removed = super()._clean()
        if due:
            if self._notes is not None:
                # A process that died before it notified an owner may have left notes.
                self._notes.look()
            self._cleaned_version = self._table.view.version
        return removed

    def _sweep(self) -> None:
        """``remove_versions`` removes the files of failed writes after a week."""

    def remove_files(self, names: Collection[str], *, never_named: bool = False) -> None:
        """Remove objects that no version names. Reading all versions takes many requests, so
        objects that a commit may have named are left: cleaning removes them after 7 days."""
        if names and never_named:
            with self._exclusive_table() as view:
                if set(names).isdisjoint(files.data_paths(view.fragments)):
                    self._table.bulk_files.remove(names)

    def restore(self, version: Version, token: str | None = None) -> dict[str, Any]:
        """As in a folder, but not to a version that may be about to be removed.

        A former owner that was paused while it removed old versions continues when it resumes. It
        removes only versions that were too old then, which are too old now.
        """
        keep = self._options.keep_versions
        dataset = self._table.view.dataset
        if keep is not None and dataset is not None:
            number = versions.resolve(dataset, version)
            if number in self._table.committer.outdated(keep):
                raise StorageError(
                    f"version {number} of {self._options.storage_path} is older than "
                    f"keep_versions ({keep:g} s) and may be removed at any time; restore a newer "
                    "one, or one that has a tag"
                )
        return super().restore(version, token)
