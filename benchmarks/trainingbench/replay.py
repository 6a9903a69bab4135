"""Batches by priority out of many records, with the update of priorities that follows each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainingbench.rows import BATCH, DIMENSIONS, TEXT_BYTES, tables

Step = Callable[[], None]
_TURN_SECONDS = 0.25


def ours(topic: Path, cache: Path) -> Step:
    """Every field of the rows, as Arrow arrays."""
    from persisting.data import ReplayBuffer

    buffer = ReplayBuffer(topic, cache_path=cache)
    random = np.random.default_rng(1)

    def step() -> None:
        sample = buffer.sample(BATCH, by="priority")
        assert len(sample.rows.column("embedding").values) == BATCH * DIMENSIONS
        buffer.update_priorities(sample.keys, random.random(BATCH))

    return step


def torchrl(folder: Path, rows: int) -> Step:
    """The same bytes as tensors in memory-mapped storage; the text is a tensor of bytes."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer

    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyMemmapStorage(rows, scratch_dir=str(folder)),
        batch_size=BATCH,
        priority_key="td_error",
    )
    for part in tables(rows):
        count = part.num_rows
        text = np.frombuffer(part["text"].chunk(0).buffers()[2], np.uint8)
        vectors = part["embedding"].chunk(0).flatten().to_numpy().reshape(count, DIMENSIONS)
        values = {
            "id": torch.from_numpy(part["id"].to_numpy().copy()),
            "reward": torch.from_numpy(part["reward"].to_numpy().copy()),
            "text": torch.from_numpy(text.reshape(count, TEXT_BYTES).copy()),
            "embedding": torch.from_numpy(vectors.copy()),
            "td_error": torch.ones(count),
        }
        buffer.extend(TensorDict(values, batch_size=[count]))
    random = np.random.default_rng(1)

    def step() -> None:
        sample = buffer.sample()
        assert sample["embedding"].shape == (BATCH, DIMENSIONS)
        sample["td_error"] = torch.from_numpy(random.random(BATCH))
        buffer.update_tensordict_priority(sample)

    return step


def has_torchrl() -> bool:
    """Whether torchrl is installed, and its compiled part fits this version of torch."""
    try:
        import torchrl
        import torchrl._torchrl
    except ImportError:
        return False
    return bool(torchrl.__version__)


def numpy_memmap(folder: Path, rows: int) -> Step:
    """The same bytes in memory-mapped arrays, sampled by a plain sum tree."""
    folder.mkdir()
    arrays = {
        name: np.memmap(folder / name, dtype, "w+", shape=(rows, *shape))
        for name, dtype, shape in (
            ("id", np.int64, ()),
            ("reward", np.float64, ()),
            ("text", np.uint8, (TEXT_BYTES,)),
            ("embedding", np.float32, (DIMENSIONS,)),
        )
    }
    first = 0
    for part in tables(rows):
        end = first + part.num_rows
        text = np.frombuffer(part["text"].chunk(0).buffers()[2], np.uint8)
        arrays["id"][first:end] = part["id"].to_numpy()
        arrays["reward"][first:end] = part["reward"].to_numpy()
        arrays["text"][first:end] = text.reshape(-1, TEXT_BYTES)
        arrays["embedding"][first:end] = (
            part["embedding"].chunk(0).flatten().to_numpy().reshape(-1, DIMENSIONS)
        )
        first = end
    leaves = 1 << (rows - 1).bit_length()
    tree = np.zeros(2 * leaves)
    tree[leaves : leaves + rows] = 1.0
    for node in range(leaves.bit_length() - 1, 0, -1):
        below = tree[1 << node : 2 << node]
        tree[1 << (node - 1) : 1 << node] = below[0::2] + below[1::2]
    random = np.random.default_rng(1)

    def step() -> None:
        places, nodes = random.random(BATCH) * tree[1], np.ones(BATCH, np.int64)
        while nodes[0] < leaves:
            nodes *= 2
            right = places >= tree[nodes]
            places -= tree[nodes] * right
            nodes += right
        chances = tree[nodes] / tree[1]
        weights = (chances * rows) ** -0.4
        weights /= weights.max()
        sample = {name: array[nodes - leaves] for name, array in arrays.items()}
        assert sample["embedding"].shape == (BATCH, DIMENSIONS)
        tree[nodes] = (random.random(BATCH) + 1e-8) ** 0.6
        while nodes[0] > 1:
            nodes = nodes // 2
            tree[nodes] = tree[2 * nodes] + tree[2 * nodes + 1]

    return step


def rates(steps: Sequence[Step], seconds: float = 3.0) -> list[float]:
    """Return how many steps per second each system does. They take turns, a quarter of a second
    each, so that other work on the machine slows all of them down alike."""
    counts, spent = [0] * len(steps), [0.0] * len(steps)
    for step in steps:
        for _ in range(20):
            step()
    while min(spent) < seconds:
        for number, step in enumerate(steps):
            started = now = time.perf_counter()
            while now - started < _TURN_SECONDS:
                step()
                counts[number] += 1
                now = time.perf_counter()
            spent[number] += now - started
    return [count / took for count, took in zip(counts, spent, strict=True)]
