"""A reopened bucket has the same records, offsets and schema."""

from __future__ import annotations

import pytest
from support.buckets import Bucket, read_all, until_freed

from persisting.queue import LanceBackend, PersistingBackend, SchemaError, StorageError


async def test_reopening_keeps_records_order_and_count(stored: Bucket) -> None:
    rows = [{"i": i, "s": f"{i}"} for i in range(40)]
    for start in range(0, 40, 8):
        backend = stored.open()
        assert backend.total_count() == start
        await backend.put_batch(rows[start : start + 5])
        await backend.flush()
        await backend.put_batch(rows[start + 5 : start + 8])
        assert await backend.get() == rows[: start + 8]
        await backend.close()
    backend = stored.open()
    assert await backend.get() == rows
    assert await read_all(backend) == rows
    assert await backend.get(17, 5) == rows[17:22]


async def test_reopening_keeps_the_schema(stored: Bucket) -> None:
    backend = stored.open()
    await backend.put({"z": 1, "a": None, "m": []})
    backend = await stored.reopen(backend)
    with pytest.raises(SchemaError, match="'z'"):
        await backend.put({"z": "text", "a": None, "m": []})
    await backend.put({"m": ["x"], "z": 2, "a": True})
    backend = await stored.reopen(backend)
    rows = await backend.get()
    assert rows == [{"z": 1, "a": None, "m": []}, {"z": 2, "a": True, "m": ["x"]}]
    assert [list(r) for r in rows] == [["z", "a", "m"]] * 2


async def test_reopening_an_unused_bucket_finds_it_empty(stored: Bucket) -> None:
    backend = await stored.reopen(stored.open())
    assert backend.total_count() == 0
    await backend.put({"a": 1})
    assert await backend.get() == [{"a": 1}]


async def test_a_relative_path_is_the_folder_at_construction(
    stored: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.folder.mkdir(parents=True)
    monkeypatch.chdir(stored.folder.parent)
    backend = stored.kind.cls(0, stored.folder.name, **stored.kind.options)
    monkeypatch.chdir("/")
    await backend.put({"a": 1})
    await backend.close()
    assert await stored.open().get() == [{"a": 1}]


async def test_the_table_is_the_folder_data_lance(stored: Bucket) -> None:
    backend = stored.open()
    await backend.put({"a": 1})
    await backend.flush()
    assert (stored.folder / "data.lance" / "_versions").is_dir()


async def test_each_backend_opens_what_another_has_closed(stored: Bucket) -> None:
    backend = stored.open()
    await backend.put({"a": 1, "s": "x"})
    await backend.close()
    for cls in (PersistingBackend, LanceBackend, PersistingBackend):
        other = cls(0, str(stored.folder))
        await other.put({"a": 2, "s": "y"})
        await other.close()
    assert (await stored.open().get())[0] == {"a": 1, "s": "x"}


async def test_dropping_a_backend_without_close_loses_nothing_that_was_flushed(
    stored: Bucket,
) -> None:
    backend = stored.kind.cls(0, str(stored.folder), **stored.kind.options)
    await backend.put({"a": 1})
    await backend.flush()
    await backend.put({"a": 2})
    del backend
    await until_freed(stored.folder)
    rows = await stored.open().get()
    assert rows == ([{"a": 1}, {"a": 2}] if stored.kind.logged else [{"a": 1}])


async def test_lance_backend_refuses_a_left_over_log_with_advice(stored: Bucket) -> None:
    backend = PersistingBackend(0, str(stored.folder), enable_wal=True)
    await backend.put({"a": 1})
    del backend
    await until_freed(stored.folder)
    with pytest.raises(StorageError, match="PersistingBackend"):
        LanceBackend(0, str(stored.folder))
    async with PersistingBackend(0, str(stored.folder)) as recovered:
        assert await recovered.get() == [{"a": 1}]
    async with LanceBackend(0, str(stored.folder)) as backend:
        assert await backend.get() == [{"a": 1}]
