"""One schema for all buckets of a topic, stored in a small file beside them.

Before a bucket changes its schema it proposes the change here. The change is merged with the
schema that the other buckets use, in this process or another, or the put is refused. Changes are
rare, so a file under a lock is enough, and it works wherever the buckets' storage is shared.
"""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pyarrow as pa

from persisting import json_files
from persisting.errors import SchemaError, StorageError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import file_lock
from persisting.records import EMPTY, Rules
from persisting.records.arrow import merge
from persisting.records.evolution import integers_become_floats

FILE = "schema.json"
FORMAT = 1


class SchemaFile(msgspec.Struct):
    """Content of the file. ``large`` are fields with whole numbers that a float cannot hold."""

    format: int
    schema: str
    large: list[str]


class SharedSchema:
    """The schema in ``path``. Every method may block and may be called from any thread."""

    def __init__(self, path: str | Path, fs: FileSystem) -> None:
        self._path, self._fs = Path(path), fs

    def read(self) -> pa.Schema | None:
        """Return the topic's schema, None if no record has defined it."""
        stored = self._load()
        return None if stored is None else _decoded(stored.schema)

    def propose(self, schema: pa.Schema, large: frozenset[str], rules: Rules) -> pa.Schema:
        """Merge a bucket's new schema into the topic's, or raise :class:`SchemaError`."""
        with file_lock(self._path.with_name(self._path.name + ".lock")):
            stored = self._load()
            merged, content = self._merge(stored, schema, large, rules)
            if content != stored:
                self._save(content)
            return merged

    def _merge(
        self, stored: SchemaFile | None, schema: pa.Schema, large: frozenset[str], rules: Rules
    ) -> tuple[pa.Schema, SchemaFile]:
        """Return the merged schema, and the content of the file; the same one if nothing changes,
        or raise."""
        old = EMPTY if stored is None else _decoded(stored.schema)
        merged = merge(old, schema, rules, defined=stored is not None)
        all_large = large | set(stored.large if stored is not None else ())
        for field in old:
            self._check_large(field, merged.field(field.name), all_large)
        if stored is not None and merged is old and all_large == set(stored.large):
            return merged, stored
        encoded = base64.b64encode(merged.serialize().to_pybytes()).decode()
        return merged, SchemaFile(format=FORMAT, schema=encoded, large=sorted(all_large))

    def _check_large(self, old: pa.Field, new: pa.Field, large: set[str] | frozenset[str]) -> None:
        if old.name in large and integers_become_floats(old.type, new.type):
            raise SchemaError(
                f"field {old.name!r} cannot change from int to float: a bucket of the topic holds "
                "whole numbers beyond 2**53 in it; put the floats into another field"
            )

    def _load(self) -> SchemaFile | None:
        try:
            data = self._fs.read(self._path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StorageError(f"cannot read {self._path}: {exc.strerror}") from exc
        json_files.check_format(data, self._path, FORMAT)
        try:
            stored = json_files.decode(data, SchemaFile)
        except msgspec.DecodeError as exc:
            raise StorageError(
                f"the topic's schema file {self._path} is damaged ({exc}); remove it and the "
                "next schema change writes it again"
            ) from exc
        return stored

    def _save(self, stored: SchemaFile) -> None:
        """Replace the file; the caller holds its lock."""
        with os_errors_as("write", self._path):
            self._fs.remove_drafts(self._path.parent, of=self._path.name)
            self._fs.write_file(self._path, msgspec.json.encode(stored))


def _decoded(text: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    except (ValueError, OSError, pa.ArrowException) as exc:
        raise StorageError(f"a topic's schema cannot be read: {exc}") from exc
