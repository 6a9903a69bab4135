"""Recovery of a long log needs bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 1024 * 1024

FILL = """
import asyncio, os, sys
from persisting.queue import PersistingBackend

async def main(folder, target):
    backend = PersistingBackend(
        0, folder, enable_wal=True, wal_sync_interval=60.0, flush_interval=None,
        flush_threshold=10**9, max_wal_size=10**10, max_buffer_bytes=10**10,
    )
    number = 0
    while (await backend.stats())["wal_size"] < target:
        rows = [{"id": number + i, "text": f"{number + i:012d}" * 80} for i in range(500)]
        await backend.put_batch(rows)
        number += len(rows)
    print(number, flush=True)
    os._exit(9)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""

OPEN = """
import asyncio, json, sys
import lance, pyarrow
from persisting.queue import PersistingBackend

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

async def main(folder, options):
    small = PersistingBackend(0, folder + "-small", enable_wal=True)
    await small.put({"id": 0, "text": "x"})
    await small.close()
    before = peak()
    backend = PersistingBackend(0, folder, enable_wal=True, flush_interval=None, **options)
    after = peak()
    count = backend.total_count()
    first, middle, last = [
        (await backend.get(offset, 1))[0] for offset in (0, count // 2, count - 1)
    ]
    ends = [first["id"], last["id"]]
    await backend.close()
    print(json.dumps({"grew": after - before, "count": count, "ends": ends, "middle": middle}))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def child(code: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode in (0, 9), done.stderr
    return done.stdout


def recover(base: Path, size: int, **options: Any) -> tuple[int, int]:
    """Fill a log to ``size`` bytes, kill its owner and open it. Return the growth in memory and the
    number of records."""
    folder = base / "bucket"
    count = int(child(FILL, folder, size))
    result = json.loads(child(OPEN, folder, json.dumps(options)))
    assert result["count"] == count
    assert result["ends"] == [0, count - 1]
    assert result["middle"]["id"] == count // 2
    assert result["middle"]["text"] == f"{count // 2:012d}" * 80
    return result["grew"], count


def test_recovery_of_a_long_log_needs_memory_for_log_and_buffer_only(
    on_disk: Path,
) -> None:
    size = 24 * MIB
    grew, _ = recover(on_disk, size, max_buffer_bytes=4 * MIB)
    print(f"{grew / MIB:.0f} MiB")
    assert grew < 5 * size


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_recovery_of_a_full_log_needs_bounded_memory(on_disk: Path) -> None:
    size = 100 * MIB
    grew, _ = recover(on_disk, size)
    print(f"{grew / MIB:.0f} MiB")
    assert grew < 5 * size
