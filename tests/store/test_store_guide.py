"""The guide on object stores: its first examples run as they are written, on another address."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.object_stores import SeaweedFS, fresh_prefix, url

import persisting.queue
from persisting.queue import read_queue

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "object-storage.md"
_PAGES = [GUIDE, GUIDE.with_suffix(".zh.md")]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```text\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", _PAGES, ids=["en", "zh"])
async def test_first_example_of_the_guide_runs(page: Path, server: SeaweedFS) -> None:
    """With the options that reach a server which speaks S3, as the second example has them."""
    first = next(block for block in blocks(page) if "await write_queue(" in block)
    options: dict[str, Any] = {}
    exec(next(block for block in blocks(page) if "aws_endpoint" in block), {}, options)  # noqa: S102
    reachable = server.options()
    assert set(options["storage_options"]) == set(reachable)
    place = url(fresh_prefix())
    code = first.replace("s3://bucket/prefix", place)
    code = code.replace('storage_options={"aws_region": "eu-central-1"}', "storage_options=options")
    assert code.count(place) == code.count("storage_options=options") == 2
    names: dict[str, Any] = {**vars(persisting.queue), "options": reachable}
    body = textwrap.indent(code + "return writer, reader\n", "    ")
    exec(f"async def example():\n{body}", names)  # noqa: S102
    writer, reader = await names["example"]()
    async with writer, reader:
        assert await reader.get(None) == [{"id": 1}]
        await reader.commit()
    async with await read_queue(
        topic="orders", storage_path=place, storage_options=reachable
    ) as again:
        assert len(await again.get(None)) == 1
