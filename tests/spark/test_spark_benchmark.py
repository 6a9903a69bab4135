"""benchmarks/spark.py runs and writes its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# It starts its own Spark and runs streams, which takes more than a minute.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "spark.py"


def test_spark_benchmark_runs_and_writes_its_results(tmp_path):
    result = tmp_path / "results" / "spark.json"
    small = ["--rows", "1000", "--repeat", "1", "--profile", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), *small, "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert {row["group"] for row in rows} == {
        "read",
        "write",
        "stream",
        "duplicates",
        "profile",
    }
    assert all(row["name"] in done.stdout for row in rows)
    assert all(row["ratio"] is not None for row in rows)
    assert list(tmp_path.iterdir()) == [result.parent]
