"""TopicStream: batches, ranks, epochs, formats."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.training_topics import ids, make_topic

from persisting.data import TopicStream
from persisting.errors import InvalidArgument, StorageError

ROWS = 1000


@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("where", [None, "`group` < 3"])
def test_ranks_together_yield_every_row_once(
    topic: Path, shuffle: int | None, world_size: int, where: str | None
) -> None:
    found: list[int] = []
    lengths = []
    for rank in range(world_size):
        stream = TopicStream(
            topic,
            "v1",
            batch_size=32,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
            where=where,
        )
        batches = list(stream)
        lengths.append(len(batches))
        found += ids(batches)
    expected = [n for n in range(ROWS) if where is None or n % 7 < 3]
    assert sorted(found) == expected
    assert len(set(lengths)) == 1, "ranks do not advance in lock step"


def test_order_does_not_depend_on_batches_and_ranks(topic: Path) -> None:
    whole = ids(TopicStream(topic, "v1", batch_size=1000, shuffle=1))
    assert ids(TopicStream(topic, "v1", batch_size=37, shuffle=1)) == whole
    ranks = [
        list(TopicStream(topic, "v1", batch_size=10, shuffle=1, rank=rank, world_size=4))
        for rank in range(4)
    ]
    in_steps = [number for step in zip(*ranks, strict=True) for number in ids(step)]
    assert in_steps == whole


def test_shuffled_order_is_not_the_stored_one(topic: Path) -> None:
    stored = ids(TopicStream(topic, "v1"))
    shuffled = ids(TopicStream(topic, "v1", shuffle=0))
    assert stored != shuffled
    assert ids(TopicStream(topic, "v1", shuffle=0)) == shuffled
    assert ids(TopicStream(topic, "v1", shuffle=1)) != shuffled


def test_each_epoch_has_another_order_and_the_stream_ends_after_the_last(topic: Path) -> None:
    found = ids(TopicStream(topic, "v1", shuffle=5, epochs=3))
    epochs = [found[i * ROWS : (i + 1) * ROWS] for i in range(3)]
    assert len(found) == 3 * ROWS
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_second_iteration_is_the_next_epoch(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=5)
    twice = ids(stream) + ids(stream)
    assert twice == ids(TopicStream(topic, "v1", shuffle=5, epochs=2))


def test_set_epoch_chooses_the_order(topic: Path) -> None:
    both = ids(TopicStream(topic, "v1", shuffle=5, epochs=2))
    stream = TopicStream(topic, "v1", shuffle=5)
    stream.set_epoch(1)
    assert ids(stream) == both[ROWS:]


def test_endless_stream_continues_after_each_epoch(topic: Path) -> None:
    stream = iter(TopicStream(topic, "v1", batch_size=400, epochs=None))
    assert [next(stream).num_rows for _ in range(7)] == [400, 400, 200, 400, 400, 200, 400]


@pytest.mark.parametrize(
    ("remainder", "rows"),
    [("uneven", [[300, 300], [200, 200]]), ("padded", [[300] * 2] * 2), ("dropped", [[300, 300]])],
)
def test_last_step_is_padded_dropped_or_uneven_as_requested(
    topic: Path, remainder: str, rows: list[list[int]]
) -> None:
    found = [
        [
            batch.num_rows
            for batch in TopicStream(
                topic, "v1", batch_size=300, rank=rank, world_size=2, remainder=remainder
            )
        ]
        for rank in range(2)
    ]
    assert [list(step) for step in zip(*found, strict=True)] == rows


def test_padding_repeats_rows_of_the_start(topic: Path) -> None:
    whole = ids(TopicStream(topic, "v1", shuffle=3))
    padded = ids(TopicStream(topic, "v1", shuffle=3, batch_size=300, remainder="padded"))
    assert padded == whole + whole[:200]


def test_few_rows_are_padded_for_many_ranks(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 3)
    found = []
    for rank in range(5):
        stream = TopicStream(
            folder, "v1", batch_size=2, rank=rank, world_size=5, remainder="padded", shuffle=1
        )
        found += ids(stream)
    assert len(found) == 10
    assert set(found) == {0, 1, 2}


def test_rank_without_a_row_yields_an_empty_batch(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 2)
    sizes = [
        [b.num_rows for b in TopicStream(folder, "v1", batch_size=1, rank=rank, world_size=3)]
        for rank in range(3)
    ]
    assert sorted(sizes) == [[0], [1], [1]]


def test_numpy_batches_share_memory_with_arrow(topic: Path) -> None:
    batch = next(iter(TopicStream(topic, "v1", format="numpy", batch_size=8)))
    assert set(batch) == {"id", "text", "score", "group", "vector"}
    assert batch["vector"].shape == (8, 3)
    assert batch["vector"].dtype == np.float32
    assert not batch["vector"].flags.owndata
    assert batch["text"][0] == f"row {batch['id'][0]}"
    assert np.array_equal(batch["vector"][:, 0], batch["id"].astype(np.float32))


def test_python_batches_are_lists_of_dicts(topic: Path) -> None:
    batch = next(iter(TopicStream(topic, "v1", format="python", columns=["id", "text"])))
    assert batch[0] == {"id": batch[0]["id"], "text": f"row {batch[0]['id']}"}


def test_arrow_batches_have_one_schema(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=2, batch_size=64)
    assert {batch.schema for batch in stream} == {stream.schema}
    assert all(isinstance(batch, pa.RecordBatch) for batch in stream)
    assert stream.rows == ROWS


def test_stream_left_early_is_continued(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=2, batch_size=64)
    whole = ids(TopicStream(topic, "v1", shuffle=2))
    first = iter(stream)
    begun = ids([next(first), next(first)])
    assert begun + ids(stream) == whole
    with pytest.raises(StorageError, match="another iteration of this stream has begun"):
        next(first)


def test_stream_pickles_with_its_position(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=2, batch_size=64)
    next(iter(stream))
    copy = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert copy.state_dict() == stream.state_dict()
    assert ids(copy) == ids(stream)


def test_empty_topic_yields_nothing(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 0)
    assert list(TopicStream(folder, "v1", shuffle=1, epochs=3)) == []
    with pytest.raises(InvalidArgument, match="epochs=None would wait forever"):
        list(TopicStream(folder, "v1", epochs=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number from 1, got 2.5"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2, got 2"),
        ({"rank": -1}, "rank must be a whole number from 0"),
        ({"world_size": 0}, "world_size must be a whole number from 1"),
        ({"shuffle": True}, "shuffle must be a seed"),
        ({"shuffle": -1}, "shuffle must be a seed"),
        ({"epochs": 0}, "epochs must be a whole number from 1"),
        ({"remainder": "keep"}, "remainder must be one of 'uneven', 'padded', 'dropped'"),
        ({"format": "pandas"}, "format must be one of 'arrow', 'python', 'numpy', 'torch'"),
        ({"idle_timeout": 1.0}, "a stream that does not follow has no idle_timeout"),
        ({"follow": True}, "follow=True has no tag"),
        ({"follow": True, "tag": None, "shuffle": 1}, "follow=True has no shuffle"),
        ({"follow": True, "tag": None, "epochs": 2}, "follow=True has no epochs"),
    ],
)
def test_wrong_argument_raises_when_the_stream_is_created(
    topic: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TopicStream(topic, **{"tag": "v1", **arguments})


@pytest.mark.parametrize(
    "where",
    ["random() < 0.5", "id > 3 AND UUID () > 'a'", "created < now()", "day = current_date"],
)
def test_condition_that_may_select_other_rows_later_is_refused(topic: Path, where: str) -> None:
    with pytest.raises(InvalidArgument, match="may select other rows in each process"):
        TopicStream(topic, "v1", where=where)


def test_names_of_functions_in_texts_and_fields_are_not_taken_for_functions(topic: Path) -> None:
    where = "text <> 'now()' AND text <> 'it''s random()' AND `id` < 10"
    assert TopicStream(topic, "v1", where=where).rows == 10
