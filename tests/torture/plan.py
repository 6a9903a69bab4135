"""What a seed stands for: the topic of a life, the faults of its rounds, the steps of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import msgspec

FAULTS = ("kill", "power", "eio", "enospc", "emfile", "pause", "slow", "clock")
KINDS = {"logged": 2, "unlogged": 1, "lance": 1, "changing": 1}
"""How topics store, and how often: :class:`PersistingBackend` with and without a log,
:class:`LanceBackend`, or first that and then now with a log and now without."""

RETAINING = 0.4
"""How many topics have retention by itself."""

LIMITS: dict[str, tuple[float, ...]] = {
    "retention_rows": (3, 20, 100),
    "retention_bytes": (1, 10_000, 100_000),
    "retention_seconds": (0.2, 1.0, 5.0),
}
NO_LIMITS = dict.fromkeys(LIMITS)
OF_THE_LOG = ("enable_wal", "wal_sync_interval", "max_wal_size")
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
    backend: str
    options: dict[str, Any]

    @property
    def logged(self) -> bool:
        """Whether what was acknowledged survives a crash; otherwise only what was flushed."""
        return bool(self.options.get("enable_wal"))

    @property
    def strict(self) -> bool:
        """Whether all records have the same fields."""
        return self.backend == "lance"

    @property
    def nature(self) -> str:
        store = "lance" if self.strict else "logged" if self.logged else "unlogged"
        return f"{store} with retention" if self.limits else store

    @property
    def limits(self) -> dict[str, Any]:
        """Those of retention by itself."""
        given = {name: self.options.get(name) for name in LIMITS}
        return {name: limit for name, limit in given.items() if limit is not None}

    def dice(self, what: str) -> random.Random:
        """Chances of their own for each use, so that one does not shift the others."""
        return random.Random(f"{self.seed}/{self.number}/{what}")


def life(
    seed: int,
    count: int,
    fault: str | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> list[Round]:
    """So many rounds on one topic; what is named here is not left to the seed."""
    dice, nature = random.Random(f"life/{seed}"), random.Random(f"nature/{seed}")
    chosen_kind = nature.choices(list(KINDS), list(KINDS.values()))[0]
    retains = nature.random() < RETAINING
    stores = _stores(kind or chosen_kind, nature)
    buckets = dice.choice((1, 2, 3))
    rounds = []
    for number in range(count):
        chosen = fault or dice.choice(FAULTS)
        store = next(stores)
        rounds.append(
            Round(
                seed=str(seed),
                number=number,
                fault=chosen,
                steps=dice.randint(8, 16) if chosen == "power" else dice.randint(10, 40),
                num_buckets=buckets,
                backend="lance" if store == "lance" else "persisting",
                options=_stored(store, _options(dice, synced=chosen == "power"))
                | (_limits(nature) if (retains if retention is None else retention) else {}),
            )
        )
    return rounds


def _stores(kind: str, dice: random.Random) -> Iterator[str]:
    """How each round stores."""
    if kind != "changing":
        yield from repeat(kind)
    yield from ["lance"] * dice.randint(0, 2)
    while True:
        yield dice.choice(("logged", "unlogged"))


def _stored(store: str, options: dict[str, Any]) -> dict[str, Any]:
    if store == "lance":
        return {name: value for name, value in options.items() if name not in OF_THE_LOG}
    return options | {"enable_wal": store == "logged"}


def _limits(dice: random.Random) -> dict[str, Any]:
    """One or two limits, and what they wait for."""
    drawn = {name: dice.choice(choices) for name, choices in LIMITS.items()}
    chosen = dice.sample(list(LIMITS), k=dice.choice((1, 1, 2)))
    waits = dice.choice(([], [], ["groups"], ["tags"]))
    return {
        **NO_LIMITS,
        **{name: drawn[name] for name in chosen},
        "retention_waits_for": waits,
    }


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
    made = [{"do": name, **_details(name, dice)} for name in names]
    for step in made:
        if round_.limits and "tag" in step.get("beside", ()):
            step["beside"].remove("tag")  # nobody could know what it holds
    return made


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
