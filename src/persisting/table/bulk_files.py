"""The data files of a bulk write in a folder: written, signed and synced by workers, checked and
completed by the owner. :mod:`~persisting.table.store_bulk_files` is the form of an object store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.table import checksums, files, layout
from persisting.table.lance_errors import translated

_ARRIVAL_SCHEMA = pa.schema([layout.ARRIVAL_FIELD])
_ARRIVAL_ROWS = 65536


class FilesRemoved(StorageError):
    """Files that were written for a commit no longer exist."""


class FilesUnfit(StorageError):
    """Files are not what was said of them: committing them would damage the table."""


class BulkFiles:
    """The data files of the table at ``root``."""

    storage_options: dict[str, str] | None = None

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self.root, self._fs = root, fs

    def translated(self, action: str) -> AbstractContextManager[None]:
        """Raise errors of Lance as errors that name the table."""
        return translated(action, self.root)

    def open(self, version: int) -> Any:
        """Return a handle of a version, or of the newest one if that was cleaned up. The commit
        checks that the columns are still the same."""
        import lance

        try:
            return lance.dataset(
                str(self.root), version=version, storage_options=self.storage_options
            )
        except (ValueError, OSError):
            return lance.dataset(str(self.root), storage_options=self.storage_options)

    def reader(self, name: str) -> Any:
        """Return Lance's reader of a data file."""
        import lance

        return lance.file.LanceFileReader(
            f"{self.root}/{files.DATA}/{name}", storage_options=self.storage_options
        )

    def finish(self, fragments: list[dict[str, Any]]) -> None:
        """Make the files of a worker durable; their names in ``fragments`` may change."""
        checksums.sign(self._fs, self.root, fragments, files.HANDED)
        files.sync_data(self._fs, self.root, names_of(fragments))

    def check(self, fragments: Iterable[dict[str, Any]]) -> None:
        """Raise if workers' files are not there as they were written."""
        for fragment in fragments:
            for file in fragment["files"]:
                if Path(file["path"]).name != file["path"]:
                    raise FilesUnfit(
                        f"{file['path']!r} is not the name of a data file of {self.root}"
                    )
                path = self.root / files.DATA / file["path"]
                try:
                    path.stat()
                except FileNotFoundError:
                    raise removed(self.root, file["path"]) from None
                files.check_whole(path, file.get("file_size_bytes"))

    def with_arrivals(
        self, fragments: list[dict[str, Any]], field_id: int, arrival: int
    ) -> list[dict[str, Any]]:
        """Write a file with the arrival time for each fragment; return the fragments with them."""
        new = [self._write_arrival(fragment, field_id, arrival) for fragment in fragments]
        checksums.sign(self._fs, self.root, [{"files": [file]} for file in new])
        if new:
            files.sync_data(self._fs, self.root, [file["path"] for file in new])
        return with_files(fragments, new)

    def _write_arrival(
        self, fragment: Mapping[str, Any], field_id: int, arrival: int
    ) -> dict[str, Any]:
        """Write the arrival time of a fragment's rows; return the entry of the file."""
        import lance

        first = fragment["files"][0]
        name = f"{os.urandom(16).hex()}.lance"
        version = f"{first['file_major_version']}.{first['file_minor_version']}"
        times = pa.array([arrival], layout.ARRIVAL_FIELD.type)
        with lance.file.LanceFileWriter(
            f"{self.root}/{files.DATA}/{name}",
            _ARRIVAL_SCHEMA,
            version=version,
            storage_options=self.storage_options,
        ) as writer:
            remaining = fragment["physical_rows"]
            while remaining:
                rows = min(remaining, _ARRIVAL_ROWS)
                column = times.take(pa.nulls(rows, pa.int32()).fill_null(0))
                writer.write_batch(pa.record_batch([column], schema=_ARRIVAL_SCHEMA))
                remaining -= rows
        return {
            **first,
            "path": name,
            "fields": [field_id],
            "column_indices": [0],
            "file_size_bytes": writer.size_bytes,
        }

    @contextmanager
    def removed_on_failure(self, undo_pending: Callable[[], bool]) -> Iterator[None]:
        """Remove the files that were written inside if it fails, unless a version that is still to
        be taken back names them."""
        before = files.data_on_disk(self.root)
        try:
            yield
        except BaseException:
            if not undo_pending():
                files.remove_new_data(self._fs, self.root, before)
            raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of a worker that nothing refers to, and nothing ever will."""
        for name in names:
            (self.root / files.DATA / name).unlink(missing_ok=True)


def names_of(fragments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the data files of fragments (JSON)."""
    return [file["path"] for fragment in fragments for file in fragment["files"]]


def with_files(
    fragments: list[dict[str, Any]], new: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return fragments with one more file each."""
    pairs = zip(fragments, new, strict=True)
    return [{**fragment, "files": [*fragment["files"], file]} for fragment, file in pairs]


def removed(root: object, name: str) -> FilesRemoved:
    return FilesRemoved(f"{name} of {root} was removed before it was committed")
