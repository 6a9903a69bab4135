"""The Lance table of a bucket in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import pyarrow as pa

from persisting.concurrency.pool import begin_request
from persisting.errors import StorageError
from persisting.records import EMPTY
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table import files, schema_change
from persisting.table.commit import Batch
from persisting.table.fenced_commit import FencedCommitter, NewerView, snapshot_of
from persisting.table.store_bulk_files import StoreBulkFiles
from persisting.table.table import FOLDER, Table
from persisting.table.versions import NOTHING
from persisting.table.view import TableView


class StoreTable(Table):
    """Like :class:`Table`, but without the files: Lance's commits are durable and atomic here."""

    def __init__(
        self,
        bucket: StoreAddress,
        options: StorageOptions,
        *,
        compression: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = bucket / FOLDER  # type: ignore[assignment]
        self.committer: FencedCommitter = FencedCommitter(
            bucket / FOLDER, options.for_scheme(bucket.scheme)
        )
        self._compression, self._defaults = compression, defaults or {}
        self._plain_lists = False
        self._followed = files.NO_MANIFEST

    @property
    def fs(self) -> Any:
        raise StorageError(f"{self.root} is in an object store and has no file system")

    @property
    def bulk_files(self) -> StoreBulkFiles:
        return StoreBulkFiles(self.committer.root, self.committer.options)

    def create(self, schema: pa.Schema, beside: Mapping[str, str] | None = None) -> None:
        with self.committer.fenced_after_failure():
            super().create(schema, beside)

    def take(self, term: int, load: Callable[[], NewerView | None] | None = None) -> None:
        """Open for writing: fence the table, so that former owners can no longer commit.

        ``load`` returns what was loaded earlier, see :class:`LoadedAhead`.
        """
        self.committer.take(term, load)
        with self.committer.fenced_after_failure():
            schema_change.finish(self.committer)

    def append(
        self,
        batches: Iterable[Batch],
        schema: pa.Schema,
        sequence: int,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        with self.committer.fenced_after_failure():
            super().append(batches, schema, sequence, beside)

    def erase(self) -> None:
        """Remove all rows and all other versions. What is left is an empty version, with a fence
        that former owners cannot pass."""
        self.committer.erase()

    def refresh(self) -> bool:  # type: ignore[override]
        """Open, or reopen, for reading only; return whether the version is another one now."""
        return self.committer.follow_newest()

    def load_newer(self, *, only_next: bool = False) -> NewerView | None:  # type: ignore[override]
        """See :meth:`FencedCommitter.load_newer`; needs no lock."""
        return self.committer.load_newer(only_next=only_next)

    def follow(self, newer: NewerView) -> None:  # type: ignore[override]
        self.committer.follow(newer)

    @property
    def touched(self) -> bool:
        return True

    def at(self, version: int) -> TableView:
        if version == NOTHING:
            return TableView(None, EMPTY)
        return snapshot_of(self.committer, version)


class LoadedAhead:
    """The newest version of a bucket's table, which is loaded while the bucket is taken over."""

    def __init__(self, bucket: StoreAddress, options: StorageOptions) -> None:
        self._committer = FencedCommitter(bucket / FOLDER, options.for_scheme(bucket.scheme))
        self._loading: Callable[[], NewerView | None] | None = None
        begin_request(import_module, "lance")  # takes as long as some requests

    def begin(self) -> None:
        """Load it, in the background; once more if another process was faster."""
        self._loading = begin_request(self._committer.load_newest)

    def result(self) -> NewerView | None:
        """Return the version, None if there was no table. Once: it is not kept."""
        loading, self._loading = self._loading, None
        return (loading or self._committer.load_newest)()
