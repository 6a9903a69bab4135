"""The tables of docs/guide/backends.md list the options, keys and errors that there are."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with

from persisting import errors, queue
from persisting.bucket import producer_sequences
from persisting.bucket.bucket import FLUSH_PAUSE
from persisting.options import BucketOptions, PersistingOptions
from persisting.queue import LanceBackend, MemoryBackend, PersistingBackend

pages = pytest.mark.parametrize("page", both("guide/backends.md"), ids=["en", "zh"])


def defaults(kind: type) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = field.default
    return found


def documented(rows: list[list[str]]) -> dict[str, Any]:
    """Options and their defaults, which stand as Python expressions in the third column."""
    return {
        code(row[0]): eval(code(row[2])) if code(row[2]) else dataclasses.MISSING  # noqa: S307
        for row in rows
    }


@pages
def test_every_option_is_listed_with_its_default(page: Path):
    common = documented(table_with(page, "batch_size"))
    assert common == defaults(BucketOptions)
    extra = documented(table_with(page, "enable_wal", "schema_defaults"))
    assert extra == {k: v for k, v in defaults(PersistingOptions).items() if k not in common}


@pages
def test_the_defaults_that_differ_in_persisting_backend_are_told(page: Path, tmp_path):
    cells = {code(row[0]): row[3] for row in table_with(page, "batch_size")}
    assert "`max(1000, batch_size)`" in cells["flush_threshold"]
    assert f"`{defaults(PersistingOptions)['flush_interval']}`" in cells["flush_interval"]
    for size, threshold in ((100, 1000), (5000, 5000)):
        backend = PersistingBackend(0, str(tmp_path / str(size)), batch_size=size)
        assert backend._bucket.options.flush_threshold == threshold


@pages
async def test_every_key_of_stats_is_listed(page: Path, tmp_path):
    keys = {code(row[0]): row[1] for row in table_with(page, "bucket_id", "total_count")}
    everywhere = {key for key, where in keys.items() if where in ("all", "全部")}
    both_tables = everywhere | {key for key, where in keys.items() if where.startswith("lance")}
    async with (
        MemoryBackend() as memory,
        LanceBackend(0, str(tmp_path / "l")) as lance,
        PersistingBackend(0, str(tmp_path / "p")) as persisting,
    ):
        assert set(await memory.stats()) == everywhere
        assert set(await lance.stats()) == both_tables
        assert set(await persisting.stats()) == set(keys)


@pages
def test_every_error_is_listed(page: Path):
    listed = {code(row[0]) for row in table_with(page, "StorageError", "WALError")}
    defined = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.StorageError)
    }
    assert listed == defined
    assert listed <= set(queue.__all__)


@pages
def test_the_number_of_remembered_writers_is_the_codes(page: Path):
    text = page.read_text("utf-8").replace(",", "")
    assert f"{producer_sequences.MAX_PRODUCERS}" in text


def test_an_unknown_option_warns_and_names_the_nearest(tmp_path):
    with pytest.warns(UserWarning, match="did you mean 'flush_threshold'"):
        LanceBackend(0, str(tmp_path), flush_treshold=5)


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"flush_threshold": "x"}, {"compression": "z"}])
def test_a_bad_value_raises_at_construction(tmp_path, bad):
    with pytest.raises(errors.InvalidArgument):
        LanceBackend(**{"bucket_id": 0, "storage_path": str(tmp_path), **bad})


async def test_flushes_that_the_threshold_starts_keep_the_documented_distance(tmp_path):
    assert FLUSH_PAUSE == 0.1
    async with LanceBackend(0, str(tmp_path), flush_threshold=10) as backend:
        for n in range(500):
            await backend.put({"n": n})
        assert (await backend.stats())["flush_count"] <= 3
