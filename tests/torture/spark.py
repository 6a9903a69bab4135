"""Spark: drivers and workers that are killed in batches and streams, and writes between rounds.

The cases of killing are those of tests/spark/test_spark_kill.py: a minute each.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support.crash.checking import Broken

from torture.home import Home
from torture.model import Ledger
from torture.plan import Round
from torture.records import plain, record
from torture.rounds import check_written
from torture.topic import Between
from torture.worker import TOPIC

ROWS = 40
CASES = Path(__file__).parents[1] / "spark" / "test_spark_kill.py"


def torture(seed: int, seconds: float, tally: Counter[str]) -> None:
    """Case after case in the order of the seed, at least one, until the time is over."""
    until = time.monotonic() + seconds
    cases = [line for line in _pytest("--collect-only").stdout.splitlines() if "::" in line]
    random.Random(seed).shuffle(cases)
    for case in cases:
        done = _pytest(case)
        if done.returncode:
            raise Broken(f"seed {seed}, {case}:\n{done.stdout[-4000:]}")
        tally["cases of killing"] += 1
        if time.monotonic() > until:
            return


def _pytest(what: str) -> subprocess.CompletedProcess[str]:
    where = [] if "::" in what else [str(CASES)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "nightly", what, *where],
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def writing() -> Between:
    """Between rounds, a batch is written by Spark, and written again as after a failure."""
    from persisting.spark import session

    spark = session(conf={"spark.ui.enabled": False})

    async def write(home: Home, round_: Round, ledger: Ledger) -> None:
        if not (home.queues / TOPIC / "topic.json").exists():
            return
        name = f"spark-{round_.number}"
        records = [plain(record(name, number, 0)) for number in range(ROWS)]
        frame = spark.createDataFrame(
            [(r["id"], r["n"], r["text"], r["emb"]) for r in records],
            "id string, n long, text string, emb array<double>",
        )
        for _ in range(2):
            made = frame.write.format("persisting").mode("append").option("writeId", name)
            made.save(str(home.queues / TOPIC))
        await check_written(home, round_.num_buckets, ledger, records)

    return write
