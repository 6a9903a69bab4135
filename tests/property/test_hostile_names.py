"""Any name of a topic, group, tag or writer is used unchanged or refused, and stays inside."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from persisting.errors import InvalidArgument
from persisting.queue import read_queue, write_queue

NAMES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=st.sampled_from("./\\~%: \0\n*?$'\"-_aé日\u202e\ud800"), max_size=8),
    st.sampled_from(
        ["..", ".", "x" * 200, "x" * 201, "日" * 80, "topic.json", ".topic.lock", "g.lock"]
    ),
    st.none(),
    st.integers(),
    st.binary(max_size=4),
    st.lists(st.text(max_size=2), max_size=2),
)
LOGGED = {"enable_wal": True, "flush_interval": None}
Use = Callable[[Path, Any], Awaitable[None]]


def opened(root: Path, topic: Any, **given: Any) -> Any:
    return write_queue(
        topic=topic,
        storage_path=str(root),
        num_buckets=1,
        backend="persisting",
        backend_options=LOGGED,
        **given,
    )


async def as_topic(root: Path, name: Any) -> None:
    async with await opened(root, name) as writer:
        await writer.put({"id": "a"})
    assert [path.name for path in root.iterdir()] == [name]
    async with await read_queue(topic=name, storage_path=str(root)) as reader:
        assert [row["id"] for row in await reader.get(None)] == ["a"]


async def as_group(root: Path, name: Any) -> None:
    async with await opened(root, "t") as writer:
        await writer.put([{"id": "a"}, {"id": "b"}])
        for wanted in ("a", "b"):
            async with await read_queue(topic="t", storage_path=str(root), group=name) as reader:
                assert [row["id"] for row in await reader.get(1)] == [wanted]
                await reader.commit()
    if name is not None:
        assert [path.name for path in (root / "t" / "groups").iterdir()] == [name]


async def as_tag(root: Path, name: Any) -> None:
    async with await opened(root, "t") as writer:
        await writer.put({"id": "a"})
        await writer.tag(name)
        await writer.put({"id": "b"})
        assert [tag["name"] for tag in await writer.tags()] == [name]
        async with await read_queue(topic="t", storage_path=str(root)) as reader:
            assert [row["id"] for row in await reader.get(version=name)] == ["a"]
        assert await writer.delete_tag(name)
        assert await writer.tags() == []


async def as_writer(root: Path, name: Any) -> None:
    for _ in range(2):
        async with await opened(root, "t", writer_id=name) as writer:
            await writer.put({"id": "a"}, sequence=7)
            if name is not None:
                assert await writer.last_sequence() == 7
                assert (await writer.stats())["total_count"] == 1


@pytest.mark.parametrize("use", [as_topic, as_group, as_tag, as_writer])
def test_any_name_is_used_unchanged_or_refused(tmp_path: Path, use: Use) -> None:
    @settings(max_examples=20)
    @given(name=NAMES)
    @example(name="a\ud800")
    @example(name="../../x")
    def check(name: Any) -> None:
        shutil.rmtree(tmp_path)
        root = tmp_path / "outer" / "inner"
        root.mkdir(parents=True)
        with suppress(InvalidArgument):
            asyncio.run(use(root, name))
        assert [path.name for path in tmp_path.iterdir()] == ["outer"]
        assert [path.name for path in (tmp_path / "outer").iterdir()] == ["inner"]
        assert all(path.name in ("t", name) for path in root.iterdir())

    check()
