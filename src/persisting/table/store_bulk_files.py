"""The data files of a bulk write in an object store.

Objects are stored whole, so nothing is signed or synced. An object is deleted only by the process
that wrote it, or by one that has fenced the table: a commit that is under way may name it. All
others stay, and cleaning removes them after 7 days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from persisting.errors import TableError
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import StoreAddress
from persisting.table import files
from persisting.table.bulk_files import BulkFiles, FilesUnfit, removed, with_files
from persisting.table.lance_errors import scrubbed

_PARALLEL_WRITES = 8


class StoreBulkFiles(BulkFiles):
    """The data files of the table at ``root``."""

    root: StoreAddress  # type: ignore[assignment]

    def __init__(self, root: StoreAddress, options: StorageOptions) -> None:
        self.root, self._options = root, options.for_scheme(root.scheme)
        self.storage_options = self._options.for_lance

    def translated(self, action: str) -> AbstractContextManager[None]:
        return scrubbed(action, self.root, self._options.scrub)

    def finish(self, fragments: list[dict[str, Any]]) -> None:
        """The objects are durable."""

    def check(self, fragments: Iterable[dict[str, Any]]) -> None:
        written = [file for fragment in fragments for file in fragment["files"]]
        if not written:
            return
        for file in written:
            if "/" in file["path"] or file["path"] in ("", ".", ".."):
                raise FilesUnfit(f"{file['path']!r} is not the name of a data file of {self.root}")
        sizes = {name: entry.size for name, entry in self._store.entries(files.DATA).items()}
        for file in written:
            size = sizes.get(f"{files.DATA}/{file['path']}")
            if size is None:
                raise removed(self.root, file["path"])
            if file.get("file_size_bytes") not in (None, size):
                raise TableError(
                    f"{file['path']} of {self.root} has {size} bytes, and "
                    f"{file['file_size_bytes']} were written; run the write again"
                )

    def with_arrivals(
        self, fragments: list[dict[str, Any]], field_id: int, arrival: int
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(_PARALLEL_WRITES, thread_name_prefix="persisting-times") as threads:
            new = threads.map(lambda f: self._write_arrival(f, field_id, arrival), fragments)
            return with_files(fragments, new)

    def removed_on_failure(self, undo_pending: Callable[[], bool]) -> AbstractContextManager[None]:  # type: ignore[override]
        """A commit that failed may still land: the objects stay."""
        return nullcontext()

    def existing(self, names: Iterable[str]) -> set[str]:
        """Return those of the files that are there."""
        found = self._store.entries(files.DATA)
        return {name for name in names if f"{files.DATA}/{name}" in found}

    def remove(self, names: Iterable[str]) -> None:
        self._store.delete([f"{files.DATA}/{name}" for name in names])

    @property
    def _store(self) -> Any:
        return open_store(self.root, self._options)
