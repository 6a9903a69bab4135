"""A replay buffer for reinforcement learning: durable, bounded, with vectors.

    python examples/rollout_buffer.py [folder]

Actors put steps with their observations as vectors. The trainer draws random minibatches, the best
steps by reward, and the steps nearest to an observation. Retention keeps only the newest steps.
Run it twice with a folder: the buffer is still there.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from typing import Any

import numpy as np

from persisting.queue import OffsetOutOfRange, PersistingBackend

SIZE, STEPS, BATCH = 8, 600, 32
OPTIONS: dict[str, Any] = {
    "enable_wal": True,  # a killed actor loses nothing that was acknowledged
    "vector_type": "float32",
    "flush_threshold": 100,
    "retention_rows": 1000,  # at least; older steps are dropped in whole fragments
    "compaction": False,  # compaction would merge a buffer this small into one fragment
}


async def act(buffer: PersistingBackend, actor: int, seed: int) -> None:
    """Play an episode and put each step as it happens."""
    rng = np.random.default_rng(seed)
    for number in range(STEPS // 2):
        observation = rng.normal(size=SIZE).astype(np.float32)
        action = int(rng.integers(4))
        reward = float(observation[action])
        await buffer.put(
            {
                "actor": actor,
                "step": number,
                "observation": observation,
                "action": action,
                "reward": round(reward, 4),
            }
        )


async def minibatch(buffer: PersistingBackend, count: int) -> list[dict[str, Any]]:
    """Draw random steps from all that retention has kept."""
    while True:
        stats = await buffer.stats()
        offsets = range(stats["start_offset"], stats["end_offset"])
        try:
            return await buffer.take(random.Random(0).sample(offsets, count))
        except OffsetOutOfRange:
            continue  # retention has dropped some of them meanwhile


async def main(folder: str) -> None:
    async with PersistingBackend(bucket_id=0, storage_path=folder, **OPTIONS) as buffer:
        before = (await buffer.stats())["end_offset"]
        await asyncio.gather(act(buffer, 1, seed=before), act(buffer, 2, seed=before + 1))
        print("steps so far:", (await buffer.stats())["end_offset"])

        batch = await minibatch(buffer, BATCH)
        observations = np.array([step["observation"] for step in batch], dtype=np.float32)
        print("minibatch:", observations.shape)

        best = await buffer.query("reward > 2.0", columns=["actor", "step", "reward"])
        print("above 2.0:", all(step["reward"] > 2.0 for step in best))

        near = await buffer.search(vector=batch[0]["observation"], k=3, columns=["action"])
        print("nearest to the first:", near[0]["_distance"] == 0.0, len(near))

        await buffer.retain(rows=1000)
        print("steps kept:", buffer.total_count())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            asyncio.run(main(place))
