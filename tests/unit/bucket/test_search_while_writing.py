"""Search during writes raises nothing and finds every record acknowledged before it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, Bucket, Kind

SIZE = 8
PUT = 40
OPTIONS: dict[str, Any] = {"flush_interval": None, "flush_threshold": 150, "keep_versions": 0.05}
"""Flushes are automatic and old versions are removed immediately, so a slow search loses its
version."""


def record(n: int) -> dict[str, Any]:
    vector = np.random.default_rng(n).normal(size=SIZE).tolist()
    return {"n": n, "k": n % 7, "t": f"common word{n}", "v": vector}


class Traffic:
    """A writer, a maintenance task and searchers on one backend."""

    def __init__(self, backend: Any, seed: int = 0) -> None:
        self.backend = backend
        self.acknowledged = 0
        self.writing = True
        self.luck = random.Random(seed)

    async def write(self, count: int) -> None:
        try:
            while self.acknowledged < count:
                first = self.acknowledged
                rows = [record(n) for n in range(first, min(count, first + PUT))]
                if self.luck.random() < 0.2:
                    await self.backend.put(rows[0])
                    rows = rows[:1]
                else:
                    await self.backend.put_batch(rows)
                self.acknowledged = first + len(rows)
                if self.luck.random() < 0.1:
                    await self.backend.flush()
        finally:
            self.writing = False

    async def keep(self, *changes: Callable[[], Awaitable[Any]]) -> None:
        """Change the table repeatedly, and once more after the last record."""
        writing = True
        while writing:
            writing = self.writing
            for change in changes:
                await change()

    async def search(self, seed: int, oldest: Callable[[], int] = lambda: 0) -> int:
        """Search for acknowledged records; return how many searches were made."""
        luck, looked, writing = random.Random(seed), 0, True
        while writing:
            writing = self.writing
            if not self.acknowledged:
                await asyncio.sleep(0)
                continue
            known = self.acknowledged
            n = luck.randrange(min(known - 1, oldest()), known)
            await luck.choice([self.by_vector, self.by_word, self.by_value, self.by_both])(n, known)
            looked += 1
        return looked

    async def by_vector(self, n: int, known: int) -> None:
        hits = await self.backend.search(vector=record(n)["v"], k=3)
        assert self._one(hits[0]) == record(n), n
        assert hits[0]["_offset"] == n
        assert len(hits) == min(3, known) or known < 3

    async def by_word(self, n: int, known: int) -> None:
        hits = await self.backend.search(text=f"word{n}", k=3)
        assert [self._one(hit) for hit in hits] == [record(n)]
        assert hits[0]["_offset"] == n

    async def by_both(self, n: int, known: int) -> None:
        given = record(n)
        hits = await self.backend.search(
            vector=given["v"], text=f"word{n}", k=1, where=f"n <= {known} AND k = {n % 7}"
        )
        assert [self._one(hit) for hit in hits] == [given]

    async def by_value(self, n: int, known: int) -> None:
        found = await self.backend.lookup("n", n)
        assert [self._one(row) for row in found] == [record(n)]
        assert await self.backend.take([n, n], columns=["n"]) == [{"n": n}, {"n": n}]
        found = await self.backend.query(f"n > {n - 50} AND n <= {n}", columns=["n"])
        numbers = [row["n"] for row in found]
        assert numbers == list(range(n - len(numbers) + 1, n + 1))
        assert numbers[-1] == n

    @staticmethod
    def _one(hit: dict[str, Any]) -> dict[str, Any]:
        return {name: hit[name] for name in ("n", "k", "t", "v")}


async def together(traffic: Traffic, *work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return all results; if a coroutine fails, wait for the others before raising."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        traffic.writing = False
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(traffic: Traffic, count: int, *changes: Any, oldest: Any = lambda: 0) -> list[int]:
    searching = [traffic.search(seed, oldest) for seed in range(3)]
    work = (traffic.write(count), traffic.keep(*changes), *searching)
    return (await together(traffic, *work))[2:]


async def filled(bucket: Bucket, count: int, **options: Any) -> tuple[Any, Traffic]:
    backend = bucket.open(**{**OPTIONS, **options})
    traffic = Traffic(backend)
    await traffic.write(count)
    traffic.writing = True
    return backend, traffic


KINDS = pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_SYNCED], ids=str)


async def search_while_everything_happens(bucket: Bucket, count: int) -> None:
    backend, traffic = await filled(bucket, 1100)
    columns = iter(["v", "t", "n"] * count)
    try:
        looked = await run(
            traffic, 1100 + count, backend.compact, lambda: backend.create_index(next(columns))
        )
        assert min(looked) > 0
        assert (await backend.stats())["upkeep_error"] is None
        assert [row["n"] for row in await backend.query(columns=["n"])] == list(range(1100 + count))
        assert (await backend.verify())["ok"]
    finally:
        await bucket.close()


@KINDS
async def test_search_is_correct_beside_puts_flushes_compaction_and_indexing(
    kind: Kind, folder: Path
) -> None:
    await search_while_everything_happens(Bucket(kind, folder), 600)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@KINDS
async def test_long_search_is_correct_beside_puts_flushes_compaction_and_indexing(
    kind: Kind, folder: Path
) -> None:
    await search_while_everything_happens(Bucket(kind, folder), 40_000)


async def test_search_is_correct_while_indexes_are_created_and_dropped(persisting: Bucket) -> None:
    backend, traffic = await filled(persisting, 1100)
    luck = random.Random(5)

    async def change() -> None:
        column = luck.choice(["v", "t", "n", "k"])
        if luck.random() < 0.6:
            await backend.create_index(column)
        else:
            await backend.drop_index(column)

    looked = await run(traffic, 1500, change)
    assert min(looked) > 0


async def test_search_beside_retention_finds_what_is_kept(persisting: Bucket) -> None:
    backend, traffic = await filled(persisting, 1200)
    await backend.create_index("v")
    await backend.create_index("n")

    async def retain() -> None:
        await backend.retain(rows=700)

    looked = await run(
        traffic,
        2400,
        retain,
        backend.compact,
        oldest=lambda: max(0, traffic.acknowledged - 300),
    )
    assert min(looked) > 0
    stats = await backend.stats()
    assert stats["start_offset"] > 0
    found = await backend.query(columns=["n"])
    assert [row["n"] for row in found] == list(range(stats["start_offset"], 2400))


async def test_search_is_correct_beside_tags_versions_and_evolution(persisting: Bucket) -> None:
    backend, traffic = await filled(persisting, 1100)
    await backend.create_index("v")
    names = iter(f"tag{i}" for i in range(10_000))

    async def evolve() -> None:
        for i in range(6):
            await backend.put({**record(10_000 + i), f"extra{i}": i})
            await backend.flush()
        traffic.writing = False

    changes = traffic.keep(lambda: backend.tag(next(names)), backend.versions, backend.tags)
    await together(traffic, evolve(), changes, traffic.search(1), traffic.search(2))
    for i in range(6):
        assert [row["n"] for row in await backend.lookup(f"extra{i}", i)] == [10_000 + i]


async def test_a_reader_without_the_lock_searches_beside_the_writer(persisting: Bucket) -> None:
    backend, traffic = await filled(persisting, 1100)
    await backend.flush()
    await backend.create_index("v")
    reader = persisting.open(read_only=True)
    looked = seen = 0

    async def read() -> None:
        nonlocal looked, seen
        luck = random.Random(6)
        while traffic.writing:
            n = luck.randrange(1100)
            (hit,) = await reader.search(vector=record(n)["v"], k=1)
            assert hit["n"] == hit["_offset"] == n
            assert await reader.lookup("n", n) == [record(n)]
            numbers = [row["n"] for row in await reader.query("n >= 1000", columns=["n"])]
            assert numbers == list(range(1000, 1000 + len(numbers)))
            assert len(numbers) >= seen
            seen = len(numbers)
            looked += 1

    await together(traffic, traffic.write(1700), traffic.keep(backend.compact), read())
    assert looked > 0
