"""Torch values of datasets and streams."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import IterableDataset

from persisting.data import TopicDataset, TopicStream
from persisting.data.batch_formats import to_batch
from persisting.queue import write_queue


def test_stream_is_an_iterable_dataset(topic: Path) -> None:
    assert isinstance(TopicStream(topic, "v1"), IterableDataset)


def test_batches_are_tensors_and_lists(topic: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(iter(TopicStream(topic, "v1", format="torch", shuffle=1, batch_size=8)))
    assert batch["vector"].dtype == torch.float32
    assert batch["vector"].shape == (8, 3)
    assert torch.equal(batch["vector"][:, 0], batch["id"].float())
    assert batch["id"].dtype == torch.int64
    assert batch["text"] == [f"row {n}" for n in batch["id"].tolist()]


def test_tensors_share_the_memory_of_arrow() -> None:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype="f4")), 3)
    column = to_batch(pa.record_batch({"vector": values}), "torch")["vector"]
    assert column.data_ptr() == values.values.buffers()[1].address


def test_batches_can_be_changed_without_changing_others(topic: Path) -> None:
    plain = [b["id"].clone() for b in TopicStream(topic, "v1", format="torch", batch_size=64)]
    changed = []
    for batch in TopicStream(topic, "v1", format="torch", batch_size=64):
        changed.append(batch["id"].clone())
        batch["id"].zero_()
    assert all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_rows_are_tensors_and_texts(topic: Path) -> None:
    row = TopicDataset(topic, "v1", format="torch")[7]
    assert row["vector"].shape == (3,)
    assert row["id"].item() == int(row["text"].removeprefix("row "))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    async def put() -> None:
        async with await write_queue(
            topic="mixed", storage_path=str(tmp_path), num_buckets=1, backend="persisting"
        ) as writer:
            await writer.put(
                [
                    {
                        "id": 0,
                        "flag": True,
                        "tokens": [1, 2, 3],
                        "count": 5,
                        "x": 0.5,
                        "d": {"a": 1},
                    },
                    {"id": 1, "flag": False, "tokens": [4], "count": None, "x": None, "d": None},
                ]
            )
            await writer.tag("v1")

    asyncio.run(put())
    return tmp_path / "mixed"


def test_missing_and_ragged_values_have_no_surprises(mixed: Path) -> None:
    batch = next(iter(TopicStream(mixed, "v1", format="torch")))
    assert batch["flag"].tolist() == [True, False]
    assert [tokens.tolist() for tokens in batch["tokens"]] == [[1, 2, 3], [4]]
    assert batch["count"] == [5, None]
    assert torch.isnan(batch["x"][1])
    assert batch["d"] == [{"a": 1}, None]
