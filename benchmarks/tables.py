"""Benchmarks of search, random access and maintenance, compared with raw Lance and LanceDB.

    .venv/bin/python benchmarks/tables.py
    .venv/bin/python benchmarks/tables.py --quick
    .venv/bin/python benchmarks/tables.py --only maintenance --records 200000

LanceDB is optional: ``.venv/bin/pip install lancedb`` installs it (without changing pylance or
pyarrow); its lines are left out otherwise. Latencies are those of one caller that waits for each
answer. Absolute numbers depend on the machine and its load; compare the ratios, which are measured
in turns within one run. A ratio below 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from corebench import report
from corebench.arguments import BenchParser
from tablebench.maintenance import maintenance
from tablebench.random_access import random_access
from tablebench.sizes import Sizes
from tablebench.text_search import text_search
from tablebench.vector_search import vector_search

SUITES = {
    "search": vector_search,
    "text": text_search,
    "access": random_access,
    "maintenance": maintenance,
}


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_count("--vectors", 100_000)
    parser.add_count("--dimensions", 128)
    parser.add_count("--records", 1_000_000)
    parser.add_count("--queries", 200)
    parser.add_quick("20,000 x 64 vectors, 50,000 records, 50 queries")
    parser.add_only(SUITES)
    parser.add_folder()
    parser.add_results()
    given = parser.parse_args()
    if given.vectors < 2000 or given.records < 10_000 or given.queries < 10:
        parser.error("needs at least 2000 vectors, 10,000 records and 10 queries")
    if given.quick:
        given.vectors, given.dimensions, given.records, given.queries = 20_000, 64, 50_000, 50
    return given


def main() -> None:
    given = arguments()
    sizes = Sizes(given.vectors, given.dimensions, given.records, given.queries)
    before = report.machine()
    print(f"{sizes}, load average", end=" ")
    print(", ".join(f"{load:.1f}" for load in before["load_average"]))  # type: ignore[attr-defined]
    print(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.records, 1, Path(folder))
        for name in given.only or SUITES:
            SUITES[name](run, sizes)
    path = report.write_json(run, given.results, {**before, "sizes": str(sizes)})
    path = path.rename(path.with_name(path.name.replace("core-", "tables-")))
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
