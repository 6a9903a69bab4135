"""Spark: kill drivers and workers in batches and streams, and write with Spark between rounds.

The cases are those of tests/spark/test_spark_kill.py, about a minute each.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support.crash.checks import PromiseBroken

from torture.records import plain, record
from torture.rounds import check_written
from torture.scenario import Round
from torture.topic import Between
from torture.topic_model import TopicModel
from torture.worker import TOPIC
from torture.workspace import Workspace

ROWS = 40
CASES = Path(__file__).parents[1] / "spark" / "test_spark_kill.py"


def torture(seed: int, seconds: float, tally: Counter[str]) -> None:
    """Run the cases in an order drawn from the seed until the time is over, at least one."""
    until = time.monotonic() + seconds
    cases = [line for line in _pytest("--collect-only").stdout.splitlines() if "::" in line]
    random.Random(seed).shuffle(cases)
    for case in cases:
        done = _pytest(case)
        if done.returncode:
            raise PromiseBroken(f"seed {seed}, {case}:\n{done.stdout[-4000:]}")
        tally["kill cases"] += 1
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


def spark_writes() -> Between:
    """Return a function that writes a batch with Spark between rounds, twice as after a failure."""
    from persisting.spark import session

    spark = session(conf={"spark.ui.enabled": False})

    async def write(workspace: Workspace, round_: Round, model: TopicModel) -> None:
        if not (workspace.queues / TOPIC / "topic.json").exists():
            return
        name = f"spark-{round_.number}"
        records = [plain(record(name, number, 0)) for number in range(ROWS)]
        frame = spark.createDataFrame(
            [(r["id"], r["n"], r["text"], r["emb"]) for r in records],
            "id string, n long, text string, emb array<double>",
        )
        for _ in range(2):
            made = frame.write.format("persisting").mode("append").option("writeId", name)
            made.save(str(workspace.queues / TOPIC))
        await check_written(workspace, round_.num_buckets, model, records)

    return write
