"""What docs/reference/table-layout.md says about the files of a bucket."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from docpages import both, code, table_with

from persisting.errors import TableError
from persisting.queue import LanceBackend, PersistingBackend
from persisting.schema.names import ARRIVAL
from persisting.storage.writers import WRITERS
from persisting.table import evolve, files, layout
from persisting.table.table import FOLDER, SEQUENCE

pages = pytest.mark.parametrize("page", both("reference/table-layout.md"), ids=["en", "zh"])


@pages
def test_the_names_are_those_of_the_code(page: Path):
    (arrival, _) = table_with(page, ARRIVAL)
    assert code(arrival[1]) == str(layout.ARRIVAL_FIELD.type)
    keys = {code(row[0]): code(row[1]) for row in table_with(page, layout.FORMAT_KEY)}
    assert keys == {layout.FORMAT_KEY: str(layout.FORMAT), layout.SCHEMA_KEY: ""}
    properties = {code(row[0]) for row in table_with(page, SEQUENCE)}
    assert properties == {SEQUENCE, WRITERS}
    text = page.read_text("utf-8")
    for name in (FOLDER, files.ASIDE, layout._UNUSED, evolve._WIDE, evolve._OLD):
        assert name in text


async def written(path: Path, *, flushes: int = 2) -> None:
    async with LanceBackend(0, str(path)) as backend:
        for n in range(flushes):
            await backend.put({"n": n})
            await backend.flush()


def crashed(path: Path) -> None:
    """Let the folder look as if its last owner had died."""
    lock = path / ".lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "clean": False}))


def newest_manifest(path: Path) -> Path:
    root = path / FOLDER
    return files.manifest_path(root, files.newest_version(root))


@pytest.mark.parametrize("content", [b"", b"\0" * 400, b"garbage"])
async def test_a_torn_manifest_is_set_aside_after_a_crash(tmp_path, content, caplog):
    await written(tmp_path)
    newest_manifest(tmp_path).write_bytes(content)
    crashed(tmp_path)
    async with LanceBackend(0, str(tmp_path)) as backend:
        assert await backend.get() == [{"n": 0}]
    (kept,) = (tmp_path / "damaged").iterdir()
    assert kept.read_bytes() == content
    assert "was torn by a crash" in caplog.text


async def test_a_broken_manifest_after_a_clean_close_raises(tmp_path):
    await written(tmp_path)
    newest_manifest(tmp_path).write_bytes(b"")
    with pytest.raises(TableError, match="closed cleanly"):
        LanceBackend(0, str(tmp_path))


@pytest.mark.parametrize("clean", [True, False])
async def test_a_data_file_that_is_missing_raises(tmp_path, clean):
    await written(tmp_path)
    next((tmp_path / FOLDER / "data").iterdir()).unlink()
    if not clean:
        crashed(tmp_path)
    with pytest.raises(TableError, match="data file"):
        LanceBackend(0, str(tmp_path))


def test_a_lance_table_of_others_is_refused(tmp_path):
    lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / FOLDER))
    with pytest.raises(TableError, match="no Persisting backend wrote"):
        LanceBackend(0, str(tmp_path))


async def test_the_lock_file_says_who_and_whether_it_left_cleanly(tmp_path):
    async with LanceBackend(3, str(tmp_path)):
        note = json.loads((tmp_path / ".lock").read_text())
        assert set(note) >= {"pid", "host", "bucket", "clean"}
        assert (note["bucket"], note["clean"]) == (3, False)
    assert json.loads((tmp_path / ".lock").read_text())["clean"] is True


async def test_our_files_and_folders_are_private(tmp_path):
    folder = tmp_path / "topic" / "bucket_0"
    async with PersistingBackend(0, str(folder), enable_wal=True) as backend:
        await backend.put({"n": 1})
        (segment,) = (folder / "wal").glob("*.wal")
        for path, mode in ((folder, 0o700), (folder / "wal", 0o700), (segment, 0o600)):
            assert path.stat().st_mode & 0o777 == mode
        assert (folder / ".lock").stat().st_mode & 0o777 == 0o600


async def test_rows_accepted_together_share_their_time(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"n": n} for n in range(10)])
    column = lance.dataset(str(tmp_path / FOLDER)).to_table()[ARRIVAL]
    assert len(column.unique()) == 1


async def test_each_part_of_an_empty_or_untyped_record_has_its_place(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"nothing": None, "empty": {}})
        await backend.flush()
        assert await backend.get() == [{"nothing": None, "empty": {}}]
    schema = lance.dataset(str(tmp_path / FOLDER)).schema
    assert schema.names == [ARRIVAL, "empty"]
    assert [field.name for field in schema.field("empty").type] == [layout._UNUSED]


async def test_without_a_log_the_sequence_is_zero(tmp_path):
    await written(tmp_path)
    newest = lance.dataset(str(tmp_path / FOLDER)).get_transactions(1)[0]
    assert newest.transaction_properties == {SEQUENCE: "0"}
