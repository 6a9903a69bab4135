"""TopicDataset: rows of a topic by number."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.training_topics import add_rows, make_topic, record

from persisting.data import TopicDataset
from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.queue import write_queue

ROWS = 1000


def test_dataset_has_every_row_of_the_tag_once(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1")
    assert len(dataset) == ROWS
    rows = dataset.__getitems__(range(ROWS))
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert all(row == record(row["id"]) for row in rows)


def test_single_rows_are_those_of_a_batch(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1")
    wanted = [999, 0, 500, 0, -1]
    assert dataset.__getitems__(wanted) == [dataset[i] for i in wanted]
    assert dataset[np.int64(3)] == dataset[3]


@pytest.mark.parametrize("index", [1000, -1001, 2**62])
def test_index_outside_of_the_dataset_raises(topic: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"there is no row {index}: the dataset has 1000 rows"):
        TopicDataset(topic, "v1")[index]


def test_index_that_is_not_a_number_raises(topic: Path) -> None:
    with pytest.raises(TypeError):
        TopicDataset(topic, "v1")["id"]  # type: ignore[index]


def test_iterating_over_a_dataset_ends(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1", where="id < 5")
    assert sorted(row["id"] for row in dataset) == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]


def test_condition_numbers_only_matching_rows(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1", where="`group` = 3 AND id > 100", columns=["id"])
    expected = [n for n in range(ROWS) if n % 7 == 3 and n > 100]
    assert len(dataset) == len(expected)
    assert sorted(row["id"] for row in dataset.__getitems__(range(len(dataset)))) == expected
    assert dataset.schema.names == ["id"]


def test_columns_of_a_dataset_keep_the_order_of_the_argument(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1", columns=["score", "id"])
    assert list(dataset[0]) == ["score", "id"]


def test_numpy_rows_have_vectors_without_a_copy(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1", format="numpy")
    first, second = dataset.__getitems__([1, 2])
    assert first["vector"].dtype == np.float32
    assert first["vector"].base is not None
    assert first["vector"].base is second["vector"].base
    assert isinstance(first["id"], np.int64)
    assert isinstance(first["text"], str)


def test_take_returns_arrow(topic: Path) -> None:
    batch = TopicDataset(topic, "v1").take([5, 3])
    assert isinstance(batch, pa.RecordBatch)
    assert batch.num_rows == 2


def test_dataset_stays_as_it_was_while_the_topic_grows(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 50)
    tagged, newest = TopicDataset(folder, "v1"), TopicDataset(folder)
    add_rows(folder, range(50, 80), tag="v2")
    assert len(tagged) == len(newest) == 50
    assert sorted(r["id"] for r in newest.__getitems__(range(50))) == list(range(50))
    assert len(TopicDataset(folder)) == len(TopicDataset(folder, "v2")) == 80


def test_empty_topic_is_an_empty_dataset(tmp_path: Path) -> None:
    dataset = TopicDataset(make_topic(tmp_path, 0), "v1")
    assert len(dataset) == 0
    assert dataset.__getitems__([]) == []


def test_dataset_pickles(topic: Path) -> None:
    dataset = TopicDataset(topic, "v1", where="id < 10", format="numpy")
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert len(copy) == 10
    assert copy[4]["id"] == dataset[4]["id"]
    assert len(pickle.dumps(dataset)) < 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tag": "none"}, "there is no tag 'none'; there are: 'v1'"),
        ({"columns": ["nope"]}, "columns names 'nope'; the fields are: 'id', 'text'"),
        ({"columns": []}, "columns names no field"),
        ({"columns": "id"}, "columns must be a list of field names"),
        ({"columns": ["id", "id"]}, "columns names 'id' twice"),
        ({"where": "nope = 1"}, "where='nope = 1' names 'nope'"),
        ({"where": "id >"}, "where='id >' cannot be used"),
        ({"where": ""}, "where must be an SQL condition"),
        ({"format": "pandas"}, "format must be one of 'python', 'numpy', 'torch'"),
    ],
)
def test_wrong_argument_raises_when_the_dataset_is_created(
    topic: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TopicDataset(topic, **{"tag": "v1", **arguments})


def test_missing_topic_raises(tmp_path: Path) -> None:
    with pytest.raises(NoSuchTopic):
        TopicDataset(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="path must be a topic's folder"):
        TopicDataset(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="is an address"):
        TopicDataset("ftp://bucket/topic")


def test_rows_that_retention_left_are_read_by_their_offsets(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100, buckets=1)
    add_rows(folder, range(100, 200))

    async def retain() -> None:
        async with await write_queue(topic=folder.name, storage_path=str(tmp_path)) as writer:
            assert (await writer.retain(rows=100))["dropped"] == 100
            await writer.tag("later")

    asyncio.run(retain())
    for where, expected in ((None, range(100, 200)), ("id >= 150", range(150, 200))):
        dataset = TopicDataset(folder, "later", where=where, columns=["id"])
        assert [row["id"] for row in dataset.__getitems__(range(len(dataset)))] == [*expected]
    earlier = TopicDataset(folder, "v1", columns=["id"])
    assert [row["id"] for row in earlier.__getitems__(range(100))] == [*range(100)]


def test_fields_that_only_some_buckets_have_are_none_elsewhere(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 20)

    async def put() -> None:
        async with await write_queue(topic=folder.name, storage_path=str(tmp_path)) as writer:
            await writer.put({"id": 20, "extra": "x"})
            await writer.tag("later")

    asyncio.run(put())
    dataset = TopicDataset(folder, "later")
    rows = {row["id"]: row for row in dataset.__getitems__(range(21))}
    assert rows[20] == {**dict.fromkeys(dataset.schema.names), "id": 20, "extra": "x"}
    assert rows[3] == {**record(3), "extra": None}
    assert [row["id"] for row in TopicDataset(folder, "later", where="extra = 'x'")] == [20]  # type: ignore[attr-defined]


def test_compaction_after_the_tag_changes_nothing(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 50, buckets=1)
    for start in range(50, 100, 10):
        add_rows(folder, range(start, start + 10), tag="v2")
    dataset = TopicDataset(folder, "v2")
    before = dataset.__getitems__(range(100))

    async def compact() -> None:
        async with await write_queue(topic=folder.name, storage_path=str(tmp_path)) as writer:
            await writer.compact()

    asyncio.run(compact())
    assert dataset.__getitems__(range(100)) == before
    assert TopicDataset(folder, "v2").__getitems__(range(100)) == before


@pytest.mark.parametrize(
    "where",
    ["random() < 0.5", "id > 3 AND UUID () > 'a'", "created < now()", "day = current_date"],
)
def test_condition_that_may_select_other_rows_later_is_refused(topic: Path, where: str) -> None:
    with pytest.raises(InvalidArgument, match="may select other rows in each process"):
        TopicDataset(topic, "v1", where=where)


def test_names_of_functions_in_texts_and_fields_are_not_taken_for_functions(topic: Path) -> None:
    where = "text <> 'now()' AND text <> 'it''s random()' AND `id` < 10"
    assert len(TopicDataset(topic, "v1", where=where)) == 10
