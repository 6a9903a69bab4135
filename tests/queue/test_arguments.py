"""Invalid arguments of write_queue and read_queue are refused, and nothing is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.topic_places import numbered

from persisting.errors import InvalidArgument, SchemaError
from persisting.queue import LanceBackend, PersistingBackend, read_queue, write_queue

STORES = ["s3://bucket/queues", "gs://bucket", "az://container/queues"]
"""A topic may be there, see tests/store; a backend that is used alone may not."""

URLS: list[Any] = [
    "S3A://bucket/queues",
    "file:///tmp/queues",
    "hdfs://name:9000/queues",
    Path("s3://bucket/queues"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make relative paths point into the test's folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def made() -> None:
    async with await write_queue("t", backend="lance") as writer:
        await writer.put(numbered(10))


@pytest.mark.parametrize("path", URLS, ids=str)
async def test_storage_path_that_is_a_url_is_refused(here: Path, path: Any) -> None:
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument, match="address"):
            await opening("t", storage_path=path)
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", [*URLS, *STORES], ids=str)
def test_backend_refuses_a_url(here: Path, path: Any) -> None:
    for backend in (LanceBackend, PersistingBackend):
        with pytest.raises(InvalidArgument, match="address"):
            backend(0, path)
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", ["~", "~/queues", "~nobody/queues", Path("~/queues")], ids=str)
async def test_storage_path_with_a_tilde_is_refused(here: Path, path: Any) -> None:
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument, match="whole path"):
            await opening("t", storage_path=path)
    with pytest.raises(InvalidArgument, match="whole path"):
        LanceBackend(0, path)
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", ["./~/queues", "./s3:/queues", "a:b/queues", "q~/x"])
async def test_folder_with_a_colon_or_tilde_in_its_name_can_be_given_as_a_path(
    here: Path, path: str
) -> None:
    async with await write_queue("t", storage_path=path, backend="lance") as writer:
        await writer.put({"id": 1})
    assert (here / path / "t" / "topic.json").is_file()


async def test_existing_folder_named_tilde_is_used(here: Path) -> None:
    (here / "~").mkdir()
    async with await write_queue("t", storage_path="~/queues", backend="lance") as writer:
        await writer.put({"id": 1})
    assert (here / "~" / "queues" / "t").is_dir()


async def test_empty_storage_path_is_refused(here: Path) -> None:
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument, match="storage_path"):
            await opening("t", storage_path="")
    assert not list(here.iterdir())


@pytest.mark.parametrize("backend", [5, b"lance", ["lance"], dict, int], ids=str)
async def test_backend_must_be_a_name_or_a_class_with_the_protocol_methods(
    here: Path, backend: Any
) -> None:
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument, match=r"backend must|not a storage backend"):
            await opening("t", backend=backend)
    assert not list(here.iterdir())


@pytest.mark.parametrize("system", ["orders", 5, ["orders"]], ids=str)
async def test_system_that_is_not_a_pulsing_system_is_refused(here: Path, system: Any) -> None:
    for opening in (write_queue, read_queue):
        with pytest.raises(InvalidArgument, match="actor system"):
            await opening(system, "id")
    assert not list(here.iterdir())


@pytest.mark.parametrize("wait", ["x", "1", None, -1, float("nan"), []], ids=str)
async def test_wait_for_topic_must_be_a_number_of_seconds(wait: Any) -> None:
    with pytest.raises(InvalidArgument, match="wait_for_topic"):
        await read_queue("t", wait_for_topic=wait)


@pytest.mark.parametrize("buckets", [3, "01", b"1", 0.5, []], ids=str)
async def test_bucket_ids_must_be_a_list(buckets: Any) -> None:
    await made()
    with pytest.raises(InvalidArgument, match="bucket_ids"):
        await read_queue("t", bucket_ids=buckets)


@pytest.mark.parametrize("buckets", [[0, 1], (0, 1), {0, 1}, range(2)], ids=str)
async def test_bucket_ids_may_be_any_collection(buckets: Any) -> None:
    await made()
    async with await read_queue("t", bucket_ids=buckets) as reader:
        assert sorted(reader.buckets) == [0, 1]


@pytest.mark.parametrize(
    ("rank", "world_size", "name"),
    [("0", 2, "rank"), (0, "2", "world_size"), (0.0, 2, "rank"), ([], 2, "rank"), (0, 0, "rank")],
)
async def test_rank_must_be_a_whole_number(rank: Any, world_size: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        await read_queue("t", rank=rank, world_size=world_size)


async def test_rank_given_as_text_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidArgument, match=r"int\('0'\)"):
        await read_queue("t", rank="0", world_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", ["1", [], float("nan"), True], ids=str)
async def test_timeout_must_be_a_number_of_seconds(timeout: Any) -> None:
    await made()
    async with await read_queue("t") as reader:
        with pytest.raises(InvalidArgument, match="timeout"):
            await reader.get(wait=True, timeout=timeout)


@pytest.mark.parametrize("places", [5, None, 1.5], ids=str)
async def test_take_requires_a_list_of_offsets(places: Any) -> None:
    await made()
    async with await read_queue("t") as reader:
        with pytest.raises(InvalidArgument, match="take"):
            await reader.take(places)


@pytest.mark.parametrize("names", [["id", "id"], ["x", "x"], ["id", "x", "x"]], ids=str)
async def test_arrow_data_with_two_columns_of_one_name_is_refused(names: list[str]) -> None:
    async with await write_queue("t", backend="lance") as writer:
        with pytest.raises(SchemaError, match="column"):
            await writer.put_arrow(pa.table([pa.array([1]) for _ in names], names=names))
        assert (await writer.stats())["total_count"] == 0


async def test_rank_without_a_bucket_warns() -> None:
    await made()
    with pytest.warns(UserWarning, match="rank 5 of 8 has no bucket"):
        reader = await read_queue("t", rank=5, world_size=8)
    assert (reader.buckets, await reader.get()) == ([], [])
    await reader.close()
