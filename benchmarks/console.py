"""Measures the console: server time of its pages, and memory while live tails run.

    .venv/bin/python benchmarks/console.py
    .venv/bin/python benchmarks/console.py --quick
    .venv/bin/python benchmarks/console.py --folder /data/bench --only pages

The topics are created once; with ``--folder`` they stay there for the next run. A page's time is
what the server took until it began to answer (its Server-Timing header): right after the start,
during the first round of samples, at the first request of each page, and the median and slowest of
the following ones. Memory is the resident set of the console and of its processes while a writer
puts and several readers follow the topic.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from consolebench.pages import pages
from consolebench.tails import tails
from consolebench.topics import prepare
from corebench import report
from corebench.arguments import BenchParser

SUITES = {"pages": pages, "tails": tails}


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--topics", 1_000)
    parser.add_count("--records", 10_000_000)
    parser.add_count("--requests", 20)
    parser.add_count("--tails", 4)
    parser.add_count("--seconds", 120)
    parser.add_quick("20 topics, 50,000 records, 5 requests, 2 tails for 10 s")
    parser.add_only(SUITES)
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    if given.quick:
        given.topics, given.records, given.requests = 20, 50_000, 5
        given.tails, given.seconds = 2, 10
    if min(given.topics, given.requests, given.tails) < 2 or given.records < 1_000:
        parser.error("needs at least 2 topics, requests and tails, and 1,000 records")
    return given


def main() -> None:
    given = arguments()
    before = report.announce(given.records, given.requests)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-") as temporary:
        storage = (given.folder or Path(temporary)) / "console"
        storage.mkdir(parents=True, exist_ok=True)
        asyncio.run(prepare(storage, given.topics, given.records))
        print(report.HEADER)
        run = report.Run(given.records, given.requests, storage)
        for name in given.only or SUITES:
            SUITES[name](run, given)
    print(f"\nwritten to {report.write_json(run, given.results, before, 'console')}")


if __name__ == "__main__":
    main()
