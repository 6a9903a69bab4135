"""How synced puts scale with producers, buckets and processes, for docs/explanation/scaling.md.

    .venv/bin/python benchmarks/scaling.py
    .venv/bin/python benchmarks/scaling.py --records 2000 --repeat 1

Every number is compared with one bucket in one process, measured in turns with it. A bare fdatasync
on the same disk is measured too: one waiting producer cannot be faster.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corebench import records, report
from corebench.arguments import BenchParser
from corebench.disk import synced_writes
from corebench.report import Run, rate

from persisting.queue import write_queue

OPTIONS = {"enable_wal": True, "wal_sync_interval": 0.0}
ONE = "1 bucket, 1 process"


async def put(folder: Path, rows: list[dict[str, Any]], *, producers: int, buckets: int) -> float:
    """Return the seconds that ``producers`` tasks need to put ``rows`` one by one, each synced."""
    async with await write_queue(
        topic="t",
        storage_path=str(folder),
        num_buckets=buckets,
        backend="persisting",
        backend_options=OPTIONS,
    ) as writer:
        await writer.put({**rows[0], "id": "first"})

        async def produce(share: list[dict[str, Any]]) -> None:
            for record in share:
                await writer.put(record)

        started = time.perf_counter()
        await asyncio.gather(*(produce(rows[i::producers]) for i in range(producers)))
        return time.perf_counter() - started


def in_one(count: int, producers: int, buckets: int) -> Callable[[Path], float]:
    rows = list(records.stream(count))

    def measure(folder: Path) -> float:
        return rate(count, asyncio.run(put(folder, rows, producers=producers, buckets=buckets)))

    return measure


def in_several(count: int, producers: int, processes: int) -> Callable[[Path], float]:
    """Measure processes that each have their own bucket, producers and ``count`` records."""

    def measure(folder: Path) -> float:
        children = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(folder / str(number)), str(count)],
                env={**os.environ, "PRODUCERS": str(producers)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(processes)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        seconds = [float(child.communicate()[0]) for child in children]
        return rate(count * processes, max(seconds))

    return measure


def child(folder: Path, count: int) -> None:
    rows = list(records.stream(count))
    print("ready", flush=True)
    sys.stdin.readline()
    print(asyncio.run(put(folder, rows, producers=int(os.environ["PRODUCERS"]), buckets=1)))


def bare_sync(folder: Path) -> float:
    """Return how many synced writes of 100 bytes the disk does per second."""
    return rate(500, synced_writes(folder, [b"x" * 100] * 500))


def measure(run: Run) -> None:
    few = max(200, run.records // 10)
    bare, single = run.best(bare_sync, in_one(few, 1, 1))
    run.add("disk", "write of 100 bytes and fdatasync", bare, "rec/s")
    run.add("producers", "1 producer", single, "rec/s", "write and fdatasync", bare)
    crowds = (4, 16, 64, 256)
    for producers, found in zip(
        crowds, run.best(*(in_one(run.records, n, 1) for n in crowds)), strict=True
    ):
        run.add("producers", f"{producers} producers", found, "rec/s", "1 producer", single)
    one, two, four = run.best(*(in_one(run.records, 64, n) for n in (1, 2, 4)))
    for buckets, found in ((2, two), (4, four)):
        run.add("buckets", f"64 producers, {buckets} buckets", found, "rec/s", ONE, one)
    one, two, four = run.best(*(in_several(run.records, 64, n) for n in (1, 2, 4)))
    for processes, found in ((2, two), (4, four)):
        name = f"{processes} processes, each 64 producers, 1 bucket"
        run.add("processes", name, found, "rec/s", ONE, one)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = BenchParser(__doc__)
    parser.add_count("--records", 20_000)
    parser.add_repeat()
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    before = report.announce(given.records, given.repeat)
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = Run(given.records, given.repeat, Path(folder))
        measure(run)
    print(f"\nwritten to {report.write_json(run, given.results, before, 'scaling')}")


if __name__ == "__main__":
    main()
