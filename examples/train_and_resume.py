"""Train from a tag with several ranks, kill them all, and resume with another number of ranks.

    python examples/train_and_resume.py [folder]

Each rank is a process. It sums up what it has read, as a stand-in for training, and rank 0 saves a
checkpoint after every few steps: the sums of all ranks and the state of its stream, which is the
state of all. The ranks are killed in the middle. The next ones, one more of them, continue at the
checkpoint; in the end every row was used exactly once.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from persisting.data import TopicStream
from persisting.queue import write_queue

TOPIC, TAG, ROWS = "samples", "train-1", 5000
SAVE_EVERY, KILLED_AFTER = 5, 23


async def collect(folder: Path) -> None:
    """Put samples, and tag what there is to train on."""
    async with await write_queue(
        topic=TOPIC,
        storage_path=str(folder),
        backend="persisting",
        backend_options={"enable_wal": True, "vector_type": "float32"},
    ) as writer:
        await writer.put([{"id": n, "x": [n / 7, 1.0]} for n in range(ROWS)])
        tag = await writer.tag(TAG)
    print("rows of the tag:", tag["rows"])


def rank_process(folder: Path, rank: int, world_size: int, kill_after: int | None) -> None:
    """Train as one rank; all ranks save at the same steps, so their files belong together."""
    stream = TopicStream(
        folder / TOPIC,
        TAG,
        batch_size=16,
        shuffle=1,
        rank=rank,
        world_size=world_size,
        format="numpy",
        columns=["id"],
    )
    state = folder / "stream.json"
    if state.exists():
        stream.load_state_dict(json.loads(state.read_text()))
    used: list[int] = []
    for step, batch in enumerate(stream, 1):
        used += batch["id"].tolist()
        if step % SAVE_EVERY == 0:
            save(folder / f"used-{world_size}-{rank}.json", used)
            if rank == 0:
                save(folder / "stream-next.json", stream.state_dict())
        if step == kill_after:
            os.kill(os.getpid(), 9)
    save(folder / f"used-{world_size}-{rank}.json", used)


def save(path: Path, value: Any) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def train(folder: Path, world_size: int, kill_after: int | None = None) -> None:
    spawned = multiprocessing.get_context("spawn")
    ranks = [
        spawned.Process(target=rank_process, args=(folder, rank, world_size, kill_after))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print(f"{world_size} ranks ended:", sorted({process.exitcode for process in ranks}))
    if kill_after is not None:
        (folder / "stream-next.json").replace(folder / "stream.json")


def main(folder: Path) -> None:
    asyncio.run(collect(folder))
    train(folder, 2, KILLED_AFTER)
    state = json.loads((folder / "stream.json").read_text())
    print("checkpoint at row", state["position"], "of epoch", state["epoch"])
    train(folder, 3)
    used = [n for path in folder.glob("used-*.json") for n in json.loads(path.read_text())]
    print("every row was used once:", sorted(used) == list(range(ROWS)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
