"""docs/guide/integrity.md lists the keys of the report of verify()."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.doc_pages import both, code, table_with
from support.indexed_bucket import data_files, flip, indexed_bucket

pages = pytest.mark.parametrize("page", both("guide/integrity.md"), ids=["en", "zh"])


@pytest.fixture
async def bucket(tmp_path: Path):
    async with indexed_bucket(tmp_path) as backend:
        yield backend


@pages
async def test_integrity_page_lists_the_keys_of_the_report(page: Path, bucket, tmp_path):
    report = await bucket.verify()
    assert {code(row[0]) for row in table_with(page, "ok", "unchecked")} == set(report)
    flip(data_files(tmp_path)[0])
    damage = (await bucket.verify())["damaged"][0]
    listed = {code(row[0]) for row in table_with(page, "file", "offsets")}
    assert listed == {*damage, "bucket"}
