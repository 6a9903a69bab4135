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
from corebench.arguments import BenchParser
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


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--records", 1_000_000)
    parser.add_quick()
    parser.add_repeat()
    parser.add_only(SUITES)
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    if given.records < 1000 or given.repeat < 1:
        parser.error("--records must be at least 1000 and --repeat at least 1")
    if given.quick:
        given.records, given.repeat = 50_000, 1
    return given


def main() -> None:
    given = arguments()
    before = report.announce(given.records, given.repeat)
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.records, given.repeat, Path(folder))
        for name in given.only or SUITES:
            SUITES[name](run)
    print(f"\nwritten to {report.write_json(run, given.results, before)}")


if __name__ == "__main__":
    main()
