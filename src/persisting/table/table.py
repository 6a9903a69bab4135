"""The Lance table of one bucket.

:class:`Table` owns the open table and composes its parts: :mod:`repair` opens it,
:class:`~persisting.table.commit.Committer` makes new versions durable, :mod:`schema_change` changes
its columns. Plain blocking code without a lock: the caller lets one writer at a time in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from persisting.fs import FileSystem
from persisting.records import EMPTY
from persisting.table import files, layout, properties, repair, schema_change
from persisting.table.bulk_files import BulkFiles
from persisting.table.commit import Batch, Committer, view_of
from persisting.table.lance_errors import translated
from persisting.table.properties import SEQUENCE, Restored
from persisting.table.versions import NOTHING
from persisting.table.view import TableView

log = logging.getLogger("persisting")

FOLDER = "data.lance"


class NewerVersion(NamedTuple):
    """A version that was loaded for reading, and is not shown yet."""

    manifest: files.Manifest
    dataset: Any
    properties: dict[str, str]


class Table:
    """The table in ``folder``; the first append creates it."""

    def __init__(
        self,
        folder: Path,
        fs: FileSystem,
        *,
        compression: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """``cache_bytes``: for a reader that stays open for a long time, how many bytes of indexes
        Lance keeps in memory, and as many of metadata; None for its own limits."""
        self.root = folder / FOLDER
        self.committer = Committer(self.root, fs)
        self._compression, self._defaults = compression, defaults or {}
        self._cache_bytes = cache_bytes
        self._plain_lists = False
        """Whether lists are stored without the compression, see :meth:`_leave_lists_plain`."""
        self._version_found = 0
        """The newest version on disk when opening began."""
        self._followed = self._synced = files.NO_MANIFEST
        """The manifest that a reader has loaded last."""

    @property
    def fs(self) -> FileSystem:
        return self.committer.fs

    @property
    def view(self) -> TableView:
        """The newest version."""
        return self.committer.view

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the newest version."""
        return self.committer.properties

    @property
    def sequence(self) -> int:
        """The last log sequence whose records the table holds."""
        return self.committer.sequence

    @property
    def restores(self) -> list[Restored]:
        """The restores of the table to older versions so far, oldest first."""
        return properties.restores_of(self.properties)

    @property
    def bulk_files(self) -> BulkFiles:
        """The data files that other processes write for the owner to commit."""
        return BulkFiles(self.root, self.fs)

    def physical(self, schema: pa.Schema) -> pa.Schema:
        """The columns that records of ``schema`` are stored in."""
        return layout.physical_schema(schema, self._compression, plain_lists=self._plain_lists)

    # Opening

    def open(self, *, left_clean: bool) -> None:
        """Open for writing: find the newest whole version, repair the rest, make it durable.

        ``left_clean``: the last owner closed the bucket, so everything is already synced.
        """
        fs, committer = self.fs, self.committer
        files.finish_cleaning(fs, self.root)
        if not left_clean:
            repair.remove_drafts(self.root, fs)
        version = self._version_found = files.newest_version(self.root)
        dataset = (
            repair.load_newest(self.root, fs, version, left_clean=left_clean) if version else None
        )
        if dataset is None:
            return
        self._adopt(dataset)
        if not left_clean:
            repair.sync_all(self.root, fs, dataset)
        schema_change.finish(committer)
        if not left_clean:
            committer.drop_untrusted_indexes()

    def refresh(self) -> None:
        """Open, or reopen, for reading only: follow the newest version."""
        newer = self.load_newer()
        if newer is not None:
            self.follow(newer)

    @property
    def is_behind(self) -> bool:
        """Whether there is another version than the one that a reader follows."""
        return files.newest_manifest(self.root) not in (files.NO_MANIFEST, self._followed)

    def load_newer(self) -> NewerVersion | None:
        """Load the newest version for :meth:`follow`, None if that is the one already followed.

        Changes nothing, so it needs no lock. Manifests are compared, not only their versions: the
        owner may roll back a version that it could not make durable and commit another one with the
        same number. It may do so, or clean the version up, just before it is loaded. So a version
        that cannot be loaded is looked for a second time.
        """
        failed = files.NO_MANIFEST
        while (newest := files.newest_manifest(self.root)) not in (
            files.NO_MANIFEST,
            self._followed,
        ):
            try:
                dataset = repair.load(self.root, newest.version, self._cache_bytes)
                return NewerVersion(newest, dataset, properties.read(dataset))
            except repair.TornVersion:
                if newest == failed:
                    raise
                failed = newest
        return None

    def is_newest(self, newer: NewerVersion) -> bool:
        """Whether a version that was loaded is still the newest, and is not followed yet."""
        return newer.manifest != self._followed and newer.manifest == files.newest_manifest(
            self.root
        )

    def follow(self, newer: NewerVersion) -> None:
        """Show a version that was loaded."""
        self._followed = newer.manifest
        self.committer.properties = newer.properties
        self.committer.adopt(newer.dataset)

    def sync_followed(self) -> bool:
        """Make the version that a reader follows durable: other processes see a version before its
        owner has synced it. Return False if it is no longer there."""
        manifest, fs = self._followed, self.fs
        if manifest in (files.NO_MANIFEST, self._synced):
            return True
        with translated("sync", self.root):
            try:
                files.sync_version(fs, self.root, manifest.version)
                if manifest.version == 1:
                    files.sync_root(fs, self.root)
                found = files.manifest_at(self.root, manifest.version)
            except FileNotFoundError:
                return False  # cleaned up, or rolled back
        if found != manifest:
            return False  # another version was committed in its place
        self._synced = manifest
        return True

    def _adopt(self, dataset: Any) -> None:
        self.committer.properties = properties.read(dataset)
        self.committer.adopt(dataset)

    @property
    def touched(self) -> bool:
        """Whether anything was written since opening began."""
        return self.committer.undo_pending or (
            files.newest_version(self.root) != self._version_found
        )

    def at(self, version: int) -> TableView:
        """The view of an older version."""
        if version == NOTHING:
            return TableView(None, EMPTY)
        dataset = repair.load(self.root, version)
        return view_of(dataset, self.root, properties.start_of(properties.read(dataset)))

    def signature(self) -> dict[str, Any]:
        """The newest version and the checksum of its manifest, for the next owner."""
        if self.view.dataset is None:
            return {}
        return repair.signature(self.root, self.view.version)

    def check_signature(self, left: Mapping[str, Any]) -> None:
        """Raise if the newest manifest is not the one that the last owner left."""
        self._version_found = files.newest_version(self.root)
        repair.check_signature(self.root, left)

    # Writing

    def append(
        self,
        batches: Iterable[Batch],
        schema: pa.Schema,
        sequence: int,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Commit batches, the log sequence and the properties ``beside`` them, in one version.

        Either everything is durable when this returns, or it raises and the table is as it was.
        """
        self.committer.complete_undo()
        batches = list(batches)
        with translated("write to", self.root):
            if not self.committer.is_bare:
                self.evolve(schema)
            try:
                transaction = self.committer.write(batches, self.physical(schema))
            except Exception as exc:
                if "Mini-block cannot encode" not in str(exc) or self._plain_lists:
                    raise
                self._leave_lists_plain()
                transaction = self.committer.write(batches, self.physical(schema))
            changed = {SEQUENCE: str(sequence), **(beside or {})}
            self.committer.append(transaction, schema, changed)

    def create(self, schema: pa.Schema, beside: Mapping[str, str] | None = None) -> None:
        """Create the table, without rows, for records of ``schema``, with the properties
        ``beside``; if it exists, evolve it."""
        if self.view.dataset is not None:
            self.evolve(schema)
            return
        with translated("create", self.root):
            self.committer.create(self.physical(schema), beside or {})

    def evolve(self, schema: pa.Schema) -> None:
        """Bring the columns to a changed schema of the records."""
        schema_change.evolve(self.committer, schema, self.physical(schema), self._defaults)

    def set_compression(self) -> None:
        """Have later writes use the ``compression`` option; earlier ones may have used another."""
        schema_change.set_encodings(self.committer, self.physical(self.view.schema))

    def _leave_lists_plain(self) -> None:
        """Store lists without compression from now on: Lance's compressed layout holds only some
        32,000 nested values in a row."""
        log.warning(
            "table %s: a row holds a list too long for Lance's compressed layout; lists are stored "
            "without %s from here on",
            self.root,
            self._compression,
        )
        self._plain_lists = True
        self.set_compression()
