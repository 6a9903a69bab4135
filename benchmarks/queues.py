"""Benchmarks of the queues, compared with Pulsing's own queue in memory in the same run.

    .venv/bin/python benchmarks/queues.py
    .venv/bin/python benchmarks/queues.py --quick --only remote

Measures embedded queues, an actor in this process, another process over the loopback, and
processes that share a topic by its local socket. A file
named ``queue.py`` would hide the module of the standard library from the other benchmarks.
Absolute numbers depend on the machine and its load; compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pulsing as pul
from corebench import records, report
from corebench.arguments import BenchParser
from corebench.report import Run, Target, rate
from sharedbench.measure import measure as measure_sockets

from persisting.cluster.host import host_here, serve
from persisting.queue import read_queue, write_queue

LIST = 10_000
CONCURRENT = 1000
WARM_UP = 256
"""Records put before the clock starts: enough to open 16 buckets."""
_LOGGED = {"enable_wal": True, "wal_sync_interval": 1.0, "flush_threshold": 50_000}
TOPICS: dict[str, dict[str, Any]] = {
    "memory": {"backend": "memory"},
    "lance": {"backend": "lance", "backend_options": {"flush_threshold": 50_000}},
    **{
        f"log 1 s, {buckets} buckets": {
            "backend": "persisting",
            "backend_options": _LOGGED,
            "num_buckets": buckets,
        }
        for buckets in (4, 16)
    },
}
"""The arguments of ``write_queue``, by label."""
PLACES = ("embedded", "local", "remote", "socket")
TARGETS = {
    ("remote", "list"): Target("value", at_least=300_000),
    ("remote", "stream"): Target("value", at_least=250_000),
    ("remote", "concurrent"): Target("value", at_least=20_000),
}
PULSING = "pulsing's queue, memory"


async def seconds(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


class Measured:
    """The best rate of each operation."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def keep(self, name: str, count: int, took: float) -> None:
        self.rates[name] = max(self.rates.get(name, 0.0), rate(count, took))


async def measure_ours(system: Any, folder: Path, options: dict[str, Any], run: Run) -> Measured:
    found = Measured()
    rows = list(records.stream(run.records))
    lists = [rows[start : start + LIST] for start in range(0, len(rows), LIST)]
    for _ in range(run.repeat):
        place: dict[str, Any] = {"topic": f"bench-{uuid.uuid4().hex[:8]}"}
        if options["backend"] != "memory":
            place["storage_path"] = str(folder)
        writer = await write_queue(system, **place, **options)
        await writer.put(rows[:WARM_UP])
        singles = rows[: 200 if system is not None else 2000]
        found.keep("single", len(singles), await seconds(_one_by_one(writer, singles)))
        for _ in range(5):
            some = rows[:CONCURRENT]
            took = await seconds(asyncio.gather(*(writer.put(record) for record in some)))
            found.keep("concurrent", CONCURRENT, took)
        found.keep("list", len(rows), await seconds(_lists(writer, lists)))
        reader = await read_queue(system, **place)
        total = (await writer.stats())["total_count"]
        found.keep("stream", total, await seconds(_drain(reader, total)))
        await reader.close()
        await writer.close()
    return found


async def _one_by_one(writer: Any, rows: list[dict[str, Any]]) -> None:
    for record in rows:
        await writer.put(record)


async def _lists(writer: Any, lists: list[list[dict[str, Any]]]) -> None:
    waiting = iter(lists)

    async def work() -> None:
        for rows in waiting:
            await writer.put(rows)

    await asyncio.gather(*(work() for _ in range(4)))


async def _drain(reader: Any, total: int) -> None:
    count = 0
    async for _ in reader.get_stream():
        count += 1
    if count != total:
        raise SystemExit(f"read {count} of {total} records")


async def measure_pulsing(system: Any, topic: str, count: int) -> Measured:
    """Measure Pulsing's queue in memory with one bucket; it has no stream, so it reads pages."""
    from pulsing import streaming

    found = Measured()
    rows = list(records.stream(count))
    writer = await streaming.write_queue(system, topic, num_buckets=1)
    await writer.put(rows[0])
    found.keep("single", count, await seconds(_one_by_one(writer, rows)))
    found.keep("list", count, await seconds(writer.put(rows)))
    some = rows[:8]  # more at once exhaust Pulsing's connection pool
    took = await seconds(asyncio.gather(*(writer.put(record) for record in some)))
    found.keep("concurrent", len(some), took)
    reader = await streaming.read_queue(system, topic, num_buckets=1)
    started, got = time.perf_counter(), 0
    while page := await reader.get(limit=1000):
        got += len(page)
    found.keep("stream", got, time.perf_counter() - started)
    return found


async def topic_on(system: Any, node: str | None) -> str:
    """Return a topic whose bucket Pulsing places on ``node``."""
    from pulsing.streaming.manager import _compute_owner

    members = await system.members()
    for number in range(1000):
        topic = f"pulsing-{uuid.uuid4().hex[:6]}-{number}"
        if node is None or _compute_owner(f"{topic}:bucket_0", members) == node:
            return topic
    raise SystemExit("Pulsing places no bucket on the other node")


def _start_node(kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--node", kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def other_process(kind: str) -> AsyncIterator[tuple[str, str]]:
    """Start a node in another process; yield its address and id."""
    child = _start_node(kind)
    assert child.stdout is not None
    try:
        while not (line := await asyncio.to_thread(child.stdout.readline)).startswith("READY"):
            if not line:
                raise SystemExit("the other node did not start")
        _, address, node = line.split()
        yield address, node
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def run_node(kind: str) -> None:
    """Run a node of ours, which also speeds up small replies, or one of plain Pulsing."""
    from pulsing.streaming.manager import get_storage_manager

    system = await pul.actor_system("127.0.0.1:0")
    if kind == "ours":
        await serve(system)
    else:
        await get_storage_manager(system._inner)
    print("READY", system.addr, system.node_id.id, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(0.5)


@asynccontextmanager
async def place(where: str, kind: str = "ours") -> AsyncIterator[tuple[Any, str | None]]:
    """Yield a system and the node that should own the buckets."""
    if where == "embedded":
        yield None, None
    elif where == "local":
        system = await pul.actor_system("127.0.0.1:0")
        yield system, None
        host = host_here(system._inner)
        if host is not None:
            await host.close()
        await system.shutdown()
    else:
        async with other_process(kind) as (address, node):
            system = await pul.actor_system("127.0.0.1:0", seeds=[address])
            while len(await system.members()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            yield system, node
            await system.shutdown()


NAMES = {
    "single": "put, one after another",
    "concurrent": f"put, {CONCURRENT:,} concurrently",
    "list": f"put of lists of {LIST:,}",
    "stream": "stream",
}


async def measure(where: str, run: Run) -> None:
    pulsing_rates: dict[str, float] = {}
    if where != "embedded":
        async with place(where, "pulsing") as (system, node):
            count = 60 if where == "remote" else 1000
            topic = await topic_on(system, node)
            pulsing_rates = (await measure_pulsing(system, topic, count)).rates
    async with place(where) as (system, _):
        for label, options in TOPICS.items():
            with run.scratch() as folder:
                found = await measure_ours(system, folder, options, run)
            for kind, name in NAMES.items():
                run.add(
                    where,
                    f"{name}, {label}",
                    found.rates[kind],
                    "rec/s",
                    PULSING if pulsing_rates else "",
                    pulsing_rates.get(kind),
                    TARGETS.get((where, kind)),
                )


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--records", 300_000)
    parser.add_quick()
    parser.add_repeat()
    parser.add_only(PLACES, "place to measure")
    parser.add_folder()
    parser.add_results()
    parser.add_argument("--node", choices=("ours", "pulsing"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.records < LIST or given.repeat < 1:
        parser.error(f"--records must be at least {LIST} and --repeat at least 1")
    if given.quick:
        given.records, given.repeat = 50_000, 1
    return given


def main() -> None:
    given = arguments()
    if given.node:
        asyncio.run(run_node(given.node))
        return
    before = report.announce(given.records, given.repeat)
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = Run(given.records, given.repeat, Path(folder))
        for where in given.only or PLACES:
            if where == "socket":
                measure_sockets(run)
            else:
                asyncio.run(measure(where, run))
    print(f"\nwritten to {report.write_json(run, given.results, before, 'queues')}")


if __name__ == "__main__":
    main()
