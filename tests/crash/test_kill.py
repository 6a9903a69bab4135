"""kill -9 at random moments: what was acknowledged is there, once, in order, and nothing else."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.crash.checking import Handle, read_checked

from persisting.queue import PersistingBackend

CHILD = TESTS / "support" / "crash" / "child.py"
LOG = {"enable_wal": True, "flush_interval": None}
ROUNDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("singles", {**LOG, "wal_sync_interval": 0.0}),
    ("concurrent", {**LOG, "wal_sync_interval": 0.0, "flush_threshold": 20}),
    ("batches", {**LOG, "wal_sync_interval": 1.0, "compression": "zstd"}),
    ("recovering", {**LOG, "wal_sync_interval": 0.0}),
    ("evolving", {**LOG, "wal_sync_interval": 0.0, "flush_threshold": 25}),
    ("concurrent", {**LOG, "wal_sync_interval": 1.0, "max_wal_size": 20_000}),
    ("flushes", {"flush_interval": None}),
    ("evolving", {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 15, "compression": "zstd"}),
    ("recovering", {**LOG, "wal_sync_interval": 1.0, "max_buffer_bytes": 4000}),
    ("concurrent", {**LOG, "wal_sync_interval": 0.02, "flush_threshold": 40}),
)


@dataclass
class Killed:
    """What a child said before it was killed."""

    acknowledged: list[list[str]] = field(default_factory=list)
    """The ids of each acknowledged put."""
    begun: list[list[str]] = field(default_factory=list)
    """The ids of each batch, acknowledged or not."""


def run_and_kill(folder: Path, number: int, rng: random.Random) -> Killed:
    mode, options = ROUNDS[number % len(ROUNDS)]
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), str(number), mode, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    lines: list[bytes] = []
    enough = threading.Event()
    wanted = 1 if mode == "recovering" else 2 + rng.choice((0, 5, rng.randrange(400)))

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if len(lines) >= wanted:
                enough.set()
        enough.set()

    reader = threading.Thread(target=read)
    reader.start()
    enough.wait(10)
    time.sleep(rng.uniform(0, 0.03))
    child.send_signal(signal.SIGKILL)
    assert child.stderr is not None
    errors = child.stderr.read().decode()
    child.wait()
    reader.join()
    child.stdout.close()  # type: ignore[union-attr]
    child.stderr.close()
    assert child.returncode in (-signal.SIGKILL, 0), errors
    assert mode == "recovering" or child.returncode == -signal.SIGKILL, errors
    said = [line.decode().split() for line in lines if line.endswith(b"\n")]
    puts = [words for words in said if words[0] not in ("opening", "open")]
    return Killed([w for w in puts if w[0] != "+"], [w[1:] for w in puts if w[0] == "+"])


def check_found(found: list[dict[str, Any]], before: list[str], round_: int, said: Killed) -> None:
    """The records of earlier rounds at their offsets, then a beginning of each producer's."""
    ids = [record["id"] for record in found]
    assert len(set(ids)) == len(ids), "doubled"
    assert ids[: len(before)] == before, "the records of earlier rounds moved"
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in ids[len(before) :]:
        producer, _, number = name.rpartition(".")
        assert producer.startswith(f"{round_}."), f"{name} was never put"
        numbers[producer].append(int(number))
    for producer, got in numbers.items():
        assert got == list(range(len(got))), f"a hole, or another order, in {producer}: {got}"
    there = set(ids)
    for words in said.acknowledged:
        assert there.issuperset(words), f"lost: {sorted(set(words) - there)}"
    for words in said.begun:
        assert there.issuperset(words) or there.isdisjoint(words), f"a batch was torn: {words}"
    for record in found:
        assert record["text"] == "some text " * 8
        assert record["id"].endswith(f".{record['n']}")


def acknowledged_order(found: list[dict[str, Any]], said: Killed) -> bool:
    """One put after the other is acknowledged in the order of offsets."""
    place = {record["id"]: i for i, record in enumerate(found)}
    by_producer: dict[str, list[int]] = defaultdict(list)
    for words in said.acknowledged:
        by_producer[words[0].rpartition(".")[0]] += [place[name] for name in words]
    return all(got == sorted(got) for got in by_producer.values())


async def rounds_of_killing(folder: Path, count: int, seed: int) -> int:
    """Kill ``count`` writers of one bucket, one after the other; how many records survived."""
    rng = random.Random(seed)
    before: list[str] = []
    for number in range(count):
        said = run_and_kill(folder, number, rng)
        handle = Handle(folder, lambda path: PersistingBackend(0, str(path), **LOG))
        found = await read_checked(handle.backend)
        check_found(found, before, number, said)
        assert acknowledged_order(found, said)
        before = [record["id"] for record in found]
        if rng.random() < 0.5:
            await handle.drop()
        else:
            await handle.backend.close()
    return len(before)


async def test_ten_killed_writers_lose_and_double_nothing(tmp_path: Path) -> None:
    assert await rounds_of_killing(tmp_path / "bucket", 10, seed=1) > 100


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
async def test_hundred_killed_writers_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Five buckets, twenty writers each."""
    assert await rounds_of_killing(tmp_path / "bucket", 20, seed=100 + seed) > 100
