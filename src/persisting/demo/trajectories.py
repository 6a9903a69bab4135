"""Generated trajectories of agents: text, scores, vectors, nested steps."""

from __future__ import annotations

import random
from typing import Any

DIMENSIONS = 32
TASKS = ("fix a bug", "write a test", "review a change", "answer a question", "plan a release")
_TOOLS = ("search", "edit", "run", "ask")
_THOUGHTS = (
    "the lock was taken twice, so the second caller waits for ever",
    "the test fails only when two writers race for one bucket",
    "an index would make this lookup quick",
    "the log holds what the table does not have yet",
    "the answer is in the second paragraph of the manual",
    "nothing was lost, the retry stored it once",
)


def trajectories(agent: str, first: int, count: int) -> list[dict[str, Any]]:
    """Return records ``first`` to ``first + count`` of an agent; they are deterministic."""
    return [_trajectory(agent, number) for number in range(first, first + count)]


def _trajectory(agent: str, number: int) -> dict[str, Any]:
    rng = random.Random(f"{agent}/{number}")
    task = number % len(TASKS)
    return {
        "id": f"{agent}-{number:06d}",
        "agent": agent,
        "task": TASKS[task],
        "text": f"{rng.choice(_THOUGHTS)}; then {rng.choice(_THOUGHTS)}",
        "score": round(rng.random(), 4),
        "embedding": embedding(task, rng),
        "steps": [
            {
                "tool": rng.choice(_TOOLS),
                "tokens": rng.randint(20, 900),
                "ok": rng.random() > 0.1,
            }
            for _ in range(rng.randint(1, 5))
        ],
    }


def embedding(task: int, rng: random.Random) -> list[float]:
    """Return a vector close to the others of its task."""
    return [
        round((2.0 if place % len(TASKS) == task else 0.0) + rng.gauss(0, 0.3), 5)
        for place in range(DIMENSIONS)
    ]
