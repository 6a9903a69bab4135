"""Writes that fail at any file size lose nothing that was acknowledged.

The file size limit is set in the operating system, so it applies to Lance too. Lance does not
always report that its last write to a file failed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.children import run

PROGRAM = """
import asyncio, resource, signal, sys
from persisting.errors import StorageError
from persisting.queue import LanceBackend, PersistingBackend

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, what = sys.argv[1], sys.argv[2]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
refused = 0


def record(n):
    return {"id": n, "text": f"text {n * 7919}", "vector": [n / 3, 1.0, 2.0, 3.0]}


async def change(backend, number):
    if what == "flush":
        await backend.put_batch([record(n) for n in range(60, 120)])
        await backend.flush()
    elif what == "evolve":
        await backend.put_batch([{**record(n), "more": "x" * n} for n in range(60, 120)])
        await backend.put({**record(120), "id": 0.5})
        await backend.flush()
    elif what == "compact":
        await backend.compact()
    else:
        await backend.create_index("text")
        await backend.create_index("id")


async def run_once(number, limit):
    global refused
    place = f"{folder}/{number}"
    options = {"compaction": False, "flush_interval": None}
    backend = PersistingBackend(0, place, **options)
    for first in (0, 20, 40):
        await backend.put_batch([record(n) for n in range(first, first + 20)])
        await backend.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        await change(backend, number)
    except StorageError:
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    before = await backend.get()
    await backend.flush()
    await backend.close()
    backend = PersistingBackend(0, place, **options)
    assert await backend.get() == before, limit
    assert [r["id"] for r in before][:60] == list(range(60)), limit
    assert (await backend.verify())["ok"], limit
    found = await backend.search(text="7919", column="text", k=3)
    assert [r["id"] for r in found] == [1], (limit, found)
    await backend.close()


async def main():
    limits = range(100, int(sys.argv[3]), int(sys.argv[4]))
    for number, limit in enumerate(limits):
        await run_once(number, limit)
    print(refused, len(limits))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("what", "below", "step"),
    [("flush", 6000, 170), ("evolve", 16000, 1590), ("compact", 9000, 890), ("index", 9000, 890)],
)
def test_incompletely_written_file_is_never_committed(
    tmp_path: Path, what: str, below: int, step: int
) -> None:
    refused, tried = map(int, run(PROGRAM, tmp_path, what, below, step).split())
    assert 0 < refused < tried


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["flush", "evolve", "compact", "index"])
def test_incompletely_written_file_of_any_size_is_never_committed(
    tmp_path: Path, what: str
) -> None:
    run(PROGRAM, tmp_path, what, 9000, 37)
