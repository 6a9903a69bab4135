"""A crash may tear the newest manifest of a table: the previous version and the log have all rows.

Damage after a clean close is not a torn write: opening raises and changes nothing.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import (
    CrashableBucket,
    ExpectedRecords,
    check_folder,
    check_records,
    read_checked,
)
from support.crash.disk_model import SECTOR
from support.crash.workloads import lance, leave_table_and_log, no_log, wal

from persisting.errors import StorageError, TableError
from persisting.queue import LanceBackend

pytestmark = pytest.mark.usefixtures("no_syncs")


def manifests(folder: Path) -> list[Path]:
    """Return the manifests, newest first."""
    return sorted((folder / "data.lance" / "_versions").glob("*.manifest"))


def remove_durable_note(folder: Path) -> None:
    """Remove the note that the manifest is durable: it is written later, so power loss takes it
    too."""
    (folder / "newest").unlink(missing_ok=True)


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "n": number, **fields}


WIDE = {f"field_number_{i}": i for i in range(60)}


async def crashed_after_a_commit(
    folder: Path, *, flushes: int, **fields: Any
) -> tuple[ExpectedRecords, Path]:
    """Create a bucket that crashed between the commit of its last flush and the release of the
    log."""
    expected = ExpectedRecords()
    handle = CrashableBucket(folder, wal())
    for number in range(flushes):
        if number:
            await handle.backend.flush()
        expected.add(record(2 * number, **fields))
        expected.add(record(2 * number + 1, **fields))
        for latest in expected.records[-2:]:
            await handle.backend.put(latest)
    shutil.copytree(folder / "wal", folder / "copy")
    await handle.backend.flush()
    await handle.drop()
    shutil.rmtree(folder / "wal")
    (folder / "copy").rename(folder / "wal")
    return expected, manifests(folder)[0]


async def flushed_bucket(
    folder: Path, open_bucket: Any, flushes: int = 2, **fields: Any
) -> tuple[CrashableBucket, ExpectedRecords]:
    """Open a bucket that has flushed one record at a time."""
    expected = ExpectedRecords()
    handle = CrashableBucket(folder, open_bucket)
    for number in range(flushes):
        expected.add(record(number, **fields))
        await handle.backend.put(expected.records[-1])
        await handle.backend.flush()
    return handle, expected


Tear = Callable[[bytes], bytes]


def tears(data_length: int) -> dict[str, Tear]:
    found: dict[str, Tear] = {
        "empty": lambda data: b"",
        "zero-filled": lambda data: bytes(len(data)),
        "first half zero": lambda data: bytes(len(data) // 2) + data[len(data) // 2 :],
        "second half zero": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
        "longer": lambda data: data + bytes(100),
    }
    for length in range(1, data_length, 13):
        found[f"cut at {length}"] = lambda data, n=length: data[:n]  # type: ignore[misc]
        found[f"zeros up to {length}"] = (
            lambda data, n=length: (  # type: ignore[misc]
                bytes(n) + data[n:]
            )
        )
        found[f"zeros from {length}"] = (
            lambda data, n=length: (  # type: ignore[misc]
                data[:n] + bytes(len(data) - n)
            )
        )
    return found


def without_sectors(data: bytes, lost: set[int]) -> bytes:
    parts = [data[i : i + SECTOR] for i in range(0, len(data), SECTOR)]
    return b"".join(bytes(len(p)) if i in lost else p for i, p in enumerate(parts))


async def check_torn(
    source: Path, expected: ExpectedRecords, manifest: Path, torn: bytes, copy: Path
) -> None:
    shutil.copytree(source, copy)
    (copy / manifest.relative_to(source)).write_bytes(torn)
    remove_durable_note(copy)
    handle = CrashableBucket(copy, wal())
    check_records(await read_checked(handle.backend), expected, len(expected.records))
    await handle.backend.close()
    handle.open()
    check_records(await read_checked(handle.backend), expected, len(expected.records))
    await handle.backend.close()
    shutil.rmtree(copy)


@pytest.mark.parametrize("flushes", [1, 2])
async def test_torn_newest_manifest_is_replaced_by_the_previous_version_and_the_log(
    tmp_path: Path, flushes: int
) -> None:
    source = tmp_path / "bucket"
    expected, manifest = await crashed_after_a_commit(source, flushes=flushes)
    data = manifest.read_bytes()
    for name, tear in tears(len(data)).items():
        try:
            await check_torn(source, expected, manifest, tear(data), tmp_path / "copy")
        except Exception as exc:
            raise AssertionError(f"the manifest is {name}: {exc}") from exc


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_manifest_truncated_at_any_byte_is_replaced_by_the_previous_version_and_the_log(
    tmp_path: Path,
) -> None:
    source = tmp_path / "bucket"
    expected, manifest = await crashed_after_a_commit(source, flushes=2)
    data = manifest.read_bytes()
    for length in range(len(data)):
        await check_torn(source, expected, manifest, data[:length], tmp_path / "copy")
        torn = bytes(length) + data[length:]
        await check_torn(source, expected, manifest, torn, tmp_path / "copy")


async def test_manifest_with_missing_sectors_is_recognised_as_torn(tmp_path: Path) -> None:
    """A wide schema makes the manifest long; some of its sectors have not reached the disk."""
    source = tmp_path / "bucket"
    expected, manifest = await crashed_after_a_commit(source, flushes=2, **WIDE)
    data = manifest.read_bytes()
    sectors = (len(data) + SECTOR - 1) // SECTOR
    assert sectors >= 8
    rng = random.Random(5)
    masks = [{i} for i in range(sectors)]
    masks += [{i for i in range(sectors) if rng.random() < 0.5} or {0} for _ in range(12)]
    for lost in masks:
        try:
            torn = without_sectors(data, lost)
            await check_torn(source, expected, manifest, torn, tmp_path / "copy")
        except Exception as exc:
            raise AssertionError(f"sectors {lost} of {sectors} lost: {exc}") from exc


async def test_manifest_with_missing_sectors_is_recognised_as_torn_without_a_log(
    tmp_path: Path,
) -> None:
    """The last flush was not acknowledged; the previous one must be intact."""
    source = tmp_path / "bucket"
    handle, expected = await flushed_bucket(source, no_log(), **WIDE)
    await handle.drop()
    manifest = manifests(source)[0]
    data = manifest.read_bytes()
    for sector in range((len(data) + SECTOR - 1) // SECTOR):
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        (copy / manifest.relative_to(source)).write_bytes(without_sectors(data, {sector}))
        remove_durable_note(copy)
        try:
            await check_folder(copy, no_log(), expected, 1)
        except Exception as exc:
            raise AssertionError(f"sector {sector} lost: {exc}") from exc
        shutil.rmtree(copy)


async def test_torn_manifest_is_set_aside_and_the_rollback_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bucket"
    _, manifest = await crashed_after_a_commit(folder, flushes=2)
    torn = manifest.read_bytes()[:100]
    manifest.write_bytes(torn)
    remove_durable_note(folder)
    with caplog.at_level(logging.WARNING, "persisting"):
        handle = CrashableBucket(folder, wal())
    assert "version 2" in caplog.text
    assert torn in [path.read_bytes() for path in (folder / "damaged").iterdir()]
    await handle.backend.close()


# Damage after a clean close


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files but the lock file, which every owner writes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Check that the block changes no file."""
    before = tree(folder)
    yield
    assert tree(folder) == before


async def closed_bucket(folder: Path, open_bucket: Any) -> ExpectedRecords:
    handle, expected = await flushed_bucket(folder, open_bucket)
    await handle.backend.close()
    return expected


OPENERS = [pytest.param(wal(), id="wal"), pytest.param(lance(), id="lance")]


@pytest.mark.parametrize("open_bucket", OPENERS)
@pytest.mark.parametrize("tear", ["empty", "zero-filled", "first half zero", "cut at 14"])
async def test_damaged_manifest_after_a_clean_close_raises_and_changes_nothing(
    tmp_path: Path, open_bucket: Any, tear: str
) -> None:
    folder = tmp_path / "bucket"
    expected = await closed_bucket(folder, open_bucket)
    manifest = manifests(folder)[0]
    whole = manifest.read_bytes()
    manifest.write_bytes(tears(len(whole))[tear](whole))
    before = tree(folder)
    for _ in range(2):  # the failed open must not count as a crash
        with pytest.raises(TableError, match=r"data\.lance"):
            open_bucket(folder)
        assert tree(folder) == before
    manifest.write_bytes(whole)
    await check_folder(folder, open_bucket, expected, 2)


@pytest.mark.parametrize("open_bucket", OPENERS)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer"])
async def test_damaged_data_file_after_a_clean_close_raises_and_changes_nothing(
    tmp_path: Path, open_bucket: Any, how: str
) -> None:
    folder = tmp_path / "bucket"
    expected = await closed_bucket(folder, open_bucket)
    for path in sorted((folder / "data.lance" / "data").iterdir()):
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes({"empty": b"", "cut": whole[:-1], "longer": whole + b"x"}[how])
        before = tree(folder)
        for _ in range(2):
            with pytest.raises(TableError) as raised:
                open_bucket(folder)
            assert path.name in str(raised.value)
            assert tree(folder) == before
        path.write_bytes(whole)
    await check_folder(folder, open_bucket, expected, 2)


async def test_damaged_synced_data_file_is_refused_even_after_a_kill(
    tmp_path: Path,
) -> None:
    """A rollback would lose flushed rows whose log was removed."""
    folder = tmp_path / "bucket"
    handle = CrashableBucket(folder, wal())
    for number in range(2):
        await handle.backend.put(record(number))
        await handle.backend.flush()
        if number == 0:
            older = set((folder / "data.lance" / "data").iterdir())
    await handle.drop()
    (newest,) = set((folder / "data.lance" / "data").iterdir()) - older
    newest.write_bytes(newest.read_bytes()[:-1])
    with unchanged(folder), pytest.raises(TableError, match=newest.name):
        wal()(folder)


@pytest.mark.parametrize("open_bucket", OPENERS)
async def test_foreign_lance_table_is_refused_and_unchanged(
    tmp_path: Path, open_bucket: Any
) -> None:
    import lance as raw
    import pyarrow as pa

    folder = tmp_path / "bucket"
    folder.mkdir()
    for mode in ("create", "append"):
        raw.write_dataset(pa.table({"a": [1, 2]}), str(folder / "data.lance"), mode=mode)
        with unchanged(folder), pytest.raises(TableError, match="no Persisting backend wrote"):
            open_bucket(folder)


async def test_table_of_a_newer_format_is_refused_and_unchanged_even_after_a_kill(
    tmp_path: Path,
) -> None:
    import lance as raw

    folder = tmp_path / "bucket"
    handle, _ = await flushed_bucket(folder, lance(), 1)
    await handle.drop()
    raw.dataset(str(folder / "data.lance")).update_schema_metadata({"persisting.format": "2"})
    with unchanged(folder), pytest.raises(TableError, match="upgrade"):
        lance()(folder)


async def test_operating_system_error_is_not_mistaken_for_a_torn_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, once, while the newest version is read."""
    import lance as raw

    folder = tmp_path / "bucket"
    handle, _ = await flushed_bucket(folder, wal())
    await handle.drop()
    real, failures = raw.dataset, [OSError("LanceError(IO): Too many open files (os error 24)")]

    def dataset(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(raw, "dataset", dataset)
    with unchanged(folder), pytest.raises(StorageError):
        wal()(folder)
    handle.open()
    assert [r["n"] for r in await read_checked(handle.backend)] == [0, 1]
    await handle.backend.close()


async def test_changed_durable_manifest_is_damage_even_after_a_crash(
    tmp_path: Path,
) -> None:
    """The file ``newest`` records the checksum of a durable manifest."""
    folder = tmp_path / "bucket"
    handle, _ = await flushed_bucket(folder, lance())
    await handle.drop()
    manifests(folder)[0].write_bytes(b"garbage")
    with unchanged(folder), pytest.raises(TableError, match="manifest"):
        lance()(folder)


# Leftover logs


async def test_lance_backend_refuses_a_leftover_log_and_names_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    handle = CrashableBucket(folder, wal())
    await handle.backend.put(record(0))
    await handle.drop()
    with unchanged(folder), pytest.raises(StorageError, match="PersistingBackend"):
        LanceBackend(0, str(folder))


async def test_leftover_log_is_recovered_even_with_logging_disabled(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    expected = await leave_table_and_log(folder)
    handle = CrashableBucket(folder, no_log())
    check_records(await read_checked(handle.backend), expected, 4)
    assert list((folder / "wal").glob("*.wal")) == []
    await handle.drop()
    handle = CrashableBucket(folder, lance())
    check_records(await read_checked(handle.backend), expected, 4)
    await handle.backend.close()
