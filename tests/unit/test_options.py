"""Options are checked at construction, and unknown ones cause a warning."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.buckets import LANCE, PERSISTING, Kind

from persisting.options import BucketOptions, PersistingOptions, check_window, take_known
from persisting.queue import InvalidArgument, LanceBackend, PersistingBackend, StorageError

both = pytest.mark.parametrize("kind", [LANCE, PERSISTING], ids=str)

BAD_COMMON: list[tuple[str, Any]] = [
    ("bucket_id", -1),
    ("bucket_id", "0"),
    ("bucket_id", None),
    ("bucket_id", 0.0),
    ("batch_size", 0),
    ("batch_size", -5),
    ("batch_size", "100"),
    ("batch_size", 1.5),
    ("batch_size", None),
    ("batch_size", True),
    ("flush_threshold", 0),
    ("flush_threshold", "x"),
    ("flush_threshold", None),
    ("flush_threshold", 10.0),
    ("flush_interval", 0),
    ("flush_interval", -1.0),
    ("flush_interval", "5"),
    ("flush_interval", float("nan")),
    ("flush_interval", float("inf")),
    ("compression", "bogus"),
    ("compression", "ZSTD"),
    ("compression", ""),
    ("compression", True),
    ("compression", 3),
    ("vector_type", "float8"),
    ("vector_type", None),
    ("max_buffer_bytes", 0),
    ("max_buffer_bytes", 1.5),
    ("read_only", "yes"),
    ("read_only", 1),
]
BAD_PERSISTING: list[tuple[str, Any]] = [
    ("enable_wal", 1),
    ("enable_wal", "true"),
    ("enable_wal", None),
    ("wal_sync_interval", -0.1),
    ("wal_sync_interval", "1"),
    ("wal_sync_interval", None),
    ("wal_sync_interval", float("nan")),
    ("max_wal_size", 0),
    ("max_wal_size", "100MB"),
    ("max_wal_size", 1e6),
    ("enable_metrics", "no"),
    ("schema_defaults", ["age"]),
    ("schema_defaults", {"age": object()}),
    ("schema_defaults", {1: 0}),
    ("schema_defaults", {"a.b": 0}),
]


@both
@pytest.mark.parametrize(("name", "value"), BAD_COMMON)
def test_an_invalid_option_raises_at_construction_and_is_named(
    kind: Kind, folder: Path, name: str, value: Any
) -> None:
    given = {"bucket_id": 0, "storage_path": str(folder), name: value}
    with pytest.raises(InvalidArgument, match=name) as caught:
        kind.cls(**given)
    assert isinstance(caught.value, StorageError)
    assert isinstance(caught.value, ValueError)
    assert not folder.exists()


@pytest.mark.parametrize(("name", "value"), BAD_PERSISTING)
def test_an_invalid_persisting_option_raises_at_construction(
    folder: Path, name: str, value: Any
) -> None:
    with pytest.raises(InvalidArgument, match=name):
        PersistingBackend(0, str(folder), **{name: value})
    assert not folder.exists()


@both
@pytest.mark.parametrize(
    "path", [None, "", 5, b"/tmp/x", [], "a\0b", "x" * 300, "\ud800"], ids=repr
)
def test_an_invalid_storage_path_raises(kind: Kind, tmp_path: Path, path: Any) -> None:
    given = f"{tmp_path}/{path}" if isinstance(path, str) and path else path
    with pytest.raises(StorageError, match="storage_path"):
        kind.cls(0, given)


@both
def test_a_storage_path_that_is_a_file_raises(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidArgument, match="file"):
        kind.cls(0, str(file))
    with pytest.raises(StorageError):
        kind.cls(0, str(file / "below"))


@both
def test_a_storage_path_that_cannot_be_written_raises(kind: Kind) -> None:
    # Not even root can create folders in /proc or /sys.
    for path in ("/proc/persisting", "/sys/persisting"):
        with pytest.raises(StorageError, match=path):
            kind.cls(0, path)


@both
def test_a_folder_without_write_permission_raises(kind: Kind, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        path = Path("/proc/self")  # an existing folder that refuses even root
    else:
        path = tmp_path / "closed"
        path.mkdir(mode=0o500)
    with pytest.raises(StorageError, match=str(path)):
        kind.cls(0, str(path))


@both
async def test_storage_path_may_be_a_path_object_and_a_deep_new_folder(
    kind: Kind, tmp_path: Path
) -> None:
    backend = kind.cls(0, tmp_path / "a" / "b" / "c")
    await backend.put({"a": 1})
    await backend.close()
    assert (tmp_path / "a" / "b" / "c" / "data.lance").is_dir()


@both
async def test_stored_files_are_readable_only_by_their_user(kind: Kind, folder: Path) -> None:
    options = {"enable_wal": True} if kind is PERSISTING else {}
    backend = kind.cls(0, str(folder), **options)
    await backend.put({"a": 1})
    for path in [folder, *folder.rglob("*")]:
        if "data.lance" not in path.parts:
            assert path.stat().st_mode & 0o077 == 0, path
    await backend.close()


@both
async def test_an_unknown_option_warns_once_and_names_the_nearest(kind: Kind, folder: Path) -> None:
    with pytest.warns(UserWarning, match="ignored") as caught:
        backend = kind.cls(0, str(folder), flush_treshold=5, colour="red")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'flush_treshold'" in text
    assert "did you mean 'flush_threshold'" in text
    assert "'colour'" in text
    assert caught[0].filename == __file__
    await backend.close()


@both
async def test_known_options_cause_no_warning(kind: Kind, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = kind.cls(
            bucket_id=3, storage_path=str(folder), batch_size=10, flush_threshold=5,
            flush_interval=1, compression="zstd", max_buffer_bytes=1000, vector_type="float32",
        )  # fmt: skip
    assert (await backend.stats())["bucket_id"] == 3
    await backend.close()


async def test_options_of_persisting_are_unknown_to_lance(folder: Path) -> None:
    with pytest.warns(UserWarning, match="enable_wal"):
        backend = LanceBackend(0, str(folder), enable_wal=True)
    await backend.close()


def test_defaults_are_those_of_the_specification() -> None:
    path = Path("/nowhere")
    lance = BucketOptions(bucket_id=0, storage_path=path)
    assert (lance.batch_size, lance.flush_threshold, lance.flush_interval) == (100, 1000, None)
    ours = PersistingOptions(bucket_id=0, storage_path=path)
    assert (ours.batch_size, ours.enable_wal, ours.compression) == (100, False, None)
    assert (ours.enable_metrics, ours.wal_sync_interval) == (False, 1.0)
    assert (ours.max_wal_size, ours.flush_interval) == (100 * 1024 * 1024, 5.0)


async def test_the_threshold_of_persisting_is_never_below_its_batch_size(folder: Path) -> None:
    backend = PersistingBackend(0, str(folder), batch_size=5000)
    await backend.put_batch([{"i": i} for i in range(3000)])
    await backend.put({"i": 3000})
    assert (await backend.stats())["buffer_count"] == 3001
    await backend.close()


def test_options_cannot_be_changed() -> None:
    options = BucketOptions(bucket_id=0, storage_path=Path("/nowhere"))
    with pytest.raises(AttributeError):
        options.batch_size = 5  # type: ignore[misc]


def test_take_known_returns_the_known_options() -> None:
    with pytest.warns(UserWarning, match="nonsense"):
        known = take_known(BucketOptions, {"batch_size": 1, "nonsense": 2})
    assert known == {"batch_size": 1}


def test_check_window_accepts_integers() -> None:
    check_window(0, None)
    check_window(5, 0)
    with pytest.raises(InvalidArgument, match="offset must be at least 0, got -1"):
        check_window(-1, None)
    with pytest.raises(InvalidArgument, match="limit must be a whole number, got 'x'"):
        check_window(0, "x")
