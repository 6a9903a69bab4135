"""Stops and resumes of a loader with real worker processes."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from trainingbench.rows import TAG

_MOST_STOPS = 20


def run(topic: Path, stops: int) -> tuple[int, int]:
    """Read epochs with stops; return how many rows were missing, and how many came twice."""
    import torch  # noqa: F401

    from persisting.data import TopicStream

    warnings.simplefilter("ignore")
    rows = TopicStream(topic, TAG).rows
    done = seed = missing = twice = 0
    while done < stops:
        seed += 1
        found, stopped = _epoch(topic, seed, min(_MOST_STOPS, stops - done))
        done += max(1, stopped)
        missing += sum(number not in found for number in range(rows))
        twice += sum(count - 1 for count in found.values())
    return missing, twice


def _epoch(topic: Path, seed: int, stops: int) -> tuple[Counter[int], int]:
    """Read one epoch, and stop at random; each part has other ranks, workers and batches."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from persisting.data import TopicStream

    choice = random.Random(seed)
    found: Counter[int] = Counter()
    state: Any = None
    for stop in range(stops + 1):
        world_size, workers = choice.randint(1, 3), choice.choice([0, 1, 2])
        batch_size, every = choice.randint(1, 40), choice.randint(1, 4)
        count = choice.randint(1, 6) if stop < stops else 10**9
        states = []
        for rank in range(world_size):
            stream = TopicStream(
                topic,
                TAG,
                shuffle=seed,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                columns=["id"],
                format="torch",
            )
            if state is not None:
                stream.load_state_dict(state)
            loader = StatefulDataLoader(
                stream, batch_size=None, num_workers=workers, snapshot_every_n_steps=every
            )
            for taken, batch in enumerate(loader, 1):
                found.update(batch["id"].tolist())
                if taken == count:
                    break
            states.append(loader.state_dict())
        state = choice.choice(states)
        if state["_iterator_finished"]:
            return found, stop
    return found, stops
