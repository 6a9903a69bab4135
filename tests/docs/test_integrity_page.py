"""docs/guide/integrity.md lists the keys of the report of verify()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with

from persisting.queue import PersistingBackend

pages = pytest.mark.parametrize("page", both("guide/integrity.md"), ids=["en", "zh"])


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"word {n}"} for n in range(first, first + count)]


@pytest.fixture
async def bucket(tmp_path: Path):
    """A bucket with several fragments, a tag, an index, and a column widened after the tag."""
    async with PersistingBackend(0, str(tmp_path), flush_interval=None) as backend:
        for n in range(3):
            await backend.put_batch(rows(n * 10, 10))
            await backend.flush()
        await backend.create_index("text")
        await backend.tag("x")
        await backend.put({"id": 0.5, "text": "wide"})
        await backend.flush()
        yield backend


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "data.lance" / "data").iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pages
async def test_integrity_page_lists_the_keys_of_the_report(page: Path, bucket, tmp_path):
    report = await bucket.verify()
    assert {code(row[0]) for row in table_with(page, "ok", "unchecked")} == set(report)
    flip(data_files(tmp_path)[0])
    damage = (await bucket.verify())["damaged"][0]
    listed = {code(row[0]) for row in table_with(page, "file", "offsets")}
    assert listed == {*damage, "bucket"}
