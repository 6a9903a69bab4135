"""Measures a topic of several processes beside the same work in one process."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corebench import records
from corebench.report import Run, Target, rate

from persisting.queue import QueueWriter, read_queue, write_queue
from sharedbench.worker import TOPIC

PROCESSES = 4
PRODUCERS = 16
LIST = 1000
_WORKER = str(Path(__file__).with_name("worker.py"))
EMBEDDED = "embedded"
SQLITE = f"SQLite, {PROCESSES} processes (WAL, FULL, BEGIN IMMEDIATE)"


@contextmanager
def _started(*commands: list[Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes and wait until each is ready; end them at the end."""
    children = [
        subprocess.Popen(
            [sys.executable, _WORKER, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "READY\n":
                raise SystemExit("a process of the benchmark did not start")
        yield children
        for child in children:
            child.communicate("\n", timeout=120)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _rate_of_all(commands: list[list[Any]], count: int) -> float:
    """Let processes work at the same time; return records per second of all together."""
    with _started(*commands) as children:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        times = []
        for child in children:
            assert child.stdout is not None
            times.append([float(word) for word in child.stdout.readline().split()])
    return rate(count, max(end for _, end in times) - min(begin for begin, _ in times))


def producers(folder: Path, processes: int, count: int) -> float:
    """Return the rate of single puts by 64 producers in some processes."""
    each = PROCESSES * PRODUCERS // processes
    commands = [["produce", folder, each, count, f"p{n}"] for n in range(processes)]
    return _rate_of_all(commands, PROCESSES * PRODUCERS * count)


def sqlite(folder: Path, count: int) -> float:
    return _rate_of_all([["sqlite", folder, count, f"p{n}"] for n in range(PROCESSES)], 4 * count)


async def _single(writer: QueueWriter, rows: list[dict[str, Any]]) -> float:
    """Return the microseconds of a put that nothing else is put beside."""
    for record in rows[:50]:
        await writer.put(record)
    took = []
    for record in rows[:300]:
        started = time.perf_counter()
        await writer.put(record)
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e6


async def _without_socket(folder: Path, run: Run) -> float:
    rows = list(records.stream(min(run.records, 100_000)))  # as many as in the others, for the GC
    given = {**TOPIC, "storage_path": str(folder), "local_socket": False}
    async with await write_queue(**given) as writer:
        return await _single(writer, rows)


async def _use(folder: Path, run: Run) -> dict[str, float]:
    """Return the rates of lists and reads, and the microseconds of a single put."""
    rows = list(records.stream(min(run.records, 100_000)))
    found = {}
    async with await write_queue(storage_path=str(folder), **TOPIC) as writer:
        found["single"] = await _single(writer, rows)
        started = time.perf_counter()
        for start in range(0, len(rows), LIST):
            await writer.put(rows[start : start + LIST])
        found["list"] = rate(len(rows), time.perf_counter() - started)
        for _ in range(2):  # the first time, an owner learns how large the rows are
            async with await read_queue(topic="bench", storage_path=str(folder)) as reader:
                started, count = time.perf_counter(), 0
                async for _ in reader.get_stream():
                    count += 1
                found["stream"] = rate(count, time.perf_counter() - started)
        async with await read_queue(topic="bench", storage_path=str(folder)) as reader:
            started = time.perf_counter()
            count = (await reader.get_arrow()).num_rows
            found["arrow"] = rate(count, time.perf_counter() - started)
    return found


async def _fail_over(folder: Path, owner: subprocess.Popen[str]) -> float:
    """Return the milliseconds from ``kill -9`` of the owner until the next put is acknowledged."""
    async with await write_queue(storage_path=str(folder), **TOPIC) as writer:
        for record in records.stream(1000):
            await writer.put(record)
        owner.kill()
        started = time.perf_counter()
        await writer.put(next(iter(records.stream(1))))
        return (time.perf_counter() - started) * 1e3


def _best(measured: list[dict[str, float]]) -> dict[str, float]:
    return {
        name: (min if name == "single" else max)(found[name] for found in measured)
        for name in measured[0]
    }


def measure(run: Run) -> None:
    """Add the rows of a topic that another process owns."""
    embedded, socket, alone = [], [], []
    for _ in range(run.repeat):
        with run.scratch() as folder:
            alone.append(asyncio.run(_without_socket(folder, run)))
        with run.scratch() as folder:
            embedded.append(asyncio.run(_use(folder, run)))
        with run.scratch() as folder, _started(["own", folder]):
            socket.append(asyncio.run(_use(folder, run)))
    fail_overs = []
    for _ in range(run.repeat):
        with run.scratch() as folder, _started(["own", folder]) as (owner,):
            fail_overs.append(asyncio.run(_fail_over(folder, owner)))
    here, there = _best(embedded), _best(socket)
    group = "socket"
    most = max(1.3, (here["single"] + 150) / here["single"])
    run.add(
        group,
        f"put of lists of {LIST:,}",
        there["list"],
        "rec/s",
        EMBEDDED,
        here["list"],
        Target("ratio", at_least=0.6),
    )
    run.add(
        group,
        "single synced put, round trip",
        there["single"],
        "µs",
        EMBEDDED,
        here["single"],
        Target("ratio", at_most=round(most, 2)),
    )
    run.add(
        group,
        "single synced put of the owner, which listens",
        here["single"],
        "µs",
        "local_socket=False",
        min(alone),
    )
    for name, title in (("stream", "stream"), ("arrow", "get_arrow")):
        target = Target("value", at_least=500_000) if name == "stream" else None
        run.add(group, title, there[name], "rec/s", EMBEDDED, here[name], target)
    run.add(
        group,
        "kill -9 of the owner until the next put, slowest",
        max(fail_overs),
        "ms",
        target=Target("value", at_most=1000),
    )
    # Long enough that it does not matter which of the processes begins first.
    count = max(100, run.records // 300)
    several, one, other = [], [], []
    for _ in range(run.repeat):
        for processes, rates in ((PROCESSES, several), (1, one)):
            with run.scratch() as folder:
                rates.append(producers(folder, processes, count))
        with run.scratch() as folder:
            other.append(sqlite(folder, count))
    name = f"synced puts, {PROCESSES} processes × {PRODUCERS} producers"
    run.add(
        group,
        name,
        max(several),
        "rec/s",
        "64 producers in one process",
        max(one),
        Target("ratio", at_least=0.8),
    )
    run.add(group, name, max(several), "rec/s", SQLITE, max(other), Target("ratio", at_least=5))
