"""The tables of docs/guide/backends.md list exactly the options, keys and errors of the code."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, option_defaults, table_with

from persisting import errors, queue
from persisting.bucket import producer_sequences
from persisting.options import BucketOptions, PersistingOptions
from persisting.queue import LanceBackend, MemoryBackend, PersistingBackend

pages = pytest.mark.parametrize("page", both("guide/backends.md"), ids=["en", "zh"])


def documented(rows: list[list[str]]) -> dict[str, Any]:
    """Return the options and their defaults, Python expressions in the third column."""
    return {
        code(row[0]): eval(code(row[2])) if code(row[2]) else dataclasses.MISSING  # noqa: S307
        for row in rows
    }


@pages
def test_backends_page_lists_every_option_with_its_default(page: Path):
    common = documented(table_with(page, "batch_size"))
    assert common == option_defaults(BucketOptions)
    extra = documented(table_with(page, "enable_wal", "schema_defaults"))
    assert extra == {k: v for k, v in option_defaults(PersistingOptions).items() if k not in common}


@pages
def test_defaults_that_differ_in_persisting_backend_are_documented(page: Path, tmp_path):
    cells = {code(row[0]): row[3] for row in table_with(page, "batch_size")}
    assert "`max(1000, batch_size)`" in cells["flush_threshold"]
    assert f"`{option_defaults(PersistingOptions)['flush_interval']}`" in cells["flush_interval"]
    for size, threshold in ((100, 1000), (5000, 5000)):
        backend = PersistingBackend(0, str(tmp_path / str(size)), batch_size=size)
        assert backend._bucket.options.flush_threshold == threshold


@pages
async def test_backends_page_lists_every_key_of_stats(page: Path, tmp_path):
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
def test_backends_page_lists_every_error(page: Path):
    listed = {code(row[0]) for row in table_with(page, "StorageError", "WALError")}
    defined = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.StorageError)
    }
    assert listed == defined
    assert listed <= set(queue.__all__)


@pages
def test_backends_page_states_how_many_writers_are_remembered(page: Path):
    text = page.read_text("utf-8").replace(",", "")
    assert f"{producer_sequences.MAX_PRODUCERS}" in text
