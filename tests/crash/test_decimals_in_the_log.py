"""Decimals (16 bytes) are unaligned in a recovered log and must be aligned for Lance."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from support.children import run

from persisting.queue import LanceBackend, PersistingBackend

KILLED = """
import asyncio, os, sys
from decimal import Decimal
from persisting.queue import PersistingBackend

async def main():
    backend = PersistingBackend(0, sys.argv[1], enable_wal=True, wal_sync_interval=0.0)
    await backend.put_batch([
        {"id": "x" * n, "exact": Decimal(n) / 8, "deep": [{"d": Decimal(n)}]}
        for n in range(int(sys.argv[2]))
    ])
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("count", [1, 3, 8, 100])
async def test_decimals_recovered_from_the_log_can_be_flushed(tmp_path: Path, count: int) -> None:
    run(KILLED, tmp_path, count)
    expected = [
        {"id": "x" * n, "exact": Decimal(n) / 8, "deep": [{"d": Decimal(n)}]} for n in range(count)
    ]
    async with PersistingBackend(0, str(tmp_path), enable_wal=True) as backend:
        assert await backend.get() == expected
        assert len(await backend.query("exact >= 0")) == count
        await backend.flush()
    async with LanceBackend(0, str(tmp_path), read_only=True) as backend:
        assert await backend.get() == expected


@pytest.mark.parametrize("shift", [0, 1, 8, 15])
async def test_unaligned_arrow_decimals_can_be_flushed(tmp_path: Path, shift: int) -> None:
    values = [Decimal(n) / 4 for n in range(10)]
    whole = pa.array(values, pa.decimal128(38, 18))
    raw = bytes(shift) + whole.buffers()[1].to_pybytes()
    moved = pa.Array.from_buffers(whole.type, 10, [None, pa.py_buffer(raw).slice(shift)])
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_arrow(pa.table({"d": moved}))
        await backend.flush()
        assert [record["d"] for record in await backend.get()] == values
