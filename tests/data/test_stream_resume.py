"""Resuming a stream: exactly the rest, whatever has changed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.training_topics import add_rows, ids, make_topic, record

from persisting.data import TopicStream
from persisting.data.pinned_stream import Worker
from persisting.errors import InvalidArgument, StorageError
from persisting.queue import write_queue

pytestmark = pytest.mark.timeout(1200)  # many streams are opened, and the machine may be busy

ROWS = 1000
slow = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text.encode()) <= 1024
    read: dict[str, Any] = json.loads(text)
    return read


layouts = st.tuples(st.integers(1, 6), st.integers(1, 90), st.integers(0, 9))


@slow
@given(stops=st.lists(layouts, max_size=6), shuffle=st.sampled_from([None, 3]), data=st.data())
def test_every_row_comes_once_over_stops_with_changing_ranks(
    topic: Path, stops: list[tuple[int, int, int]], shuffle: int | None, data: st.DataObject
) -> None:
    found: Counter[int] = Counter()
    state = None
    for world_size, batch_size, batches in [*stops, (2, 64, 10_000)]:
        states = []
        for rank in range(world_size):
            stream = TopicStream(
                topic,
                "v1",
                shuffle=shuffle,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
            )
            if state is not None:
                stream.load_state_dict(state)
            for _, batch in zip(range(batches), stream, strict=False):
                found.update(batch.column("id").to_pylist())
            states.append(through_json(stream.state_dict()))
        assert all(other == states[0] for other in states), "ranks describe different positions"
        state = data.draw(st.sampled_from(states))
        if state["epoch"]:
            break
    assert found == Counter(range(ROWS))


@slow
@given(
    stops=st.lists(st.tuples(st.integers(1, 4), layouts), max_size=5),
    ahead=st.integers(0, 6),
)
def test_every_row_comes_once_with_changing_workers_that_run_ahead(
    topic: Path, stops: list[tuple[int, tuple[int, int, int]]], ahead: int
) -> None:
    found: Counter[int] = Counter()
    state: Any = None
    for workers, (world_size, batch_size, batches) in [*stops, (3, (2, 64, 10_000))]:
        for rank in range(world_size):
            loader = Loader(topic, workers, rank, world_size, batch_size, state, ahead)
            found.update(ids(loader.batches(batches)))
            following = loader.state()
        state = through_json(following) if workers == 1 else following
    assert found == Counter(range(ROWS))


several_epochs = given(
    stops=st.lists(st.tuples(st.integers(0, 3), layouts), max_size=5),
    remainder=st.sampled_from(["uneven", "padded", "dropped"]),
    ahead=st.integers(0, 4),
    data=st.data(),
)


@settings(slow, max_examples=4)
@several_epochs
def test_epochs_are_complete_over_stops_with_changing_layouts(topic: Path, **drawn: Any) -> None:
    check_epochs(topic, **drawn)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@settings(slow, max_examples=300)
@several_epochs
def test_epochs_are_complete_over_very_many_stops(topic: Path, **drawn: Any) -> None:
    check_epochs(topic, **drawn)


def check_epochs(
    topic: Path,
    stops: list[tuple[int, tuple[int, int, int]]],
    remainder: str,
    ahead: int,
    data: st.DataObject,
) -> None:
    """Stops before, at and after the end of an epoch; any rank's state is loaded into all ranks."""
    epochs = 3
    found: Counter[int] = Counter()
    state: Any = None
    largest_step = 0
    for workers, (world_size, batch_size, batches) in [*stops, (2, (3, 50, 10_000))]:
        batch_size += 40  # so that an epoch is a few steps
        largest_step = max(largest_step, world_size * batch_size)
        states = []
        for rank in range(world_size):
            loader = Loader(
                topic, workers, rank, world_size, batch_size, state, ahead,
                epochs=epochs, remainder=remainder,
            )  # fmt: skip
            found.update(ids(loader.batches(batches)))
            states.append(loader.state())
        state = data.draw(st.sampled_from(states))
        if loader.ended:
            break
    counts = [found[number] for number in range(ROWS)]
    assert len(found) <= ROWS
    if remainder == "uneven":
        assert counts == [epochs] * ROWS
    elif remainder == "padded":
        assert min(counts) >= epochs
        assert sum(counts) - epochs * ROWS < epochs * largest_step
    else:
        assert max(counts) <= epochs
        assert epochs * ROWS - sum(counts) < epochs * largest_step


class Loader:
    """Reads a stream in workers as torch's loader does: in turns, each some batches ahead."""

    def __init__(
        self,
        topic: Path,
        workers: int,
        rank: int,
        world_size: int,
        batch_size: int,
        state: Any,
        ahead: int,
        **options: Any,
    ) -> None:
        """Without workers, the stream is read as torch's loader does it in its own process."""
        self._streams = []
        self._is_single = not workers
        self.ended = False
        for _ in range(workers or 1):
            stream = TopicStream(
                topic,
                "v1",
                shuffle=3,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                **options,
            )
            if state is not None:
                stream.load_state_dict(state)
            self._streams.append(stream)
        self._workers = [
            stream._stream.batches(None if self._is_single else Worker(number, workers))
            for number, stream in enumerate(self._streams)
        ]
        self._ahead = 0 if self._is_single else ahead
        self._queues: list[list[tuple[Any, Any]]] = [[] for _ in self._workers]
        self._delivered = [stream.state_dict() for stream in self._streams]

    def batches(self, most: int) -> Any:
        for number in range(most):
            worker = number % len(self._workers)
            while len(self._queues[worker]) <= self._ahead:
                batch = next(self._workers[worker], None)
                self._queues[worker].append((batch, self._streams[worker].state_dict()))
                if batch is None:
                    break
            batch, state = self._queues[worker].pop(0)
            if batch is None:
                self.ended = True
                return
            self._delivered[worker] = state
            yield batch

    def state(self) -> dict[str, Any]:
        if self._is_single:
            return self._delivered[0]
        workers = {
            f"worker_{number}": {"dataset_state": state}
            for number, state in enumerate(self._delivered)
        }
        return {"_snapshot": {"_worker_snapshots": workers}, "_steps_since_snapshot": 0}


def test_workers_deliver_what_one_process_would(topic: Path) -> None:
    single = list(TopicStream(topic, "v1", shuffle=3, batch_size=16, epochs=2))
    streams = [TopicStream(topic, "v1", shuffle=3, batch_size=16, epochs=2) for _ in range(3)]
    workers = [s._stream.batches(Worker(n, 3)) for n, s in enumerate(streams)]
    in_turns = [next(workers[number % 3]) for number in range(len(single))]
    assert [b.column("id") for b in in_turns] == [b.column("id") for b in single]
    assert [next(worker, None) for worker in workers] == [None, None, None]


def test_state_after_the_last_batch_resumes_with_an_empty_rest(topic: Path) -> None:
    stream = TopicStream(topic, "v1", batch_size=500)
    batches = iter(stream)
    next(batches), next(batches)
    resumed = TopicStream(topic, "v1", batch_size=500)
    resumed.load_state_dict(stream.state_dict())
    assert list(resumed) == []
    assert len(ids(resumed)) == ROWS, "the iteration after it is the next epoch"


@pytest.mark.parametrize("delivered", [0, 1, 2, 3])
def test_workers_that_resumed_at_the_end_of_an_epoch_stop_in_the_next(
    topic: Path, delivered: int
) -> None:
    """The first worker is in the next epoch then, and the second has not begun with it."""
    first = TopicStream(topic, "v1", shuffle=3, batch_size=ROWS, epochs=2)
    next(iter(first))
    assert first.state_dict()["position"] == ROWS
    loader = Loader(topic, 2, 0, 1, 18, first.state_dict(), ahead=0, epochs=2)
    found = ids(loader.batches(delivered))
    assert len(found) == 18 * delivered
    for skipped in (0, delivered):  # the loader may have taken its snapshot earlier
        state = loader.state()
        if skipped:
            state = Loader(topic, 2, 0, 1, 18, first.state_dict(), ahead=0, epochs=2).state()
            state["_steps_since_snapshot"] = skipped
        resumed = TopicStream(topic, "v1", shuffle=3, batch_size=50, epochs=2)
        resumed.load_state_dict(state)
        assert sorted(found + ids(resumed)) == list(range(ROWS))


def test_earlier_iterator_does_not_move_a_stream_whose_position_was_set(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=3, batch_size=100)
    earlier = iter(stream)
    first = ids([next(earlier)])
    state = stream.state_dict()
    next(earlier), next(earlier)
    stream.load_state_dict(state)
    with pytest.raises(StorageError, match="this one is over"):
        next(earlier)
    assert stream.state_dict() == state
    assert sorted(first + ids(stream)) == list(range(ROWS))
    earlier = iter(stream)
    next(earlier)
    stream.set_epoch(4)
    with pytest.raises(StorageError, match="this one is over"):
        next(earlier)
    assert (stream.state_dict()["epoch"], stream.state_dict()["position"]) == (4, 0)


def test_refused_state_changes_nothing(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100, buckets=1)
    stream = TopicStream(folder, batch_size=30)
    batches = iter(stream)
    first = ids([next(batches)])
    state = stream.state_dict()
    for wrong in ({"versions": [99]}, {"position": 101}, {"topic": "other"}):
        with pytest.raises(StorageError):
            stream.load_state_dict({**state, **wrong})
        assert stream.state_dict() == state
    assert sorted(first + ids(batches)) == list(range(100)), "the iteration continues"


def test_state_counts_batches_that_a_loader_delivered(topic: Path) -> None:
    stream = TopicStream(topic, "v1", shuffle=4, batch_size=30, world_size=2, epochs=2)
    reference = TopicStream(topic, "v1", shuffle=4, batch_size=30, world_size=2, epochs=2)
    batches = iter(reference)
    for count in range(1, 35):
        next(batches)
        if count % 17:
            assert stream.state_dict(batches=count) == reference.state_dict()
    with pytest.raises(InvalidArgument, match="the stream ends 1 batches earlier"):
        stream.state_dict(batches=35)


def test_resume_reads_the_same_version_without_a_tag(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    stream = TopicStream(folder, shuffle=1, batch_size=30)
    first = ids([next(iter(stream))])
    state = through_json(stream.state_dict())
    add_rows(folder, range(100, 150))
    resumed = TopicStream(folder, shuffle=1, batch_size=30)
    assert resumed.rows == 150
    resumed.load_state_dict(state)
    assert sorted(first + ids(resumed)) == list(range(100))


def test_resume_at_a_version_that_was_removed_says_so(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100, buckets=1)
    state = TopicStream(folder).state_dict()
    state["versions"] = [99]
    stream = TopicStream(folder)
    with pytest.raises(StorageError, match=r"was removed.*Tag the topic and read the tag"):
        stream.load_state_dict(state)


def test_state_of_another_topic_tag_filter_or_seed_is_refused(topic: Path, tmp_path: Path) -> None:
    state = TopicStream(topic, "v1", shuffle=1, where="id > 3").state_dict()
    other = make_topic(tmp_path, 10)
    add_rows(other, range(10, 12), tag="v2")
    for stream, reason in (
        (TopicStream(other, "v1", shuffle=1, where="id > 3"), "the state is of another topic"),
        (TopicStream(topic, shuffle=1, where="id > 3"), "reads a stream without a tag"),
        (
            TopicStream(topic, "v1", shuffle=1),
            r"with where='id > 3', but this stream has where=None",
        ),
        (
            TopicStream(topic, "v1", shuffle=2, where="id > 3"),
            "with shuffle=1, but this stream has",
        ),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            stream.load_state_dict(state)
    with pytest.raises(
        InvalidArgument, match="the state is of tag 'v1', but this stream reads tag"
    ):
        TopicStream(other, "v2").load_state_dict(TopicStream(other, "v1").state_dict())


def test_state_of_a_replaced_tag_is_refused(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 10)
    state = TopicStream(folder, "v1").state_dict()
    add_rows(folder, range(10, 12), tag="v1")
    with pytest.raises(InvalidArgument, match="tag 'v1' was replaced since the state was taken"):
        TopicStream(folder, "v1").load_state_dict(state)


def test_tag_that_is_deleted_while_it_is_read_is_named(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    stream = TopicStream(folder, "v1", shuffle=1, batch_size=10)
    state = stream.state_dict()

    async def delete_tag() -> None:
        async with await write_queue(
            topic="rows",
            storage_path=str(tmp_path),
            backend="persisting",
            backend_options={"keep_versions": 0.001},
        ) as writer:
            await writer.delete_tag("v1")
            for number in range(3):
                await writer.put([record(n) for n in range(100 * number, 100 * number + 100)])
                await writer.flush()
                await writer.compact()

    asyncio.run(delete_tag())
    with pytest.raises(StorageError, match=r"tag 'v1' of .* was deleted or replaced since"):
        list(stream)
    with pytest.raises(InvalidArgument, match="there is no tag 'v1'"):
        TopicStream(folder, "v1").load_state_dict(state)


def test_long_condition_is_compared_too(topic: Path) -> None:
    where = " OR ".join(f"id = {n}" for n in range(100))
    state = through_json(TopicStream(topic, "v1", where=where).state_dict())
    TopicStream(topic, "v1", where=where).load_state_dict(state)
    with pytest.raises(InvalidArgument, match="this stream has where="):
        TopicStream(topic, "v1", where=where + " OR id = 100").load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position": 1001}, "is at row 1001 of epoch 0, and an epoch of .* has 1000 rows"),
        ({"position": -1}, "is at row -1"),
        ({"epoch": -1}, "of epoch -1"),
        ({"blocks": [0, 5]}, "impossible blocks"),
        ({"format": 99}, "upgrade persisting"),
        ({"position": "12"}, "not the state of such a stream"),
        ({"epoch": None}, "not the state of such a stream"),
    ],
)
def test_impossible_state_is_refused(topic: Path, change: dict[str, Any], reason: str) -> None:
    stream = TopicStream(topic, "v1")
    state = {**stream.state_dict(), **change}
    with pytest.raises(InvalidArgument, match=reason):
        stream.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "state", {}, {"_snapshot": 1}, {"dataset_state": 3}])
def test_value_that_is_not_a_state_is_refused(topic: Path, state: Any) -> None:
    with pytest.raises(InvalidArgument):
        TopicStream(topic, "v1").load_state_dict(state)


def test_state_of_one_worker_is_refused_by_another_layout(topic: Path) -> None:
    stream = TopicStream(topic, "v1", batch_size=10)
    next(stream._stream.batches(Worker(0, 2)))
    state = through_json(stream.state_dict())
    other = TopicStream(topic, "v1", batch_size=10)
    other.load_state_dict(state)
    with pytest.raises(InvalidArgument, match="one of 2 workers of a loader"):
        iter(other)


def test_untagged_topic_of_many_buckets_asks_for_a_tag(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 5, buckets=330)
    with pytest.raises(InvalidArgument, match="tag the topic and read the tag"):
        TopicStream(folder).state_dict()
    assert through_json(TopicStream(folder, "v1").state_dict())["tag"] == "v1"
