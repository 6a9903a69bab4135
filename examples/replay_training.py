"""A replay buffer for reinforcement learning: priorities, staleness, groups, a crash.

    python examples/replay_training.py [folder]

Rollouts are added while the trainer samples them. An actor is trained on complete groups of fresh
rollouts, each once; a critic on rollouts by priority. The trainer saves its checkpoint together
with that of the buffer, crashes, and continues: nothing is lost, and no rollout is used twice.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from persisting.data import ReplayBuffer

GROUP = 4
OPTIONS = {"retention_rows": 20_000, "vector_type": "float32"}


def open_buffer(folder: Path) -> ReplayBuffer:
    topic = folder / "rollouts"
    if topic.exists():
        return ReplayBuffer(topic, format="numpy")
    return ReplayBuffer(
        topic, format="numpy", num_buckets=2, bucket_column="prompt", backend_options=OPTIONS
    )


def play(buffer: ReplayBuffer, version: int, prompts: range) -> None:
    """Add a group of rollouts for each prompt."""
    random = np.random.default_rng(version)
    buffer.add(
        [
            {
                "prompt": prompt,
                "attempt": attempt,
                "policy_version": version,
                "observation": random.normal(size=4).astype(np.float32),
                "reward": float(random.random()),
            }
            for prompt in prompts
            for attempt in range(GROUP)
        ]
    )


def train_actor(buffer: ReplayBuffer, version: int) -> list[tuple[int, int]]:
    """Take groups that are at most two versions old, each once; return what was used."""
    sample = buffer.sample(
        8,
        group_by="prompt",
        group_size=GROUP,
        where=f"policy_version >= {version - 2}",
        task="actor",
    )
    rewards = sample.rows["reward"].reshape(-1, GROUP)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    assert advantages.shape[1] == GROUP
    pairs = zip(sample.rows["prompt"].tolist(), sample.rows["attempt"].tolist(), strict=True)
    return list(pairs)


def train_critic(buffer: ReplayBuffer) -> float:
    """Train on rollouts by priority, and make surprising ones more likely."""
    sample = buffer.sample(64, by="priority", beta=0.5)
    errors = np.abs(sample.rows["reward"] - 0.5)
    buffer.update_priorities(sample.keys, errors)
    return float((sample.weights * errors).mean())


def main(folder: Path) -> None:
    used: list[tuple[int, int]] = []
    checkpoint = folder / "checkpoint.json"
    with open_buffer(folder) as buffer:
        for version in range(4):
            play(buffer, version, range(version * 20, version * 20 + 20))
            used += train_actor(buffer, version)
            train_critic(buffer)
        checkpoint.write_text(json.dumps({"used": used, "buffer": buffer.checkpoint()}))
        play(buffer, 4, range(80, 100))
        train_actor(buffer, 4)  # this step is lost in the crash
    print("crashed; rollouts used before the checkpoint:", len(used))

    saved = json.loads(checkpoint.read_text())
    used = [tuple(pair) for pair in saved["used"]]
    with open_buffer(folder) as buffer:
        buffer.restore(saved["buffer"])
        print("rollouts in the buffer:", len(buffer))
        while fresh := train_actor(buffer, 4):
            used += fresh
        loss = train_critic(buffer)
    print("no rollout was used twice:", len(used) == len(set(used)))
    print("groups of the last three versions used:", len({p for p, _ in used if p >= 40}), "of 60")
    print("loss of the critic is a number:", np.isfinite(loss))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
