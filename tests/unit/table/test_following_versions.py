"""Readers follow the newest version of a table, even if another one has had its number."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from support.filesystems import QuickFileSystem

from persisting.table import files
from persisting.table.table import Table

SCHEMA = pa.schema([("n", pa.int64())])


def table_in(folder: Path) -> Table:
    return Table(folder, QuickFileSystem())


def append(folder: Path, *numbers: int) -> int:
    """Append rows as the table's owner; return the version."""
    table = table_in(folder)
    table.open(left_clean=False)
    times = pa.array([7] * len(numbers), pa.timestamp("us", "UTC"))
    table.append([(pa.record_batch({"n": list(numbers)}, SCHEMA), times)], SCHEMA, 1)
    return table.view.version


def numbers_in(table: Table) -> list[int]:
    batches = table.view.batches(0, table.view.rows)
    return [row["n"] for batch in batches for row in batch.to_pylist()]


def test_version_that_was_taken_back_and_committed_again_is_read_again(tmp_path: Path) -> None:
    append(tmp_path, 1)
    version = append(tmp_path, 2)
    reader = table_in(tmp_path)
    reader.refresh()
    assert numbers_in(reader) == [1, 2]
    files.manifest_path(reader.root, version).unlink()
    (tmp_path / "newest").unlink(missing_ok=True)
    assert append(tmp_path, 3) == version
    assert reader.is_behind
    reader.refresh()
    assert numbers_in(reader) == [1, 3]
    assert not reader.is_behind


def test_version_that_was_loaded_before_a_newer_one_is_not_the_newest(tmp_path: Path) -> None:
    append(tmp_path, 1)
    reader = table_in(tmp_path)
    loaded = reader.load_newer()
    assert loaded is not None
    assert reader.is_newest(loaded)
    append(tmp_path, 2)
    assert not reader.is_newest(loaded)
    reader.refresh()
    assert numbers_in(reader) == [1, 2]
    assert reader.load_newer() is None
