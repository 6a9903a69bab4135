"""to_hf: Hugging Face datasets over the rows of a tag."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from support.training_topics import make_topic, record
from torch.utils.data import DataLoader

from persisting.data import to_hf
from persisting.errors import InvalidArgument

ROWS = 1000


def test_dataset_has_the_rows_of_the_tag(topic: Path) -> None:
    dataset = to_hf(topic, "v1")
    assert isinstance(dataset, datasets.Dataset)
    assert sorted(dataset["id"]) == list(range(ROWS))
    assert all(row == record(row["id"]) for row in dataset)
    assert dataset.cache_files == []


def test_streamed_dataset_has_the_rows_of_the_tag(topic: Path) -> None:
    dataset = to_hf(topic, "v1", streaming=True)
    assert isinstance(dataset, datasets.IterableDataset)
    rows = list(dataset)
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert all(row == record(row["id"]) for row in rows)


def test_columns_and_condition_apply(topic: Path) -> None:
    for streaming in (False, True):
        dataset = to_hf(topic, "v1", streaming=streaming, columns=["id"], where="id < 20")
        assert sorted(row["id"] for row in dataset) == list(range(20))
        assert list(dataset.features) == ["id"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic of several blocks."""
    return make_topic(tmp_path_factory.mktemp("large"), 20_000)


def test_streamed_dataset_is_divided_among_nodes_and_workers(large: Path) -> None:
    dataset = to_hf(large, "v1", streaming=True, columns=["id"])
    found: list[int] = []
    for rank in range(2):
        part = split_dataset_by_node(dataset, rank=rank, world_size=2)
        loader = DataLoader(part, batch_size=None, num_workers=1, multiprocessing_context="fork")
        found += [row["id"] for row in loader]
    assert sorted(found) == list(range(20_000))


def test_streamed_dataset_resumes(large: Path) -> None:
    dataset = to_hf(large, "v1", streaming=True, columns=["id"])
    rows = iter(dataset)
    found = [next(rows)["id"] for _ in range(12_345)]
    state = dataset.state_dict()
    resumed = to_hf(large, "v1", streaming=True, columns=["id"])
    resumed.load_state_dict(state)
    assert found + [row["id"] for row in resumed] == [row["id"] for row in dataset]


def test_wrong_column_raises(topic: Path) -> None:
    with pytest.raises(InvalidArgument, match="columns names 'nope'"):
        to_hf(topic, "v1", columns=["nope"])
