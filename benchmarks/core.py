"""Benchmarks of the core, compared with raw Lance and SQLite in the same run.

    make bench
    make bench BENCH_ARGS="--quick"
    make bench BENCH_ARGS="--only durable --only recovery --repeat 5"

Absolute numbers depend on the machine and its load; compare the ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from corebench import report
from corebench.compression import compression
from corebench.durable import durable
from corebench.ingest import growth, ingest
from corebench.process import import_time, memory, recovery, stalls
from corebench.reading import reading

SUITES = {
    "import": import_time,
    "ingest": ingest,
    "growth": growth,
    "reading": reading,
    "durable": durable,
    "recovery": recovery,
    "stalls": stalls,
    "memory": memory,
    "compression": compression,
}
RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000, help="default: 1,000,000")
    parser.add_argument("--quick", action="store_true", help="50,000 records, each measured once")
    parser.add_argument(
        "--repeat", type=int, default=3, help="number of measurements; the best counts"
    )
    parser.add_argument(
        "--only", action="append", choices=SUITES, help="benchmark to run; may be repeated"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the data (default: a temporary one)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    given = parser.parse_args()
    if given.records < 1000 or given.repeat < 1:
        parser.error("--records must be at least 1000 and --repeat at least 1")
    if given.quick:
        given.records, given.repeat = 50_000, 1
    return given


def main() -> None:
    given = arguments()
    before = report.machine()
    print(f"{given.records:,} records, best of {given.repeat}, load average", end=" ")
    print(", ".join(f"{load:.1f}" for load in before["load_average"]))
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.records, given.repeat, Path(folder))
        for name in given.only or SUITES:
            SUITES[name](run)
    print(f"\nwritten to {report.write_json(run, given.results, before)}")


if __name__ == "__main__":
    main()
