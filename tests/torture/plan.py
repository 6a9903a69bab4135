"""What a seed stands for: the topic of a life, the faults of its rounds, the steps of each."""

from __future__ import annotations

import random
from typing import Any

import msgspec

FAULTS = ("kill", "power", "eio", "enospc", "emfile", "pause", "slow", "clock")
STEPS = {
    "together": 12,
    "flush": 3,
    "compact": 2,
    "evolve": 2,
    "tag": 2,
    "restore": 1,
    "retain": 1,
    "consume": 3,
    "query": 2,
    "lookup": 1,
    "search": 1,
    "create_index": 1,
    "drop_index": 0.5,
    "delete_tag": 0.7,
    "backup": 0.6,
    "verify": 0.4,
    "reopen": 1,
}
BESIDE = ("flush", "compact", "consume", "create_index", "backup", "query", "search", "tag")
PRODUCERS = 4
TAGS = ("t0", "t1", "beside")


class Round(msgspec.Struct):
    """The life of one process."""

    seed: str
    number: int
    fault: str
    steps: int
    num_buckets: int
    options: dict[str, Any]

    def dice(self, what: str) -> random.Random:
        """Chances of their own for each use, so that one does not shift the others."""
        return random.Random(f"{self.seed}/{self.number}/{what}")


def life(seed: int, count: int, fault: str | None = None) -> list[Round]:
    """So many rounds on one topic; all of one kind if a fault is named."""
    dice = random.Random(f"life/{seed}")
    buckets = dice.choice((1, 2, 3))
    rounds = []
    for number in range(count):
        chosen = fault or dice.choice(FAULTS)
        rounds.append(
            Round(
                seed=str(seed),
                number=number,
                fault=chosen,
                steps=dice.randint(8, 16) if chosen == "power" else dice.randint(10, 40),
                num_buckets=buckets,
                options=_options(dice, synced=chosen == "power"),
            )
        )
    return rounds


def _options(dice: random.Random, *, synced: bool) -> dict[str, Any]:
    interval = dice.choice((0.0, 0.05, 1.0))
    return {
        "enable_wal": True,
        "wal_sync_interval": 0.0 if synced else interval,
        "flush_threshold": dice.choice((5, 20, 1000)),
        "flush_interval": dice.choice((None, 0.05, 5.0)),
        "keep_versions": dice.choice((0.001, 0.3, 600.0)),
        "compression": dice.choice((None, "zstd", "lz4")),
        "max_wal_size": dice.choice((2000, 1 << 26)),
        "compaction": dice.choice((True, False)),
        "retention_waits_for": dice.choice(([], ["groups"])),
    }


def steps(round_: Round) -> list[dict[str, Any]]:
    """What the process does, one after the other."""
    dice = round_.dice("steps")
    names = dice.choices(list(STEPS), list(STEPS.values()), k=round_.steps)
    return [{"do": name, **_details(name, dice)} for name in names]


def _details(name: str, dice: random.Random) -> dict[str, Any]:
    if name == "together":
        return {
            "puts": [_puts(dice) for _ in range(dice.choice((1, 1, 2, PRODUCERS)))],
            "beside": dice.sample(BESIDE, k=dice.choice((0, 0, 1, 2))),
        }
    if name in ("tag", "restore", "delete_tag"):
        return {"name": dice.choice(TAGS)}
    if name == "retain":
        return {"rows": dice.choice((0, 5, 20, 60, 60))}
    if name in ("create_index", "drop_index"):
        return {"column": dice.choice(("n", "text", "emb", "id"))}
    return {"pick": dice.randrange(1000)}


def _size(dice: random.Random) -> int:
    return dice.choice((dice.randint(1, 9), dice.randint(1, 9), dice.randint(10, 80)))


def _puts(dice: random.Random) -> list[dict[str, Any]]:
    """The puts of one producer, each after the other."""
    kinds = ("one", "one", "batch", "arrow")
    return [
        {"kind": (kind := dice.choice(kinds)), "count": 1 if kind == "one" else _size(dice)}
        for _ in range(dice.randint(1, 5))
    ]
