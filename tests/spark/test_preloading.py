"""Daemons load modules once for all processes that Spark forks from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.topics import load, put, rows

from persisting.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STARTUP = spark_session._STARTUP


def children(process: int) -> dict[str, int]:
    """Return the processes that a process has started: by their last argument, their ids."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text()
            arguments = (entry / "cmdline").read_text().rstrip("\0").split("\0")
        except OSError:  # not a process, or one that has ended
            continue
        if f"PPid:\t{process}\n" in status:
            found[arguments[-1]] = int(entry.name)
    return found


def threads(process: int) -> set[str]:
    return {path.read_text().strip() for path in Path(f"/proc/{process}/task").glob("*/comm")}


def test_daemons_have_loaded_lance_and_not_used_it(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(10))
    assert load(spark, tmp_path).where("id > 4").count() == 5
    daemons = children(spark.sparkContext._gateway.proc.pid)
    for name in (
        "pyspark.sql.worker.create_data_source",
        "pyspark.sql.worker.plan_data_source_read",
        "pyspark.worker",
    ):
        assert "site-packages/lance/" in Path(f"/proc/{daemons[name]}/maps").read_text(), name
        used = [
            thread for thread in threads(daemons[name]) if "tokio" in thread or "lance" in thread
        ]
        assert used == [], name


PLANNER = ("pyspark.daemon", "pyspark.sql.worker.create_data_source")
SHOW = "import sys; print('lance' in sys.modules, 'pandas' in sys.modules, 'hidden' in sys.modules)"


def started(*arguments: str, path: list[Path], python: str = sys.executable) -> str:
    """Return what a Python prints that starts with our module, and prints what it has loaded."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [python, "-c", SHOW, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    return done.stdout.strip()


def test_only_daemons_for_planning_load_modules_when_they_start() -> None:
    source = STARTUP.parents[2]
    assert started(*PLANNER, path=[STARTUP, source]) == "True False False"
    for others in ([], ["pyspark.daemon", "pyspark.worker"], [PLANNER[1]]):
        assert started(*others, path=[STARTUP, source]) == "False False False"


def test_module_of_the_user_that_ours_hides_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['hidden'] = sys")
    assert started(path=[STARTUP, tmp_path]) == "False False True"
    assert started(path=[tmp_path, STARTUP]) == "False False True"


def test_python_without_persisting_starts_as_usual() -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    assert started(*PLANNER, path=[STARTUP], python=base).startswith("False")


FORKS = """
import os, sys
from persisting.spark.preloading import preload_for_planning, preload_for_tasks

topic, count = sys.argv[1], int(sys.argv[2])
preload_for_planning("pyspark.sql.worker.plan_data_source_read")
preload_for_tasks()
statuses = []
for _ in range(count):
    child = os.fork()
    if child == 0:
        from persisting.spark.source import PersistingSource

        source = PersistingSource({"path": topic})
        reader = source.reader(source.schema())
        found = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
        os._exit(0 if found == 40 else 1)
    statuses.append(os.waitpid(child, 0)[1])
print(statuses)
"""


@pytest.mark.parametrize("count", [5, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1800)
def test_processes_forked_after_loading_read_topics(tmp_path: Path, count: int) -> None:
    put(tmp_path, rows(40))
    command = [sys.executable, "-c", FORKS, str(tmp_path / "t"), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == str([0] * count).split()
    assert done.stderr == ""
