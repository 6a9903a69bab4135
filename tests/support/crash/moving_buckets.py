"""Several owners of one topic, each with its own log: buckets move between them, and they die."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support.crash.topics import BUCKETS, CrashableTopic, ExpectedTopic, Parts, check_topic


class Owners:
    """Several owners of one topic: each bucket has one of them at a time, or none.

    The locks belong to open files, so owners in one process exclude each other as processes do.
    """

    def __init__(self, root: Path, count: int, **options: Any) -> None:
        self.root, self.options = root, options
        self.expected = ExpectedTopic()
        self.owners = [self._new() for _ in range(count)]
        self.owner_of: dict[int, int] = {}
        self._numbers = iter(range(1_000_000))

    def _new(self) -> CrashableTopic:
        return CrashableTopic(self.root, BUCKETS, **self.options)

    async def move(self, bucket: int, owner: int) -> None:
        before = self.owner_of.pop(bucket, None)
        if before is not None:
            await self.owners[before].topic.close_bucket(bucket)
        await self.owners[owner].backend(bucket)
        self.owner_of[bucket] = owner

    async def put(self, owner: int, rows: int = 1) -> None:
        """Put a list into all buckets of an owner."""
        buckets = [bucket for bucket, held in self.owner_of.items() if held == owner]
        if not buckets:
            return
        name = f"put-{next(self._numbers)}"
        parts = {b: [{"id": f"{name}.{b}.{n}", "n": n} for n in range(rows)] for b in buckets}
        self.expected.add(name, parts)
        await self.owners[owner].put(parts)

    async def flush(self, bucket: int) -> None:
        await (await self.owners[self.owner_of[bucket]].backend(bucket)).flush()

    async def kill(self, owner: int) -> None:
        await self.owners[owner].drop()
        self.owner_of = {b: held for b, held in self.owner_of.items() if held != owner}
        self.owners[owner] = self._new()

    async def check(self) -> None:
        """Read every bucket from whichever owner has it."""
        found: Parts = {}
        for bucket in range(BUCKETS):
            if bucket not in self.owner_of:
                await self.move(bucket, 0)
            backend = await self.owners[self.owner_of[bucket]].backend(bucket)
            found[bucket] = await backend.get(0, None)
        self.expected.check(found, self.expected.puts)


async def move_buckets(root: Path, seed: int, steps: int, **options: Any) -> int:
    """Move buckets at random while their owners put and die; return the number of puts."""
    rng = random.Random(seed)
    owners = Owners(root, 2 + seed % 2, **options)
    for bucket in range(BUCKETS):
        await owners.move(bucket, rng.randrange(len(owners.owners)))
    for _ in range(steps):
        choice, owner = rng.randrange(10), rng.randrange(len(owners.owners))
        if choice < 4:
            await owners.put(owner, rng.randint(1, 3))
        elif choice < 6 and owners.owner_of:
            await owners.move(rng.choice(list(owners.owner_of)), owner)
        elif choice < 7 and owners.owner_of:
            await owners.flush(rng.choice(list(owners.owner_of)))
        elif choice < 8:
            await owners.check()
        else:
            await owners.kill(owner)
            for bucket in set(range(BUCKETS)) - set(owners.owner_of):
                # Some buckets of the dead owner stay without an owner for a while.
                if rng.random() < 0.6:
                    await owners.move(bucket, rng.randrange(len(owners.owners)))
    await owners.check()
    for owner in range(len(owners.owners)):
        await owners.kill(owner)
    await check_topic(root, owners.expected, owners.expected.puts)
    return len(owners.expected.puts)
