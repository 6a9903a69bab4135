"""A process that puts at full speed and says what was acknowledged, until it is killed.

    python child.py FOLDER ROUND MODE OPTIONS

Every acknowledged put is one line on standard output: the ids of its records; a line with ``+``
comes before each batch, and ``opening`` and ``open`` before all. An id is
``<round>.<producer>.<number>``; each producer counts from 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

import lance  # noqa: F401  loaded now, so that opening is nothing but opening

from persisting.queue import PersistingBackend


def say(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


class Producer:
    """Makes records with rising numbers; what they hold depends on the mode."""

    def __init__(self, name: str, mode: str) -> None:
        self._name, self._mode = name, mode
        self._next = 0
        self._extra: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        number = self._next
        self._next += 1
        if self._mode == "evolving" and number % 40 == 20:
            self._extra[f"f{number % 160}"] = [1, "text", [1.5], {"a": 1}][number // 40 % 4]
        value: float = number + 0.5 if self._mode == "evolving" and number > 60 else number
        record = {"id": f"{self._name}.{number}", "n": number, "text": "some text " * 8}
        return {**record, "v" + self._name.replace(".", "_"): value, **self._extra}


async def singles(backend: Any, producer: Producer) -> None:
    while True:
        record = producer.record()
        await backend.put(record)
        say(record["id"])


async def batches(backend: Any, producer: Producer) -> None:
    while True:
        records = [producer.record() for _ in range(random.randint(1, 60))]
        say("+", *(r["id"] for r in records))
        await backend.put_batch(records)
        say(*(r["id"] for r in records))


async def flushes(backend: Any, producer: Producer) -> None:
    """Without a log: what is put before a flush is promised when it returns."""
    while True:
        records = [producer.record() for _ in range(random.randint(1, 60))]
        for record in records:
            await backend.put(record)
        await backend.flush()
        say(*(r["id"] for r in records))


async def run(folder: str, round_number: str, mode: str, options: dict[str, Any]) -> None:
    say("opening")
    backend = PersistingBackend(0, folder, **options)
    say("open")
    if mode == "recovering":
        await backend.close()
        return
    jobs = {
        "singles": [singles],
        "batches": [batches],
        "concurrent": [singles] * 8 + [batches] * 2,
        "evolving": [singles, singles, batches],
        "flushes": [flushes],
    }[mode]
    await asyncio.gather(
        *(job(backend, Producer(f"{round_number}.{index}", mode)) for index, job in enumerate(jobs))
    )


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4], json.loads(sys.argv[4])))
