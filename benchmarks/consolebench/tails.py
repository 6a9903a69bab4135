"""Memory of the console while live tails run."""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import threading
import time

from corebench.report import Run, Target

from consolebench.running import running

_TOPIC = "followed"
_PAGES = [
    "/",
    *(f"/topics/{_TOPIC}{screen}" for screen in ("", "/records", "/groups", "/versions")),
]
_SAMPLES = 12
_WARM_SECONDS = 5.0
_PATIENCE_SECONDS = 600.0
"""A machine that runs other work may stop for minutes, and a run of hours continues after it."""
_WRITER = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(sys.argv[2], storage_path=sys.argv[1], durable=True, num_buckets=2)
    number = 0
    while True:
        rows = range(number, number + 200)
        await writer.put([{"id": str(n), "n": n, "text": "x" * 200} for n in rows])
        number += 200
        if number == 200:
            print("open", flush=True)
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


def tails(run: Run, given: argparse.Namespace) -> None:
    """Follow a topic of 2,000 puts per second for a while."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(run.folder), _TOPIC], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        with running(run.folder) as console:
            stop = threading.Event()
            received = [0] * given.tails
            readers = [
                threading.Thread(target=_follow, args=(console.port, stop, received, number))
                for number in range(given.tails)
            ]
            for reader in readers:
                reader.start()
            time.sleep(min(_WARM_SECONDS, given.seconds / 4))
            sizes = [console.resident_mb()]
            run.add("tails", "resident at the start", sizes[-1], "MB")
            taken = []
            for number in range(_SAMPLES):
                time.sleep(given.seconds / _SAMPLES)
                taken += [console.server_ms(path) for path in _PAGES]
                sizes.append(console.resident_mb())
                run.add("tails", f"resident after {number + 1}/{_SAMPLES}", sizes[-1], "MB")
            stop.set()
            for reader in readers:
                reader.join()
            middle = max(sizes[1 : _SAMPLES // 2 + 1])
            grown = max(sizes[_SAMPLES // 2 + 1 :]) / middle
            run.add("tails", "second half to first half", grown, "x", target=_FLAT)
            median = statistics.median(taken)
            run.add("tails", "pages meanwhile", median, "ms", target=_QUICK)
            run.add("tails", "slowest page meanwhile", max(taken), "ms")
            run.add("tails", "sent to each reader", min(received) / 1e6, "MB")
    finally:
        writer.kill()
        writer.wait()


_FLAT = Target("value", at_most=1.1)
_QUICK = Target("value", at_most=100)


def _follow(port: int, stop: threading.Event, received: list[int], number: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_SECONDS)
    connection.request("GET", f"/topics/{_TOPIC}/tail/events?rate=500")
    stream = connection.getresponse()
    while not stop.is_set():
        received[number] += len(stream.read1(1 << 16))
    connection.close()
