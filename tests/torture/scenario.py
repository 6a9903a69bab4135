"""Draw a scenario from a seed: the topic of a run, the faults of its rounds, and their steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import msgspec

FAULTS = ("kill", "power", "eio", "enospc", "emfile", "pause", "slow", "clock")
KINDS = {"logged": 2, "unlogged": 1, "lance": 1, "changing": 1}
"""Kinds of topics and their weights: :class:`PersistingBackend` with and without a log,
:class:`LanceBackend`, or first that and then randomly with or without a log."""

RETENTION_SHARE = 0.4
"""Share of the topics with automatic retention."""

LIMITS: dict[str, tuple[float, ...]] = {
    "retention_rows": (3, 20, 100),
    "retention_bytes": (1, 10_000, 100_000),
    "retention_seconds": (0.2, 1.0, 5.0),
}
NO_LIMITS = dict.fromkeys(LIMITS)
LOG_OPTIONS = ("enable_wal", "wal_sync_interval", "max_wal_size")
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
CONCURRENT = ("flush", "compact", "consume", "create_index", "backup", "query", "search", "tag")
PRODUCERS = 4
TAGS = ("t0", "t1", "concurrent")


class Round(msgspec.Struct):
    """The work of one process."""

    seed: str
    number: int
    fault: str
    steps: int
    num_buckets: int
    backend: str
    options: dict[str, Any]

    @property
    def logged(self) -> bool:
        """Whether acknowledged records survive a crash; otherwise only flushed ones do."""
        return bool(self.options.get("enable_wal"))

    @property
    def strict(self) -> bool:
        """Whether all records have the same fields."""
        return self.backend == "lance"

    @property
    def description(self) -> str:
        store = "lance" if self.strict else "logged" if self.logged else "unlogged"
        return f"{store} with retention" if self.limits else store

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of automatic retention."""
        given = {name: self.options.get(name) for name in LIMITS}
        return {name: limit for name, limit in given.items() if limit is not None}

    def rng(self, what: str) -> random.Random:
        """Return a random generator per use, so that one use does not affect the others."""
        return random.Random(f"{self.seed}/{self.number}/{what}")


def rounds_of(
    seed: int,
    count: int,
    fault: str | None = None,
    kind: str | None = None,
    retention: bool | None = None,
) -> list[Round]:
    """Return ``count`` rounds on one topic. Arguments that are not None replace what the seed would
    draw."""
    # The strings are part of what a seed means: changing them changes every recorded seed.
    rng, kind_rng = random.Random(f"life/{seed}"), random.Random(f"nature/{seed}")
    chosen_kind = kind_rng.choices(list(KINDS), list(KINDS.values()))[0]
    retains = kind_rng.random() < RETENTION_SHARE
    stores = _stores(kind or chosen_kind, kind_rng)
    buckets = rng.choice((1, 2, 4))
    rounds = []
    for number in range(count):
        chosen = fault or rng.choice(FAULTS)
        store = next(stores)
        rounds.append(
            Round(
                seed=str(seed),
                number=number,
                fault=chosen,
                steps=rng.randint(8, 16) if chosen == "power" else rng.randint(10, 40),
                num_buckets=buckets,
                backend="lance" if store == "lance" else "persisting",
                options=_stored(store, _options(rng, synced=chosen == "power"))
                | (_limits(kind_rng) if (retains if retention is None else retention) else {}),
            )
        )
    return rounds


def _stores(kind: str, rng: random.Random) -> Iterator[str]:
    """Yield the kind of store of each round."""
    if kind != "changing":
        yield from repeat(kind)
    yield from ["lance"] * rng.randint(0, 2)
    while True:
        yield rng.choice(("logged", "unlogged"))


def _stored(store: str, options: dict[str, Any]) -> dict[str, Any]:
    if store == "lance":
        return {name: value for name, value in options.items() if name not in LOG_OPTIONS}
    return options | {"enable_wal": store == "logged"}


def _limits(rng: random.Random) -> dict[str, Any]:
    """Return one or two limits, and what retention waits for."""
    drawn = {name: rng.choice(choices) for name, choices in LIMITS.items()}
    chosen = rng.sample(list(LIMITS), k=rng.choice((1, 1, 2)))
    waits = rng.choice(([], [], ["groups"], ["tags"]))
    return {
        **NO_LIMITS,
        **{name: drawn[name] for name in chosen},
        "retention_waits_for": waits,
    }


def _options(rng: random.Random, *, synced: bool) -> dict[str, Any]:
    interval = rng.choice((0.0, 0.05, 1.0))
    return {
        "enable_wal": True,
        "wal_sync_interval": 0.0 if synced else interval,
        "flush_threshold": rng.choice((5, 20, 1000)),
        "flush_interval": rng.choice((None, 0.05, 5.0)),
        "keep_versions": rng.choice((0.001, 0.3, 600.0)),
        "compression": rng.choice((None, "zstd", "lz4")),
        "max_wal_size": rng.choice((2000, 1 << 26)),
        "compaction": rng.choice((True, False)),
        "retention_waits_for": rng.choice(([], ["groups"])),
    }


def steps(round_: Round) -> list[dict[str, Any]]:
    """Return the steps of the process, in order."""
    rng = round_.rng("steps")
    names = rng.choices(list(STEPS), list(STEPS.values()), k=round_.steps)
    made = [{"do": name, **_details(name, rng)} for name in names]
    for step in made:
        if round_.limits and "tag" in step.get("concurrent", ()):
            step["concurrent"].remove("tag")  # its content would be unknown
    return made


def _details(name: str, rng: random.Random) -> dict[str, Any]:
    if name == "together":
        return {
            "puts": [_puts(rng) for _ in range(rng.choice((1, 1, 2, PRODUCERS)))],
            "concurrent": rng.sample(CONCURRENT, k=rng.choice((0, 0, 1, 2))),
        }
    if name in ("tag", "restore", "delete_tag"):
        return {"name": rng.choice(TAGS)}
    if name == "retain":
        return {"rows": rng.choice((0, 5, 20, 60, 60))}
    if name in ("create_index", "drop_index"):
        return {"column": rng.choice(("n", "text", "emb", "id"))}
    return {"pick": rng.randrange(1000)}


def _size(rng: random.Random) -> int:
    return rng.choice((rng.randint(1, 9), rng.randint(1, 9), rng.randint(10, 80)))


def _puts(rng: random.Random) -> list[dict[str, Any]]:
    """Return the puts of one producer, in order."""
    kinds = ("one", "one", "batch", "arrow")
    return [
        {"kind": (kind := rng.choice(kinds)), "count": 1 if kind == "one" else _size(rng)}
        for _ in range(rng.randint(1, 5))
    ]
