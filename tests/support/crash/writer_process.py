"""A process that puts at full speed and reports what was acknowledged, until it is killed.

    python writer_process.py FOLDER ROUND MODE OPTIONS

It prints one line for every acknowledged put: the ids of its records. A line that starts with ``+``
precedes each batch; ``opening`` and ``open`` come first. An id is ``<round>.<producer>.<number>``;
each producer counts from 0.

The maintenance modes print JSON: each step before it starts (``{"begin": …}``) and, with its
result, after it (``{"done": …}``).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

import lance  # noqa: F401  loaded before the bucket is opened

from persisting.queue import PersistingBackend


def report(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


class Producer:
    """Creates records with increasing numbers; their fields depend on the mode."""

    def __init__(self, name: str, mode: str) -> None:
        self.name, self._mode = name, mode
        self._next = 0
        self._extra: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        number = self._next
        self._next += 1
        if "evolving" in self._mode and number % 40 == 20:
            self._extra[f"f{number % 160}"] = [1, "text", [1.5], {"a": 1}][number // 40 % 4]
        value: float = number + 0.5 if "evolving" in self._mode and number > 60 else number
        record = {"id": f"{self.name}.{number}", "n": number, "text": "some text " * 8}
        return {**record, "v" + self.name.replace(".", "_"): value, **self._extra}


async def singles(backend: Any, producer: Producer) -> None:
    while True:
        record = producer.record()
        await backend.put(record)
        report(record["id"])


async def batches(backend: Any, producer: Producer) -> None:
    while True:
        records = [producer.record() for _ in range(random.randint(1, 60))]
        report("+", *(r["id"] for r in records))
        await backend.put_batch(records)
        report(*(r["id"] for r in records))


async def flushes(backend: Any, producer: Producer) -> None:
    """Without a log: records are durable when the flush after them returns."""
    while True:
        records = [producer.record() for _ in range(random.randint(1, 60))]
        for record in records:
            await backend.put(record)
        await backend.flush()
        report(*(r["id"] for r in records))


class Steps:
    """Random maintenance steps, each reported before and after."""

    def __init__(self, backend: Any, producer: Producer, task: int, seed: str) -> None:
        self._backend, self._producer, self._task = backend, producer, task
        self._rng = random.Random(seed)

    async def put(self) -> None:
        records = [self._producer.record() for _ in range(self._rng.randint(1, 6))]
        await self._run("put", self._backend.put_batch(records), records=records)

    async def flush(self) -> None:
        await self._run("flush", self._backend.flush())

    async def compact(self) -> None:
        await self._run("compact", self._backend.compact())

    async def retain(self) -> None:
        rows = self._rng.randint(20, 60)
        await self._run("retain", self._backend.retain(rows=rows), rows=rows)

    async def tag(self) -> None:
        name = self._tag()
        await self._run("tag", self._backend.tag(name), name=name)

    async def read_tags(self) -> None:
        for tag in await self._backend.tags():
            rows = await self._backend.get(version=tag["name"])
            self._report("seen", "tag", name=tag["name"], ids=[row["id"] for row in rows])

    async def delete_tag(self) -> None:
        name = self._tag()
        await self._run("delete_tag", self._backend.delete_tag(name), name=name)

    async def restore(self) -> None:
        await self._backend.flush()
        version = self._rng.choice((await self._backend.versions())[-6:])["version"]
        rows = await self._backend.get(version=version)
        start = self._backend._bucket.at(version).start
        ids = [row["id"] for row in rows]
        await self._run("restore", self._backend.restore(version), start=start, ids=ids)

    async def index(self) -> None:
        column, kind = self._rng.choice([("n", "scalar"), ("text", None)])
        await self._run("index", self._backend.create_index(column, kind))

    async def any_of(self, **weights: int) -> None:
        while True:
            (name,) = self._rng.choices(list(weights), list(weights.values()))
            await getattr(self, name)()

    def _tag(self) -> str:
        return f"t{self._rng.randrange(3)}"

    async def _run(self, what: str, call: Any, **about: Any) -> None:
        self._report("begin", what, **about)
        self._report("done", what, result=await call)

    def _report(self, when: str, what: str, **about: Any) -> None:
        report(json.dumps({when: what, "task": self._task, **about}))


async def sequential_maintenance(backend: Any, producer: Producer) -> None:
    """Run one step after another."""
    steps = Steps(backend, producer, 0, producer.name)
    await steps.any_of(
        put=12, flush=8, compact=3, retain=2, tag=3, delete_tag=1, restore=2, index=1
    )


def concurrent_maintenance(task: int) -> Any:
    """Return a task that runs concurrently with others: the first does maintenance, the others
    put."""

    async def run(backend: Any, producer: Producer) -> None:
        steps = Steps(backend, producer, task, producer.name)
        if task:
            await steps.any_of(put=1)
        await steps.any_of(flush=3, compact=3, retain=1, tag=2, read_tags=1, index=1)

    return run


async def run(folder: str, round_number: str, mode: str, options: dict[str, Any]) -> None:
    report("opening")
    backend = PersistingBackend(0, folder, **options)
    report("open")
    if mode == "recovering":
        await backend.close()
        return
    jobs = {
        "singles": [singles],
        "batches": [batches],
        "concurrent": [singles] * 8 + [batches] * 2,
        "evolving": [singles, singles, batches],
        "flushes": [flushes],
        "maintenance": [sequential_maintenance],
        "evolving-maintenance": [sequential_maintenance],
        "concurrent-maintenance": [concurrent_maintenance(task) for task in range(4)],
    }[mode]
    await asyncio.gather(
        *(job(backend, Producer(f"{round_number}.{index}", mode)) for index, job in enumerate(jobs))
    )


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4], json.loads(sys.argv[4])))
