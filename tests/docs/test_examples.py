"""The programs in examples/ and the benchmarks run as a user would run them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
from support.example_runner import EXAMPLES, run_example

from persisting.queue import read_queue


def test_tour_example_shows_every_part():
    output = run_example("tour.py")
    numbers = re.findall(r"^(\d+)\. ", output, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 12)]
    assert "Every claim held" in output


def test_embedded_backend_example_prints_its_records(tmp_path):
    assert run_example("embedded_backend.py").count("got {'id'") == 4
    assert run_example("embedded_backend.py", str(tmp_path)).count("got {'id'") == 4
    assert run_example("embedded_backend.py", str(tmp_path)).count("got {'id'") == 8


def test_durable_producer_resumes_after_kill_9(tmp_path):
    program = [sys.executable, str(EXAMPLES / "durable_producer.py"), str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line == "20\n":
                os.kill(child.pid, signal.SIGKILL)
                break
        last = 20 + sum(1 for line in child.stdout if line.endswith("\n"))
    first, *rest = map(
        int, run_example("durable_producer.py", str(tmp_path), str(last + 10)).split()
    )
    assert last < first <= last + 2
    assert [first, *rest] == list(range(first, last + 10))
    assert run_example("durable_producer.py", str(tmp_path), str(last + 10)) == ""


def test_two_processes_of_the_shared_topic_see_each_other(tmp_path):
    program = [sys.executable, str(EXAMPLES / "shared_topic.py"), str(tmp_path), "60"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        asyncio.run(_first_record(tmp_path))
        output = run_example("shared_topic.py", str(tmp_path), "20")
        child.kill()
    assert f"process {child.pid} has put 0\n" in output


async def _first_record(folder):
    """Wait until the other process has put a record."""
    async with await read_queue("chat", storage_path=str(folder), wait_for_topic=True) as reader:
        assert await reader.get(limit=1, wait=True)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_has_a_docstring_and_a_test(example):
    assert example.read_text().startswith('"""')
    here = {"tour.py", "embedded_backend.py", "durable_producer.py"}
    here |= {"shared_topic.py"}
    queues = {"embedded_queue.py", "pulsing_queue.py", "custom_backend.py"}  # test_queue_examples
    queues |= {"trajectory_search.py", "training_snapshot.py", "rollout_buffer.py"}
    queues |= {"agent_farm.py"}
    training = {"train_and_resume.py", "replay_training.py"}  # test_training_examples
    training |= {"train_dataloader.py"}  # tests/torch
    sparks = {"spark_incremental.py", "spark_embedding.py"}  # tests/spark/test_spark_examples
    assert example.name in here | queues | training | sparks


def test_core_benchmark_runs_and_writes_its_results(tmp_path):
    small = ["--records", "1000", "--repeat", "1", "--results", str(tmp_path)]
    parts = [f"--only={name}" for name in ("ingest", "reading", "compression")]
    output = run_example("../benchmarks/core.py", *small, *parts)
    (result,) = tmp_path.glob("core-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert {row["group"] for row in rows} == {"ingest", "reading", "compression"}
    assert all(row["name"] in output for row in rows)


@pytest.mark.nightly
def test_peers_benchmark_runs_and_writes_its_results(tmp_path):
    small = ["--records", "300", "--repeat", "1", "--kind", "small", "--results", str(tmp_path)]
    parts = [f"--only={name}" for name in ("disk", "sqlite", "topics", "backends")]
    output = run_example("../benchmarks/peers.py", *small, *parts, "--seconds=1")
    (result,) = tmp_path.glob("peers-*.json")
    found = json.loads(result.read_text())
    assert set(found["rates"]["small"]) == {"ingest", "singles", "crowd", "drain"}
    topics = {"topic, 1 bucket", "topic, 4 buckets", "topic, 16 buckets"}
    topics |= {"topic, 4, sync API", "topic, 4, 1 s"}
    backends = {"backend, synced", "backend, 1 s", "backend, no log"}
    for work, rates in found["rates"]["small"].items():
        floor = {"write + fdatasync"} if work != "drain" else set()
        assert set(rates) == floor | {"SQLite"} | topics | backends
        assert all(rate > 0 for rate in rates.values())
    targets = [row for row in found["rows"] if row["target"]]
    assert len(targets) == 11
    assert all(row["median_ratio"] > 0 for row in targets)
    assert output.count(" met ") + output.count(" MISSED ") == 11
    assert result.with_suffix(".html").read_text().count("<svg") == 4


@pytest.mark.nightly
def test_peers_benchmark_measures_recovery_and_latency_between_processes(tmp_path):
    small = ["--records", "300", "--repeat", "1", "--results", str(tmp_path)]
    output = run_example("../benchmarks/peers.py", *small, "--only=recovery", "--only=latency")
    (result,) = tmp_path.glob("peers-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert [row["group"] for row in rows] == ["recovery"] * 4 + ["latency"] * 4
    assert all(row["value"] > 0 and row["name"] in output for row in rows)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_queues_benchmark_runs_and_writes_its_results(tmp_path):
    output = run_example(
        "../benchmarks/queues.py", "--quick", "--results", str(tmp_path), seconds=1000
    )
    (result,) = tmp_path.glob("queues-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert {row["group"] for row in rows} == {"embedded", "local", "remote", "socket"}
    assert all(row["value"] > 0 and row["name"] in output for row in rows)


@pytest.mark.parametrize(
    "questions",
    [
        {"workers": 3, "memory": 1},
        pytest.param({"processes": 3, "held": 1}, marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_work_benchmark_runs_and_writes_its_results(tmp_path, questions):
    small = ["--records=1000", "--repeat=1", "--hold=1", "--results", str(tmp_path)]
    parts = [f"--only={name}" for name in (*questions, "topics")]
    output = run_example("../benchmarks/work.py", *small, *parts)
    (result,) = tmp_path.glob("work-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert Counter(row["group"] for row in rows) == questions
    assert all(row["value"] > 0 and row["name"] in output for row in rows)
    assert all(row["met"] for row in rows if row["group"] == "memory")
