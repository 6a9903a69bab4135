"""Real loaders of torch and torchdata, with real worker processes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from persisting.data import TopicDataset, TopicStream
from persisting.errors import InvalidArgument

ROWS = 1000


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def joined(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def stream_of(topic: Path, **arguments: Any) -> TopicStream:
    return TopicStream(topic, "v1", **{"shuffle": 3, "format": "torch", **arguments})


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_deliver_the_order_of_one_process(topic: Path, context: str, workers: int) -> None:
    single = ids(stream_of(topic, batch_size=16, epochs=2))
    stream = stream_of(topic, batch_size=16, epochs=2)
    loader = DataLoader(
        stream, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    assert ids(loader) == single
    with pytest.raises(InvalidArgument, match="read in the workers of a loader"):
        stream.state_dict()


def test_loader_without_workers_has_the_order_of_one_process(topic: Path) -> None:
    loader = DataLoader(stream_of(topic, batch_size=16), batch_size=None)
    assert ids(loader) == ids(stream_of(topic, batch_size=16))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_map_style_dataset_works_in_workers(topic: Path, context: str) -> None:
    dataset = TopicDataset(topic, "v1", format="torch", columns=["id", "vector"])
    loader = DataLoader(
        dataset,
        batch_size=50,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        generator=torch.Generator().manual_seed(1),
    )
    batches = list(loader)
    assert sorted(ids(batches)) == list(range(ROWS))
    assert all(torch.equal(b["vector"][:, 0], b["id"].float()) for b in batches)


def test_arrow_batches_from_workers_are_not_sent_with_their_window(topic: Path) -> None:
    loader = DataLoader(
        TopicStream(topic, "v1", batch_size=10),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert all(batch.get_total_buffer_size() < 5000 for batch in loader)


def test_persistent_workers_read_the_next_epoch(topic: Path) -> None:
    loader = DataLoader(
        stream_of(topic, batch_size=100),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    both = ids(loader) + ids(loader)
    assert both == ids(stream_of(topic, batch_size=100, epochs=2))


def test_batches_of_a_plain_loader_are_counted_by_the_caller(topic: Path) -> None:
    stream = stream_of(topic, batch_size=20)
    loader = DataLoader(
        stream, batch_size=None, num_workers=2, multiprocessing_context="fork", prefetch_factor=4
    )
    found = [ids([batch]) for _, batch in zip(range(13), loader, strict=False)]
    state = json.loads(json.dumps(stream.state_dict(batches=13)))
    resumed = stream_of(topic, batch_size=7)
    resumed.load_state_dict(state)
    assert sorted(joined(found) + ids(resumed)) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 4])
def test_stateful_loader_resumes_exactly(topic: Path, workers: int, every: int) -> None:
    whole = ids(stream_of(topic, batch_size=30, epochs=2))

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(
            stream_of(topic, batch_size=30, epochs=2),
            batch_size=None,
            num_workers=workers,
            snapshot_every_n_steps=every,
        )

    found: list[int] = []
    state = None
    while True:
        current = loader()
        if state is not None:
            current.load_state_dict(state)
        batches = iter(current)
        taken = [batch for _, batch in zip(range(18), batches, strict=False)]
        found += ids(taken)
        state = current.state_dict()
        if len(taken) < 18:
            break
    assert found == whole


@pytest.mark.parametrize("every", [1, 5])
def test_stateful_loader_changes_ranks_and_workers(topic: Path, every: int) -> None:
    run_stops(topic, seed=every, stops=6, every=every)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_thousand_stops_lose_and_repeat_nothing(topic: Path) -> None:
    done, seed = 0, 0
    while done < 1000:
        seed += 1
        done += run_stops(topic, seed=seed, stops=20, every=1 + seed % 3)


def run_stops(topic: Path, *, seed: int, stops: int, every: int) -> int:
    """Read an epoch with random stops; each resumes with other ranks and workers."""
    choice = random.Random(seed)
    found: Counter[int] = Counter()
    state: Any = None
    done = 0
    for stop in range(stops + 1):
        world_size, workers = choice.randint(1, 3), choice.choice([0, 0, 1, 2, 3])
        batch_size = choice.randint(1, 20)
        count = 10_000 if stop == stops else choice.randint(0, 8)
        states = []
        for rank in range(world_size):
            stream = stream_of(topic, batch_size=batch_size, rank=rank, world_size=world_size)
            if state is not None:
                stream.load_state_dict(state)
            loader = StatefulDataLoader(
                stream, batch_size=None, num_workers=workers, snapshot_every_n_steps=every
            )
            if count:
                for taken, batch in enumerate(loader, 1):
                    found.update(batch["id"].tolist())
                    if taken == count:
                        break
                states.append(loader.state_dict())
            del loader
        if states:
            state = choice.choice(states)
            done += 1
        if state is not None and state.get("_iterator_finished"):
            break
    assert found == Counter(range(ROWS))
    return done


def test_state_of_the_loader_is_refused_by_another_topic(topic: Path, tmp_path: Path) -> None:
    from support.training_topics import make_topic

    loader = StatefulDataLoader(stream_of(topic, batch_size=30), batch_size=None, num_workers=2)
    next(iter(loader))
    other = make_topic(tmp_path, 10)
    with pytest.raises(InvalidArgument, match="the state is of another topic"):
        stream_of(other).load_state_dict(loader.state_dict())


def test_following_stream_resumes_in_workers(tmp_path: Path) -> None:
    from support.training_topics import add_rows, make_topic

    folder = make_topic(tmp_path, 200, buckets=4)

    def loader() -> StatefulDataLoader:
        stream = TopicStream(folder, follow=True, batch_size=10, idle_timeout=0.0, format="torch")
        return StatefulDataLoader(stream, batch_size=None, num_workers=2)

    first = loader()
    found = [ids([batch]) for _, batch in zip(range(7), first, strict=False)]
    state = first.state_dict()
    add_rows(folder, range(200, 250))
    second = loader()
    second.load_state_dict(state)
    assert sorted(joined(found) + ids(second)) == list(range(250))
    merged = TopicStream(folder, follow=True, batch_size=10, idle_timeout=0.0, format="torch")
    merged.load_state_dict(state)
    assert sorted(joined(found) + ids(merged)) == list(range(250))
