"""The Spark programs in examples/ run and print what they promise."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.example_runner import EXAMPLES, run_example
from support.spark.topics import ids, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def here(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what an example prints in this process, with the session of the tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Spark is already running")
        runpy.run_path(str(EXAMPLES / name))["main"](folder)
    return capsys.readouterr().out


def alone(name: str, folder: Path) -> str:
    """Return what an example prints if a user runs it."""
    return run_example(name, str(folder), seconds=500)


def check_incremental(output: str, folder: Path, before: int) -> None:
    numbers = range(before, before + 500)
    good = [n for n in numbers if n % 5 and n % 7]
    assert f"raw documents: {before + 300}\n" in output
    assert re.findall(r"taken: (\d+), kept: (\d+), lag: 0", output) == [
        ("300", str(sum(n < before + 300 for n in good))),
        ("200", str(sum(n >= before + 300 for n in good))),
    ]
    assert "nothing new, taken: 0\n" in output
    everything = [f"doc-{n}" for n in range(before + 500) if n % 5 and n % 7]
    assert ids(folder, "curated") == sorted(everything)


def test_incremental_example_takes_new_rows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = here("spark_incremental.py", tmp_path, capsys)
    check_incremental(output, tmp_path, 0)
    parts = dict(re.findall(r"(train|validation): (\d+) rows", output))
    assert int(parts["train"]) + int(parts["validation"]) == len(ids(tmp_path, "curated"))
    assert int(parts["validation"]) > 0


def test_embedding_example_finds_texts_by_meaning(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = here("spark_embedding.py", tmp_path, capsys)
    assert "embedded 8 texts\n" in output
    found = re.findall(r"^(.*):\n   (.*)\n   (.*)\n", output, re.MULTILINE)
    assert len(found) == 3
    for question, *texts in found:
        for text in texts:
            assert set(question.split()) & set(text.split()) - {"a", "the", "on", "and"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_incremental_example_continues_in_a_second_process(tmp_path: Path) -> None:
    first = alone("spark_incremental.py", tmp_path)
    check_incremental(first, tmp_path, 0)
    second = alone("spark_incremental.py", tmp_path)
    check_incremental(second, tmp_path, 500)
    # Both runs train on the tag of the first.
    assert first.splitlines()[-2:] == second.splitlines()[-2:]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_embedding_example_runs_as_a_program(tmp_path: Path) -> None:
    assert "embedded 8 texts\n" in alone("spark_embedding.py", tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_declarative_pipeline_example_takes_each_row_once(tmp_path: Path) -> None:
    for runs in (1, 2):
        output = alone("spark_pipeline/run.py", tmp_path)
        assert f"raw: {50 * runs} rows\ncurated: {30 * runs} rows\n" in output
        assert ids(tmp_path, "curated") == [n for n in range(50 * runs) if n % 5 > 1]
        rejected = {row["id"]: row["reason"] for row in stored(tmp_path, "rejected")}
        assert rejected == {
            n: "too short" if n % 5 else "no text" for n in range(50 * runs) if n % 5 < 2
        }
        assert len(stored(tmp_path, "rejected")) == 20 * runs
