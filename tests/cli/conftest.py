"""Topics to run commands on, and the command called within this process."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CRASHING, Answer, filled

from persisting.queue import read_queue


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with a topic ``events`` of 20 records, a group and a tag."""
    place = tmp_path_factory.mktemp("template") / "queues"
    filled(place, "events", [_event(n) for n in range(12)])
    filled(place, "events", [_event(n) for n in range(12, 20)])

    async def use() -> None:
        reader = await read_queue(topic="events", storage_path=str(place), group="trainers")
        async with reader:
            await reader.get(limit=5)
            await reader.commit()
        reader = await read_queue(topic="events", storage_path=str(place))
        async with reader:
            await reader.tag("first")

    asyncio.run(use())
    return place


def _event(n: int) -> dict[str, Any]:
    words = ("red", "green", "blue")
    vector = [n / 20, 1 - n / 20]
    return {"id": f"k{n}", "n": n, "score": n / 8, "text": f"{words[n % 3]} grüße", "v": vector}


@pytest.fixture
def storage(template: Path, tmp_path: Path) -> Path:
    """Return a copy of the template that the test may change."""
    return Path(shutil.copytree(template, tmp_path / "queues"))


@pytest.fixture(scope="session")
def crashed_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with a topic ``t`` whose owner died with 5 records only in its log."""
    place = tmp_path_factory.mktemp("crashed") / "queues"
    died = subprocess.run([sys.executable, "-c", CRASHING, str(place)], check=False)
    assert died.returncode == 9
    return place


@pytest.fixture
def crashed(crashed_template: Path, tmp_path: Path) -> Path:
    """Return a copy of the crashed storage folder that the test may change."""
    ignored = shutil.ignore_patterns(".sockets")  # Python does not copy sockets
    return Path(shutil.copytree(crashed_template, tmp_path / "crashed", ignore=ignored))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Answer]]:
    """Run the command within this process and return its exit code and output."""
    from persisting.cli.app import run

    log = logging.getLogger("persisting")
    before = log.handlers, log.propagate, log.level

    def called(*args: object) -> Answer:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        return Answer(code, *capsys.readouterr())

    yield called
    log.handlers, log.propagate = before[0], before[1]
    log.setLevel(before[2])
