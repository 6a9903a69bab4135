"""Kill writers of one bucket one after another; check that acknowledged records survive."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persisting.queue import PersistingBackend
from support.crash.checks import CrashableBucket, read_checked
from support.crash.kill import LOG, Mode, run_and_kill

ROUNDS = (
    Mode("singles", {**LOG, "wal_sync_interval": 0.0}),
    Mode("concurrent", {**LOG, "wal_sync_interval": 0.0, "flush_threshold": 20}),
    Mode("batches", {**LOG, "wal_sync_interval": 1.0, "compression": "zstd"}),
    Mode("recovering", {**LOG, "wal_sync_interval": 0.0}),
    Mode("evolving", {**LOG, "wal_sync_interval": 0.0, "flush_threshold": 25}),
    Mode("concurrent", {**LOG, "wal_sync_interval": 1.0, "max_wal_size": 20_000}),
    Mode("flushes", {"flush_interval": None}),
    Mode(
        "evolving", {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 15, "compression": "zstd"}
    ),
    Mode("recovering", {**LOG, "wal_sync_interval": 1.0, "max_buffer_bytes": 4000}),
    Mode("concurrent", {**LOG, "wal_sync_interval": 0.02, "flush_threshold": 40}),
)


@dataclass
class Puts:
    """What a writer reported before it was killed."""

    acknowledged: list[list[str]] = field(default_factory=list)
    """The ids of each acknowledged put."""
    started: list[list[str]] = field(default_factory=list)
    """The ids of each batch, acknowledged or not."""


def kill_writer(folder: Path, number: int, rng: random.Random) -> Puts:
    mode = ROUNDS[number % len(ROUNDS)]
    only_opens = mode.name == "recovering"
    after_lines = 1 if only_opens else 2 + rng.choice((0, 5, rng.randrange(400)))
    killed = run_and_kill(folder, number, mode, rng, after_lines=after_lines, delay=0.03)
    assert killed.status == -signal.SIGKILL or (only_opens and killed.status == 0), killed.errors
    lines = [line.split() for line in killed.lines]
    puts = [words for words in lines if words[0] not in ("opening", "open")]
    return Puts([w for w in puts if w[0] != "+"], [w[1:] for w in puts if w[0] == "+"])


def check_found(found: list[dict[str, Any]], before: list[str], round_: int, puts: Puts) -> None:
    """Earlier records are at their offsets, followed by a prefix of each producer's records."""
    ids = [record["id"] for record in found]
    assert len(set(ids)) == len(ids), "a record is stored twice"
    assert ids[: len(before)] == before, "records of earlier rounds moved"
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in ids[len(before) :]:
        producer, _, number = name.rpartition(".")
        assert producer.startswith(f"{round_}."), f"{name} was never put"
        numbers[producer].append(int(number))
    for producer, got in numbers.items():
        assert got == list(range(len(got))), f"missing or reordered records of {producer}: {got}"
    stored = set(ids)
    for words in puts.acknowledged:
        assert stored.issuperset(words), f"lost: {sorted(set(words) - stored)}"
    for words in puts.started:
        whole = stored.issuperset(words) or stored.isdisjoint(words)
        assert whole, f"part of a batch is missing: {words}"
    for record in found:
        assert record["text"] == "some text " * 8
        assert record["id"].endswith(f".{record['n']}")


def acknowledged_in_order(found: list[dict[str, Any]], puts: Puts) -> bool:
    """Return whether each producer's puts were acknowledged in the order of offsets."""
    place = {record["id"]: i for i, record in enumerate(found)}
    by_producer: dict[str, list[int]] = defaultdict(list)
    for words in puts.acknowledged:
        by_producer[words[0].rpartition(".")[0]] += [place[name] for name in words]
    return all(got == sorted(got) for got in by_producer.values())


async def kill_writers(folder: Path, count: int, seed: int) -> int:
    """Kill ``count`` writers of one bucket, one after another; return how many records survived."""
    rng = random.Random(seed)
    before: list[str] = []
    for number in range(count):
        puts = kill_writer(folder, number, rng)
        handle = CrashableBucket(folder, lambda path: PersistingBackend(0, str(path), **LOG))
        found = await read_checked(handle.backend)
        check_found(found, before, number, puts)
        assert acknowledged_in_order(found, puts)
        before = [record["id"] for record in found]
        await (handle.drop() if rng.random() < 0.5 else handle.backend.close())
    return len(before)
