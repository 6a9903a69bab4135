"""Ctrl-C: a program with an open, unflushed backend keeps its records and ends by SIGINT."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.buckets import LANCE, PERSISTING, WAL_ZSTD, Bucket, Kind
from support.children import interrupt, python, wait_for_line

PROGRAM = """
import asyncio, json, sys, time
from persisting import queue

async def main():
    global backend
    backend = getattr(queue, sys.argv[1])(0, sys.argv[2], **json.loads(sys.argv[3]))
    await backend.put({"i": 0})
    await backend.put_batch([{"i": i} for i in range(1, 10)])
    if sys.argv[4] == "awaiting":
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("place", ["awaiting", "sleeping"])
@pytest.mark.parametrize("kind", [LANCE, PERSISTING, WAL_ZSTD], ids=str)
async def test_interrupted_program_keeps_acknowledged_records_and_ends_by_sigint(
    kind: Kind, place: str, folder: Path
) -> None:
    options = json.dumps(kind.options)
    with python(PROGRAM, kind.cls.__name__, folder, options, place) as child:
        assert wait_for_line(child) == "ready"
        _, errors = interrupt(child)
    assert "KeyboardInterrupt" in errors
    assert child.returncode == -signal.SIGINT
    bucket = Bucket(kind, folder)
    assert [record["i"] for record in await bucket.open().get()] == list(range(10))
    await bucket.close()


def test_program_that_handles_the_interrupt_ends_with_its_own_status(folder: Path) -> None:
    program = PROGRAM.replace(
        "asyncio.run(main())",
        "try:\n    asyncio.run(main())\nexcept KeyboardInterrupt:\n    sys.exit(130)",
    )
    with python(program, "LanceBackend", folder, "{}", "awaiting") as child:
        assert wait_for_line(child) == "ready"
        interrupt(child)
    assert child.returncode == 130
