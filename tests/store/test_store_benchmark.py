"""The benchmark of topics in an object store runs as a user would run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.example_runner import run_example


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_object_store_benchmark_runs_and_writes_its_results(tmp_path: Path) -> None:
    quick = ["--quick", "--results", str(tmp_path)]
    output = run_example("../benchmarks/object_store.py", *quick, seconds=1000)
    found = json.loads((tmp_path / "object_store.json").read_text())
    parts = {
        "64 producers, linger 0 ms",
        "512 producers, linger 0 ms",
        "16 producers, lists of 1000",
        "put until a reader has it",
        "opening 10,000 rows for reading",
        "opening 10,000 rows for writing",
        "kill -9 of the owner until the next put",
    }
    assert {f"+5 ms: {part}" for part in parts} <= set(found)  # and systems that are installed
    for name, numbers in found.items():
        assert name in output
        assert numbers
        assert all(number >= 0 for number in numbers.values()), numbers
