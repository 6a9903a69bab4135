"""docs/guide/versions.md names the operations and the result keys of the code."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import both, code, table_with

from persisting.options import BucketOptions
from persisting.queue import read_queue, write_queue
from persisting.table import properties

pages = pytest.mark.parametrize("page", both("guide/versions.md"), ids=["en", "zh"])


@asynccontextmanager
async def topic(folder: Path, **options: Any):
    """Open a writer and a reader of a topic with two buckets."""
    given = {"num_buckets": 2, "backend": "persisting", "storage_path": str(folder), **options}
    async with (
        await write_queue(topic="t", **given) as writer,
        await read_queue(topic="t", storage_path=str(folder)) as reader,
    ):
        yield writer, reader


def rows(*numbers: int) -> list[dict[str, int]]:
    return [{"id": n} for n in numbers]


@pages
def test_versions_page_names_every_operation_and_the_default_time(page: Path):
    text = page.read_text("utf-8")
    for operation in {*properties._OPERATIONS.values(), "schema"}:
        assert f"`{operation}`" in text
    assert f" {BucketOptions.keep_versions:.0f}" in text


@pages
async def test_versions_page_lists_the_keys_of_the_restore_result(page: Path, tmp_path):
    listed = {
        key.strip(" `,、")
        for row in table_with(page, "removed", "epoch")
        for key in row[0].replace("、", ",").split(",")
    }
    async with topic(tmp_path) as (writer, _):
        await writer.put(rows(*range(10)))
        await writer.tag("x")
        result = await writer.restore("x")
        keys = set(result) - {"buckets"} | set(result["buckets"][0])
    assert keys == listed
    assert code(table_with(page, "removed", "epoch")[0][0]) == "removed"
