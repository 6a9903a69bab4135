"""The wheel, installed without extras into an empty environment, has all that it needs.

Everything here runs outside the repository, in an environment that sees nothing of this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest
from support.doc_pages import ROOT

import persisting

# Building and installing take about 20 seconds on a quiet machine with a filled pip cache.
pytestmark = pytest.mark.timeout(600)

Run = Callable[..., subprocess.CompletedProcess[str]]

PUT_AND_GET = """
import asyncio
from persisting.queue import read_queue, write_queue

async def main():
    options = {"enable_wal": True, "wal_sync_interval": 0.0}
    writer = await write_queue(
        topic="t", storage_path="queues", backend="persisting", backend_options=options
    )
    async with writer:
        await writer.put([{"id": n, "text": f"record {n}"} for n in range(10)])
    async with await read_queue(topic="t", storage_path="queues") as reader:
        print(sorted(record["id"] for record in await reader.get(limit=None)))

asyncio.run(main())
"""


def pip(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("persisting-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has the wheel and its dependencies only."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    # The pip of this environment installs into the new one: that saves installing pip there.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    pip("--python", python, "install", "--no-compile", "-c", constraints, str(wheel))
    return folder


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run a program of the environment in an empty folder."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}

    def run_program(
        name: str, *args: str, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(environment / "bin" / name), *args],
            cwd=tmp_path,
            env=variables,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_program


def output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_contains_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files
    needed = {"persisting/py.typed", "persisting/spark/log4j2.properties", "pyspark_persisting.py"}
    assert needed <= packed


def test_wheel_metadata_has_the_version_of_the_code(wheel: Path) -> None:
    assert wheel.name == f"persisting-{persisting.__version__}-py3-none-any.whl"


def test_installed_package_is_imported_from_the_environment(run: Run, environment: Path) -> None:
    place = output(run("python", "-c", "import persisting; print(persisting.__file__)")).strip()
    assert Path(place).is_relative_to(environment)


def test_installed_package_stores_and_reads_records(run: Run) -> None:
    assert output(run("python", "-c", PUT_AND_GET)) == f"{list(range(10))}\n"


def test_installed_command_prints_its_version(run: Run) -> None:
    assert output(run("persisting", "--version")) == f"persisting {persisting.__version__}\n"


def test_installed_command_puts_and_gets_records(run: Run) -> None:
    lines = '{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n'
    output(run("persisting", "put", "events", stdin=lines))
    got = output(run("persisting", "get", "events", "--json"))
    records = [json.loads(line)["record"] for line in got.splitlines()]
    assert sorted(records, key=itemgetter("id")) == list(map(json.loads, lines.splitlines()))


def test_spark_finds_the_data_source_module_of_the_installed_package(run: Run) -> None:
    """Spark lists the modules whose names start with ``pyspark_``."""
    code = "import importlib.util as u; print(u.find_spec('pyspark_persisting').origin)"
    assert output(run("python", "-c", code)).strip().endswith("pyspark_persisting.py")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("import persisting.spark as s; s.session()", "pip install 'persisting[spark]'"),
        ("from persisting.cluster import serve", "pip install 'persisting[pulsing]'"),
    ],
    ids=["spark", "cluster"],
)
def test_missing_extra_is_named_by_the_error(run: Run, code: str, advice: str) -> None:
    done = run("python", "-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("persisting.errors.StorageError")
    assert advice in last


@pytest.mark.parametrize("module", ["persisting.spark", "persisting.cluster", "persisting.queue"])
def test_module_is_importable_without_extras(run: Run, module: str) -> None:
    output(run("python", "-c", f"import {module}"))
