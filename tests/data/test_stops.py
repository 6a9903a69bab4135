"""Very many stops and resumes, with worker processes that read ahead.

The workers are real processes, and outlive a stop: starting some for each of 1,000 stops, as
``tests/torch`` does it with torch's own loader, takes hours.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from persisting.data import TopicStream
from persisting.data.pinned_stream import Worker

ROWS = 1000
WORKERS = 3


def serve(pipe: Connection) -> None:
    """Read a stream as one of some workers: return batches, each with the state after it."""
    while (asked := pipe.recv()) is not None:
        topic, options, state, number, count, most = asked
        stream = TopicStream(topic, "v1", columns=["id"], **options)
        if state is not None:
            stream.load_state_dict(state)
        batches = stream._stream.batches(Worker(number, count))
        replies = [([], stream.state_dict())]
        for _, batch in zip(range(most), batches, strict=False):
            replies.append((batch.column("id").to_pylist(), stream.state_dict()))
        pipe.send(replies)


@contextmanager
def worker_processes() -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(WORKERS)]
    processes = [context.Process(target=serve, args=[end], daemon=True) for _, end in ends]
    for process, (_, end) in zip(processes, ends, strict=True):
        process.start()
        end.close()  # so that a worker that has failed is noticed
    try:
        yield [end for end, _ in ends]
        for end, _ in ends:
            end.send(None)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()


def read_epochs(topic: Path, pipes: list[Connection], seed: int, stops: int) -> int:
    """Read two epochs with random stops; each part has other ranks, workers and batches."""
    choice = random.Random(seed)
    found: Counter[int] = Counter()
    state: Any = None
    for stop in range(stops + 1):
        world_size, workers = choice.randint(1, 3), choice.randint(1, WORKERS)
        options = {
            "shuffle": seed,
            "epochs": 2,
            "world_size": world_size,
            "batch_size": choice.randint(1, 60),
        }
        count = 10**9 if stop == stops else choice.randint(0, 9)
        ahead = choice.randint(0, 3)
        states = []
        for rank in range(world_size):
            for number, pipe in enumerate(pipes[:workers]):
                most = -(-count // workers) + ahead
                pipe.send((topic, {**options, "rank": rank}, state, number, workers, most))
            read = [pipe.recv() for pipe in pipes[:workers]]
            delivered = min(count, sum(len(batches) - 1 for batches in read))
            places = [0] * workers
            for batch in range(delivered):
                places[batch % workers] += 1
                found.update(read[batch % workers][places[batch % workers]][0])
            snapshots = {
                f"worker_{number}": {"dataset_state": read[number][place][1]}
                for number, place in enumerate(places)
            }
            states.append(
                {"_snapshot": {"_worker_snapshots": snapshots}, "_steps_since_snapshot": 0}
            )
        state = choice.choice(states)
        if delivered < count:
            break
    assert found == Counter(dict.fromkeys(range(ROWS), 2)), f"seed {seed}"
    return stop


@pytest.mark.parametrize(
    "stops",
    [15, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])],
)
def test_stops_lose_and_repeat_nothing(topic: Path, stops: int) -> None:
    done = seed = 0
    with worker_processes() as pipes:
        while done < stops:
            seed += 1
            done += max(1, read_epochs(topic, pipes, seed, 20))
            print(f"{done} stops, seed {seed}", flush=True)
