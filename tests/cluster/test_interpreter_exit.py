"""A program that used Pulsing keeps its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.children import run

INSTALLED = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
from persisting.cluster import interpreter_exit
print(interpreter_exit._installed)
"""

PROGRAM = """
import asyncio, sys
import pulsing as pul
import persisting
from persisting.queue import register_backend, write_queue

async def native(system):
    queue = await system.queue.write("t", backend="persisting", storage_path=sys.argv[2])
    await queue.put({"id": "1"})
    await queue.flush()

async def refused(system):
    await write_queue(system, topic="../x", backend="lance", storage_path=sys.argv[2])

async def misregistered(system):
    register_backend("mine", dict)

async def main():
    system = await pul.actor_system("127.0.0.1:0")
    try:
        await globals()[sys.argv[1]](system)
    finally:
        await system.shutdown()

asyncio.run(main())
"""


@pytest.mark.parametrize("order", ["pulsing,persisting", "persisting,pulsing"])
def test_exit_handler_is_installed_once_pulsing_and_persisting_are_imported(order: str) -> None:
    assert run(INSTALLED, order) == "True\n"


def test_exit_handler_is_not_installed_without_pulsing() -> None:
    assert run(INSTALLED, "persisting") == "False\n"


@pytest.mark.parametrize(
    ("use", "code"), [("native", 0), ("refused", 1), ("misregistered", 1)], ids=str
)
def test_a_program_that_used_pulsing_keeps_its_exit_code(
    tmp_path: Path, use: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, use, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or "InvalidArgument" in done.stderr.splitlines()[-1]
