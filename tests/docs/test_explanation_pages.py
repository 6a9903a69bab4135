"""The explanation pages match the code: layers, defaults, and the numbers of the models."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import DOCS, ROOT, blocks, both, tables

from persisting.options import PersistingOptions
from persisting.queue import Delivery, QueueWriter, WorkReader, read_queue
from persisting.spark import source_options as spark_options
from persisting.work.group_values import Settings
from persisting.work.work_reader import WorkOptions


def pages(name: str) -> Any:
    return pytest.mark.parametrize("page", both(name), ids=["en", "zh"])


@pages("explanation/architecture.md")
def test_architecture_page_draws_the_layers_of_the_import_contract(page: Path):
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^layers = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    known = re.findall(r"\w+", listed[1])
    drawing = next(block.text for block in blocks(page) if "write_queue, read_queue" in block.text)
    names = [name for line in drawing.splitlines() for name in re.findall(r"\w+", line[:36])]
    assert [name for name in names if name in known] == known


@pages("explanation/architecture.md")
def test_every_module_that_the_architecture_page_names_exists(page: Path):
    named = set(re.findall(r"(?<![\w/])(?:[a-z_]+/)?[a-z_]+\.py\b", page.read_text("utf-8")))
    assert len(named) > 30
    missing = {name for name in named if not (ROOT / "src/persisting" / name).is_file()}
    assert not missing


def test_contributing_lists_the_layers_of_the_import_contract():
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^layers = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    packages = next(t for t in tables(ROOT / "CONTRIBUTING.md") if t[0][0].startswith("package"))
    shown = [name for row in packages[1:] for name in re.findall(r"`(\w+)`", row[0])]
    assert shown == re.findall(r"\w+", listed[1])


@pages("explanation/scaling.md")
def test_scaling_page_numbers_follow_its_formula(page: Path):
    text = page.read_text("utf-8")
    assert re.search(r"\*s\* = 0\.65 (ms|毫秒)", text)
    assert re.search(r"\*c\* = 20 (µs|微秒)", text)
    rows = next(table for table in tables(page) if len(table) == 6 and table[1][0] == "1")[1:]
    for row in rows:
        producers, modelled = int(row[0]), int(row[2].replace(",", ""))
        rate = producers / (0.65e-3 + producers * 20e-6)
        assert modelled == pytest.approx(rate, rel=0.005)


@pages("explanation/scaling.md")
def test_scaling_page_defaults_match_the_code(page: Path):
    text = page.read_text("utf-8")
    interval = PersistingOptions(bucket_id=0, storage_path=Path("x")).flush_interval
    assert (
        f"`flush_interval` ({interval:g} s)" in text
        or f"`flush_interval`（{interval:g} 秒）" in text
    )
    assert f"{spark_options.ROWS_PER_PARTITION:,}" in text


def test_scaling_benchmark_runs_and_writes_its_results(tmp_path: Path):
    program = ROOT / "benchmarks/scaling.py"
    small = ["--records", "200", "--repeat", "1", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, str(program), *small], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("scaling-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert {row["group"] for row in rows} == {"disk", "producers", "buckets", "processes"}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_numbers_match_the_why_not_page(name: str):
    zh = name.endswith(".zh.md")
    page = DOCS / "explanation" / ("why-not.zh.md" if zh else "why-not.md")
    theirs = {row[0].split("(")[0].split("（")[0].strip(): row[1:] for row in tables(page)[-1][1:]}
    table = next(t for t in tables(ROOT / name) if t[0][0] == "" and len(t[0]) == 5)
    ours = {row[0].split("(")[0].split("（")[0].strip(): row[1:] for row in table[1:]}
    del ours[next(iter(ours))]  # our own row
    assert ours == theirs


@pages("explanation/work-queues.md")
def test_every_word_of_work_groups_on_the_comparison_page_exists(page: Path):
    given = set(inspect.signature(read_queue).parameters) | {"put(record, delay)"}
    of_delivery = {name for name in dir(Delivery) if not name.startswith("_")}
    of_reader = {name for name in dir(WorkReader) if not name.startswith("_")}
    table = tables(page)[0][1:]
    named = [cell for row in table for cell in re.findall(r"^`([^`]+)`", row[0])]
    assert len(named) == 13
    for name in named:
        word = name if name in given else name.split("(")[0]
        assert word in given | of_delivery | of_reader, name
    assert "delay" in inspect.signature(QueueWriter.put).parameters


@pages("explanation/work-queues.md")
def test_comparison_page_states_the_defaults_of_work_groups(page: Path):
    first = {row[0] for row in tables(page)[0]}
    lease, limit = f"{WorkOptions('g').lease:g}", Settings().max_deliveries
    assert {f"`lease` ({lease} s)", f"`lease`（{lease} 秒）"} & first
    assert {f"`max_deliveries` ({limit})", f"`max_deliveries`（{limit}）"} & first
