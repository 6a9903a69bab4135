"""Spark benchmarks: topics as source and sink compared with Spark's own Parquet, in one run.

    .venv/bin/python benchmarks/spark.py
    .venv/bin/python benchmarks/spark.py --rows 100000 --repeat 1
    .venv/bin/python benchmarks/spark.py --only read --profile

Both read, write and stream the same rows in the same session, alternating, and the best of each is
kept. ``--profile`` shows where our time goes: it repeats the work of Spark's Python processes here,
step by step. Absolute numbers depend on the machine and its load; compare the ratios. For seconds,
a ratio below 1 is better than Parquet; for rows per second, above 1.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from corebench import report
from corebench.arguments import RESULTS, BenchParser
from sparkbench.batches import reading, writing
from sparkbench.duplicates import duplicates
from sparkbench.replay import profile
from sparkbench.rows import make
from sparkbench.streams import streaming

from persisting.spark import session

SUITES = {"read": reading, "write": writing, "stream": streaming, "duplicates": duplicates}
JAVA = "-XX:TieredStopAtLevel=4 -XX:+UseG1GC"
"""Our sessions are tuned to start quickly; this one computes for a long time."""


def arguments() -> argparse.Namespace:
    parser = BenchParser(__doc__)
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="number of rows (default: 2,000,000)"
    )
    parser.add_argument("--buckets", type=int, default=4, help="buckets of the topics (default: 4)")
    parser.add_argument("--master", default="local[2]", help="Spark's master (default: local[2])")
    parser.add_argument(
        "--repeat", type=int, default=5, help="repetitions, of which the best is kept"
    )
    parser.add_argument(
        "--only", action="append", choices=SUITES, help="run only this part; may be repeated"
    )
    parser.add_argument("--profile", action="store_true", help="also show where our time goes")
    parser.add_argument("--folder", type=Path, help="folder for the data (default: temporary)")
    parser.add_argument("--json", type=Path, help="file for the results (default: in results/)")
    given = parser.parse_args()
    if given.rows < 1000 or given.repeat < 1 or given.buckets < 1:
        parser.error("at least 1000 rows, 1 bucket and 1 repetition are needed")
    return given


def main() -> None:
    given = arguments()
    before = report.machine()
    print(f"{given.rows:,} rows, best of {given.repeat}, load average", end=" ")
    print(", ".join(f"{load:.1f}" for load in before["load_average"]))  # type: ignore[attr-defined]
    spark = session("bench", master=given.master, conf={"spark.driver.extraJavaOptions": JAVA})
    with tempfile.TemporaryDirectory(prefix="persisting-bench-", dir=given.folder) as folder:
        run = report.Run(given.rows, given.repeat, Path(folder))
        bench = make(spark, run, given.buckets)
        print(report.HEADER)
        for name in given.only or SUITES:
            SUITES[name](bench)
        if given.profile:
            profile(bench, given.only or list(SUITES))
        spark.stop()
    where = given.json.parent if given.json else RESULTS
    path = report.write_json(run, where, {**before, "spark": spark.version})
    path = path.rename(given.json or path.with_name(path.name.replace("core-", "spark-")))
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
