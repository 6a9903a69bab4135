"""Made-up trajectories of agents: text, scores, vectors, nested steps."""

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
    """Records ``first`` to ``first + count`` of an agent; the same every time."""
    return [_trajectory(agent, number) for number in range(first, first + count)]


def _trajectory(agent: str, number: int) -> dict[str, Any]:
    chance = random.Random(f"{agent}/{number}")
    task = number % len(TASKS)
    return {
        "id": f"{agent}-{number:06d}",
        "agent": agent,
        "task": TASKS[task],
        "text": f"{chance.choice(_THOUGHTS)}; then {chance.choice(_THOUGHTS)}",
        "score": round(chance.random(), 4),
        "embedding": embedding(task, chance),
        "steps": [
            {
                "tool": chance.choice(_TOOLS),
                "tokens": chance.randint(20, 900),
                "ok": chance.random() > 0.1,
            }
            for _ in range(chance.randint(1, 5))
        ],
    }


def embedding(task: int, chance: random.Random) -> list[float]:
    """A vector near the others of its task."""
    return [
        round((2.0 if place % len(TASKS) == task else 0.0) + chance.gauss(0, 0.3), 5)
        for place in range(DIMENSIONS)
    ]
