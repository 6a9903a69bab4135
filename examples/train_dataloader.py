"""Train a small model with torch's loader in worker processes, stop, and resume exactly.

    python examples/train_dataloader.py [folder]

Needs torch and torchdata: pip install ".[torch]". The loader reads a tag in two workers, which
read ahead. The checkpoint holds the model, the optimizer and the loader; the second half of the
training continues with three workers, and every row is used once in each epoch.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from persisting.data import TopicStream
from persisting.queue import write_queue

TOPIC, TAG, ROWS, EPOCHS = "samples", "train-1", 3000, 2


async def collect(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    async with await write_queue(
        topic=TOPIC,
        storage_path=str(folder),
        backend="persisting",
        backend_options={"vector_type": "float32"},
    ) as writer:
        rows = zip(inputs.tolist(), targets.tolist(), strict=True)
        await writer.put([{"id": n, "x": x, "y": y} for n, (x, y) in enumerate(rows)])
        await writer.tag(TAG)


class Trainer:
    """A model, its optimizer and its loader, saved and restored together."""

    def __init__(self, folder: Path, workers: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.stream = TopicStream(
            folder / TOPIC, TAG, batch_size=64, shuffle=3, epochs=EPOCHS, format="torch"
        )
        self.workers = workers
        self.loader: StatefulDataLoader[Any] | None = None
        self.loss = 0.0

    def train(self, used: Counter[int], steps: int | None = None) -> None:
        self.loader = StatefulDataLoader(self.stream, batch_size=None, num_workers=self.workers)
        for step, batch in enumerate(self.loader, 1):
            loss = torch.nn.functional.mse_loss(self.model(batch["x"])[:, 0], batch["y"].float())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            used.update(batch["id"].tolist())
            self.loss = loss.item()
            if step == steps:
                return

    def save(self, path: Path) -> None:
        assert self.loader is not None
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.load_state_dict(state["loader"])  # any number of workers may follow


def main(folder: Path) -> None:
    # The workers are forked. Lance warns of that; the stream reads through helper processes there.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    warnings.filterwarnings("ignore", message=".*(worker processes in total|set_vital).*")
    asyncio.run(collect(folder))
    used: Counter[int] = Counter()
    first = Trainer(folder, workers=2)
    first.train(used, steps=31)
    first.save(folder / "checkpoint.pt")
    print("stopped after 31 batches")

    second = Trainer(folder, workers=3)
    second.load(folder / "checkpoint.pt")
    second.train(used)
    print(f"resumed, and ended with a loss of {second.loss:.4f}")
    print(
        "every row was used once in each epoch:",
        used == Counter(dict.fromkeys(range(ROWS), EPOCHS)),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
