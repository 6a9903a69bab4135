"""A store for trajectories of agents: vector search, text search, tags, time travel.

    python examples/trajectory_search.py [folder]

Without a folder it works in ./queue_storage. Two agents put their steps, each with an embedding of
its action. Then we search for similar steps, tag the state, let the agents continue, and compare.
The embedding here only counts pairs of letters; replace it with that of a model.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import numpy as np

from persisting.queue import QueueReader, QueueWriter, read_queue, write_queue

TOPIC = "trajectories"
DIMENSIONS = 64
TASKS = {
    "buy a pen": ["open the shop", "search for a pen", "put the pen into the cart", "pay the cart"],
    "buy a book": ["open the shop", "search for a book", "open the login page", "pay by card"],
    "change the password": ["open the login page", "type the old password", "save a new password"],
}


def embed(text: str) -> list[float]:
    """Stand in for a model: texts that share pairs of letters get similar vectors."""
    vector = np.zeros(DIMENSIONS)
    for pair in itertools.pairwise(text):
        vector[sum(map(ord, pair)) % DIMENSIONS] += 1
    return (vector / np.linalg.norm(vector)).tolist()


async def act(store: QueueWriter, agent: str, episode: int, task: str, reward: float) -> None:
    """Play one episode; each step is durable when its put returns."""
    for number, action in enumerate(TASKS[task], 1):
        last = number == len(TASKS[task])
        await store.put(
            {
                "episode": f"{agent}-{episode}",
                "agent": agent,
                "step": number,
                "action": action,
                "reward": reward if last else 0.0,
                "embedding": embed(action),
            }
        )


def show(title: str, hits: list[dict[str, Any]]) -> None:
    print(title)
    for hit in hits:
        print(f"   {hit['episode']:>6} step {hit['step']}: {hit['action']}")


async def look_around(store: QueueWriter) -> None:
    fields = ["episode", "step", "action"]
    question = "pay for the cart"
    show(f"like {question!r}:", await store.search(vector=embed(question), k=2, columns=fields))
    show("with the word 'password':", await store.search(text="password", k=5, columns=fields))
    hits = await store.search(
        vector=embed(question), text="pay", where="reward > 0", k=3, columns=fields
    )
    show("both, and rewarded:", hits)
    best = hits[0]
    steps = await store.lookup("episode", best["episode"], columns=fields)
    show(f"the whole episode {best['episode']}:", steps)


async def compare(store: QueueReader, tag: str) -> None:
    """Compare the tagged state with the current one."""
    then = await store.get(limit=None, version=tag)
    now = await store.query()
    print(f"steps at tag {tag!r}: {len(then)}, now: {len(now)}")
    print(f"mean reward: {mean(then):.2f} then, {mean(now):.2f} now")


def mean(steps: list[dict[str, Any]]) -> float:
    episodes = {step["episode"] for step in steps}
    return sum(step["reward"] for step in steps) / len(episodes)


async def main(folder: str | None) -> None:
    store = await write_queue(
        topic=TOPIC,
        bucket_column="episode",
        storage_path=folder,
        backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0},
    )
    async with store, await read_queue(topic=TOPIC, storage_path=folder) as reader:
        first = (await store.stats())["total_count"]
        await asyncio.gather(
            act(store, "ada", first, "buy a pen", reward=1.0),
            act(store, "bob", first, "change the password", reward=0.0),
        )
        await store.create_index("embedding", metric="cosine")
        await store.create_index("action", "text")
        await store.create_index("episode", "scalar")
        await look_around(store)

        await store.tag("policy-1")
        await asyncio.gather(
            act(store, "ada", first + 1, "buy a book", reward=1.0),
            act(store, "bob", first + 1, "buy a pen", reward=1.0),
        )
        await compare(reader, "policy-1")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
