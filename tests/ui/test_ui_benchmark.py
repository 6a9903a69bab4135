"""The benchmark of the console runs as a user would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_pages import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_console_benchmark_runs_and_writes_its_results(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "benchmarks/console.py", "--quick", "--results", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=500,
    )
    (result,) = tmp_path.glob("console-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert {row["group"] for row in rows} == {"start", "first", "median", "slowest", "tails"}
    sent = next(row for row in rows if row["name"] == "sent to each reader")
    assert sent["value"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_memory_stays_flat_while_live_tails_run(tmp_path: Path) -> None:
    counts = ["--topics", "2", "--records", "1000", "--tails", "4", "--seconds", "120"]
    command = ["benchmarks/console.py", "--only", "tails", *counts, "--results", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=1000)
    (result,) = tmp_path.glob("console-*.json")
    rows = {row["name"]: row["value"] for row in json.loads(result.read_text())["rows"]}
    assert rows["sent to each reader"] > 0
    assert rows["second half to first half"] < 1.2
