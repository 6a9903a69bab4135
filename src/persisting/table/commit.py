"""Commits versions of a table, each durable before it counts.

The order is always the same: write the data files, sync them, commit, check and sync the
transaction and the manifest. Only then does :attr:`Committer.view` show the new version, and the
``newest`` note name it. A version that was committed and cannot be made durable is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.fs import FileSystem
from persisting.records import EMPTY
from persisting.table import checksums, files, layout, properties, repair, versions
from persisting.table.compaction import Run
from persisting.table.lance_errors import indices_of, translated
from persisting.table.properties import RESTORES, SEQUENCE, START
from persisting.table.view import TableView, sizes_of

Batch = tuple[pa.RecordBatch, pa.Array]
"""Records, and the arrival time of each."""


class Committer:
    """The newest version of the table in ``root``, and the only way to commit another.

    Not thread-safe: the caller holds the table.
    """

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self.root, self.fs = root, fs
        self.view = TableView(None, EMPTY)
        self.properties: dict[str, str] = {}
        """The properties of the newest version."""
        self.checksums_recorded = True
        """Whether the checksums of all files in use are recorded."""
        self.undo_pending = False
        """Whether versions above the view are still to be rolled back."""

    @property
    def sequence(self) -> int:
        """The last log sequence whose records the table holds."""
        return int(self.properties.get(SEQUENCE, 0))

    def adopt(self, dataset: Any) -> None:
        """Make the version of ``dataset`` the view, with the properties as they are."""
        self.view = view_of(dataset, self.root, properties.start_of(self.properties))

    def fresh_handle(self) -> Any:
        """A handle to commit with: Lance changes it in place, and readers share the view's."""
        import lance

        return lance.dataset(str(self.root))

    # Appending

    @property
    def is_bare(self) -> bool:
        """Whether the first append is still to come, which gives the table its columns, too."""
        return self.view.dataset is None

    def write(self, batches: Iterable[Batch], physical: pa.Schema) -> Any:
        """Write and sync data files; return the transaction to :meth:`append`.

        If this fails, the files it wrote are removed.
        """
        before = files.data_on_disk(self.root)
        try:
            return self._write(batches, physical)
        except BaseException:
            files.remove_new_data(self.fs, self.root, before)
            raise

    def _write(self, batches: Iterable[Batch], physical: pa.Schema) -> Any:
        import lance

        write_fragments = lance.fragment.write_fragments
        rows = (layout.to_physical(batch, arrival, physical) for batch, arrival in batches)
        reader = pa.RecordBatchReader.from_batches(physical, rows)
        dataset = self.view.dataset
        if dataset is None:
            self.fs.make_folder(self.root)
            transaction = write_fragments(
                reader,
                str(self.root),
                mode="create",
                return_transaction=True,
                enable_stable_row_ids=True,
            )
        else:
            transaction = write_fragments(reader, dataset, mode="append", return_transaction=True)
        operation: Any = transaction.operation
        operation.fragments = checksums.signed_metadata(self.fs, self.root, operation.fragments)
        files.sync_data(self.fs, self.root, files.data_paths(operation.fragments))
        if dataset is None:
            files.sync_root(self.fs, self.root)
        return transaction

    def append(self, transaction: Any, schema: pa.Schema, changed: Mapping[str, str]) -> None:
        """Commit what :meth:`write` wrote, with ``changed`` properties beside it."""
        lasting = {k: v for k, v in self.properties.items() if k in (START, RESTORES)}
        kept = {**lasting, **changed}
        transaction.transaction_properties = properties.sealed(kept)
        dataset = self._commit_durably(transaction)
        sizes = self.view.sizes + sizes_of(transaction.operation.fragments)
        self.view = TableView(dataset, schema, sizes, self.view.start)
        repair.note_newest(self.root, self.fs, self.view.version)
        self.properties = kept

    def create(self, physical: pa.Schema, beside: Mapping[str, str]) -> None:
        """Commit the first version, of a table without rows, with properties ``beside``."""
        import lance

        first = {SEQUENCE: "0", **beside}
        transaction = lance.Transaction(
            0,
            lance.LanceOperation.Overwrite(physical, []),
            transaction_properties=properties.sealed(first),
        )
        self.fs.make_folder(self.root / files.DATA)
        dataset = self._commit_durably(transaction)
        self.properties = first
        self.adopt(dataset)

    def _commit_durably(self, transaction: Any) -> Any:
        dataset = self._commit(transaction)
        with self._undone_on_failure():
            self._sync_commit(dataset.version, transaction.uuid)
        return dataset

    def _commit(self, transaction: Any) -> Any:
        import lance

        target = self.view.dataset if self.view.dataset is not None else str(self.root)
        try:
            return lance.LanceDataset.commit(target, transaction, enable_stable_row_ids=True)
        except Exception:
            committed = self._version_of(transaction.uuid)
            if committed is None:
                raise
            return committed

    def _version_of(self, uuid: str) -> Any | None:
        """The version that a transaction made, if its commit raised after it had succeeded."""
        version = files.newest_version(self.root)
        if version <= self.view.version:
            return None
        dataset = repair.load(self.root, version)
        return dataset if dataset.read_transaction(version).uuid == uuid else None

    def _sync_commit(self, version: int, uuid: str | None = None) -> None:
        files.check_whole(files.manifest_path(self.root, version))
        files.sync_version(self.fs, self.root, version, uuid)
        if version == 1:
            files.sync_root(self.fs, self.root)
        # A version counts only if it can be read back, with its transaction.
        properties.own(repair.load(self.root, version), version)

    # Other changes

    def change(self, action: str, work: Callable[[Any], None], *, several: bool = False) -> None:
        """Have ``work`` commit to a fresh handle of the newest version; then make that durable.

        ``several``: Lance may commit more than one version in ``work``.
        """
        self.complete_undo()
        with translated(action, self.root):
            dataset = self.fresh_handle()
            if several:
                files.announce_change(self.fs, self.root, self.view.version)
            before = files.data_on_disk(self.root)
            try:
                with self._undone_on_failure():
                    work(dataset)
                self.publish(dataset)
            except BaseException:
                if not self.undo_pending:  # else a version still names the new files
                    files.remove_new_data(self.fs, self.root, before)
                    files.change_done(self.fs, self.root)
                raise
            if several:
                files.change_done(self.fs, self.root)

    def commit(
        self,
        action: str,
        operation: Any,
        changed: Mapping[str, str],
        *,
        keep_properties: bool = True,
    ) -> None:
        """Commit an operation of Lance together with our properties, some of them ``changed``.

        Without ``keep_properties`` the version has only the ``changed`` ones.
        """
        import lance

        before = self.properties
        kept = {**(before if keep_properties else {}), SEQUENCE: str(self.sequence), **changed}

        def work(dataset: Any) -> None:
            transaction = lance.Transaction(
                dataset.version, operation, transaction_properties=properties.sealed(kept)
            )
            committed = lance.LanceDataset.commit(dataset, transaction)
            dataset.checkout_latest()
            if dataset.version != committed.version:
                raise OSError("another writer has committed; is the bucket open twice?")
            self.properties = kept

        try:
            self.change(action, work)
        except BaseException:
            self.properties = before
            raise

    def settle(self) -> bool:
        """Find out what a commit that failed has done; return whether the view may show it.

        Never here: a version that was not made durable is rolled back.
        """
        return False

    def publish(self, dataset: Any) -> None:
        """Sync what one or more commits of Lance wrote, and make the result the view."""
        with self._undone_on_failure():
            self._sync_new_files(dataset)
            for version in range(self.view.version + 1, dataset.version + 1):
                if files.manifest_path(self.root, version).exists():
                    self._sync_commit(version)
            self.adopt(dataset.checkout_version(dataset.version))
        repair.note_newest(self.root, self.fs, self.view.version)

    def _sync_new_files(self, dataset: Any) -> None:
        known = self._data_in_use()
        new = {
            file.path: file.file_size_bytes
            for fragment in dataset.get_fragments()
            for file in fragment.metadata.files
            if file.path not in known
        }
        for name, size in new.items():
            files.check_whole(self.root / files.DATA / name, size)
        files.sync_data(self.fs, self.root, new)
        indices = _index_ids(dataset) - _index_ids(self.view.dataset)
        files.check_indices(self.root, indices)
        files.sync_indices(self.fs, self.root, indices)

    def _data_in_use(self) -> set[str]:
        if self.view.dataset is None:
            return set()
        return set(files.data_paths(f.metadata for f in self.view.dataset.get_fragments()))

    # What operations need, and an object store does differently

    def properties_of(self, dataset: Any) -> dict[str, str]:
        """Return the properties of an older version."""
        return properties.read(dataset)

    def compaction_run(self, dataset: Any) -> Run | None:
        """Return how a compaction writes its fragments; None: here, signed and synced."""
        return None

    def checkpoint(self) -> None:
        """Commit a version that changes nothing and carries the properties."""
        from lance import LanceOperation

        kept = {k: v for k, v in self.properties.items() if k.startswith("persisting.")}
        entries = LanceOperation.UpdateMap(updates=dict(kept), replace=False)
        self.commit("checkpoint", LanceOperation.UpdateConfig(config_updates=entries), {})

    def restoring(self, target: TableView) -> Any:
        """Return the operation that brings the content of an older version back."""
        from lance import LanceOperation

        return LanceOperation.Restore(target.version)

    def write_tag(self, name: str) -> None:
        """Tag the version in view."""
        with translated("tag", self.root):
            files.write_tag(self.fs, self.root, name, self.view.version)

    def remove_tag(self, name: str) -> None:
        with translated("remove a tag of", self.root):
            files.remove_tag(self.fs, self.root, name)

    def outdated(self, keep_seconds: float) -> list[int]:
        """Return the versions that cleaning removes: older ones without a tag."""
        with translated("clean up", self.root):
            return versions.outdated(self.view.dataset, keep_seconds)

    def remove_versions(self, numbers: list[int]) -> None:
        """Remove versions, and the files that only they use."""
        with translated("clean up", self.root):
            files.announce_cleaning(self.fs, self.root, numbers)
            versions.remove(self.view.dataset, numbers)
            files.finish_cleaning(self.fs, self.root)

    # Taking back

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Roll back what was committed and cannot be made durable."""
        try:
            yield
        except BaseException:
            self.undo_pending = True
            self.complete_undo()
            raise

    def complete_undo(self) -> None:
        """Remove every version above the view: a later sync could not prove that its bytes are
        on disk."""
        if self.undo_pending:
            with translated("roll back an unsynced version of", self.root):
                repair.forget_newest(self.root, self.fs)
                for version in range(files.newest_version(self.root), self.view.version, -1):
                    self.fs.remove(files.manifest_path(self.root, version))
                self.fs.sync_folder(self.root / files.VERSIONS)
            self.undo_pending = False

    # Checksums

    def drop_untrusted_indexes(self) -> None:
        """Drop indexes without recorded checksums, and record those of all other files.

        Lance commits an index before its files are synced, and checksums are recorded after that
        sync. So after a crash only an index with recorded checksums can be trusted; maintenance
        builds the others again.
        """
        self.checksums_recorded = False
        for name in checksums.untrusted_indexes(self.root, self.view.dataset):
            self.change("drop an index of", methodcaller("drop_index", name))
        self.record_checksums()

    def record_checksums(self) -> None:
        """Record the checksums of files whose names cannot carry one."""
        self.checksums_recorded = False
        with translated("read", self.root):
            changes = checksums.changes(self.root, self.view.dataset)
        if changes is not None:
            self.change("note checksums in", lambda dataset: dataset.update_config(changes))
        self.checksums_recorded = True


def view_of(dataset: Any, root: Path, start: int) -> TableView:
    """The view of a version whose first row is at offset ``start``."""
    schema = layout.logical_schema(dataset.schema, root)
    sizes = sizes_of(fragment.metadata for fragment in dataset.get_fragments())
    return TableView(dataset, schema, sizes, start)


def _index_ids(dataset: Any) -> set[str]:
    return {segment.uuid for index in indices_of(dataset) for segment in index.segments}
