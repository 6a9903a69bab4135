"""Server time of the pages, with many topics and a large one."""

from __future__ import annotations

import argparse
import statistics
import time

from corebench.report import Run, Target

from consolebench.running import Console, running
from consolebench.topics import LARGE

_TOPIC = f"/topics/{LARGE}"
PAGES = {
    "topics": "/",
    "topics by rate, page 5": "/?sort=rate&order=desc&page=5",
    "topics with a filter": "/?filter=00042",
    "topic": _TOPIC,
    "newest records": f"{_TOPIC}/records",
    "records at an offset": f"{_TOPIC}/records?bucket=1&offset=1000000",
    "records an hour ago": f"{_TOPIC}/records?time=1h",
    "one record": f"{_TOPIC}/records/0/1000",
    "live tail": f"{_TOPIC}/tail",
    "search form": f"{_TOPIC}/search",
    "trajectories": f"{_TOPIC}/trajectories?field=run",
    "groups": f"{_TOPIC}/groups",
    "versions": f"{_TOPIC}/versions",
    "maintenance": f"{_TOPIC}/maintenance",
}
_TARGET = Target("value", at_most=100)


_ROUND_SECONDS = 0.25


def pages(run: Run, given: argparse.Namespace) -> None:
    """Measure each page after a start of the console, and again while it runs."""
    with running(run.folder) as console:
        run.add("start", "topics, at once", console.server_ms("/"), "ms", target=_TARGET)
        run.add("start", "topic, at once", console.server_ms(_TOPIC), "ms", target=_TARGET)
        times = _first_round(console)
        median = statistics.median(times)
        run.add("start", "topics, in the first round", median, "ms", target=_TARGET)
        run.add("start", "slowest in the first round", max(times), "ms")
        for name, path in PAGES.items():
            run.add("first", name, console.server_ms(path), "ms", target=_TARGET)
        for name, path in PAGES.items():
            times = [console.server_ms(path) for _ in range(run.repeat)]
            run.add("median", name, statistics.median(times), "ms", target=_TARGET)
            run.add("slowest", name, max(times), "ms")


def _first_round(console: Console) -> list[float]:
    """Ask for the list until the console has sampled every topic once; return what each took."""
    started, times = time.monotonic(), []
    while True:
        took, text = console.ask("/?sort=rows&order=asc")
        times.append(took)
        if "not read yet" not in text:
            print(f"every topic was read after {time.monotonic() - started:.1f} s")
            return times
        time.sleep(_ROUND_SECONDS)
