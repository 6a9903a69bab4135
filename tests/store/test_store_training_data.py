"""Datasets and streams of topics in an object store."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest
from support.object_stores import SECRET, SeaweedFS, url

from persisting.data import TopicDataset, TopicStream
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.queue import write_queue


@pytest.fixture
async def given(server: SeaweedFS, prefix: str) -> dict[str, Any]:
    """A topic of 40 tagged rows, 10 flushed ones and 5 in the log of an owner that has ended."""
    where: dict[str, Any] = {"storage_path": url(prefix), "storage_options": server.options()}
    options = {"flush_interval": None}
    writer = await write_queue(
        topic="t", **where, durable=True, num_buckets=2, backend_options=options
    )
    async with writer:
        await writer.put([{"id": str(n), "n": n, "even": n % 2 == 0} for n in range(40)])
        await writer.tag("first")
        await writer.put([{"id": str(n), "n": n, "even": n % 2 == 0} for n in range(40, 50)])
    return {"path": f"{url(prefix)}/t", "storage_options": server.options()}


def numbers(rows: Any) -> list[int]:
    return sorted(row["n"] for row in rows)


async def test_dataset_reads_a_tag_or_what_was_flushed(given: dict[str, Any]) -> None:
    tagged = TopicDataset(**given, tag="first")
    assert len(tagged) == 40
    assert numbers(tagged[n] for n in range(40)) == list(range(40))
    assert len(TopicDataset(**given)) == 50
    even = TopicDataset(**given, where="even", columns=["n"])
    assert numbers(even[n] for n in range(len(even))) == list(range(0, 50, 2))
    with pytest.raises(NoSuchTopic):
        TopicDataset(given["path"] + "-not", storage_options=given["storage_options"])


async def test_stream_resumes_from_a_state_without_credentials(given: dict[str, Any]) -> None:
    options: dict[str, Any] = {"tag": "first", "batch_size": 8, "shuffle": 7, "format": "python"}
    whole = [row for batch in TopicStream(**given, **options) for row in batch]
    assert numbers(whole) == list(range(40))
    stream = TopicStream(**given, **options)
    batches = iter(stream)
    first = next(batches) + next(batches)
    state = json.dumps(stream.state_dict())
    assert SECRET not in state
    assert SECRET not in repr(stream.__dict__)
    again = TopicStream(**given, **options)
    again.load_state_dict(json.loads(state))
    assert first + [row for batch in again for row in batch] == whole


async def test_following_stream_reads_what_is_only_in_the_log(given: dict[str, Any]) -> None:
    root, _, topic = given["path"].rpartition("/")
    options = {"flush_interval": None}
    where = {"topic": topic, "storage_path": root, "storage_options": given["storage_options"]}
    async with await write_queue(**where, backend_options=options) as writer:
        await writer.put([{"id": str(n), "n": n, "even": True} for n in range(50, 55)])
        stream = TopicStream(**given, follow=True, idle_timeout=0.5, format="python")
        assert numbers(row for batch in stream for row in batch) == list(range(55))
        state = json.dumps(stream.state_dict())
        assert SECRET not in state
        await writer.put([{"id": "x", "n": 55, "even": False}])
        again = TopicStream(**given, follow=True, idle_timeout=0.5, format="python")
        again.load_state_dict(json.loads(state))
        assert numbers(row for batch in again for row in batch) == [55]


def _read(dataset: TopicDataset) -> list[int]:
    return numbers(dataset[n] for n in range(len(dataset)))


async def test_dataset_is_read_in_another_process_with_its_credentials(
    given: dict[str, Any],
) -> None:
    dataset = TopicDataset(**given, tag="first")
    assert SECRET not in repr(dataset)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_read, [dataset]) == list(range(40))


async def test_storage_options_of_a_folder_are_refused(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgument, match="are for topics in an object store"):
        TopicDataset(tmp_path, storage_options={"aws_region": "x"})
