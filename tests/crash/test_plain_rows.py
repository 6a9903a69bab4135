"""Plain rows, which are put one by one, survive a kill with their exact values and types."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.children import python, wait_for_line
from support.comparing import same
from support.log_builder import segments_in

from persisting.fs import FileSystem
from persisting.queue import PersistingBackend
from persisting.wal import Recovery
from persisting.wal.frame import BATCH, RECORDS

ROWS: list[dict[str, Any]] = [
    {"text": text, "number": number, "share": share, "flag": flag, "blob": blob}
    for text, number, share, flag, blob in [
        ("", 0, 0.0, False, b""),
        ("plain", 1, -0.0, True, b"\x00\xff"),
        ("zeros \x00 inside", -1, math.inf, True, b"\x00" * 300),
        ("ü € 𝄞 \U0010ffff", 2**53, -math.inf, False, bytes(range(256))),
        ("é combining e\u0301", -(2**53), math.nan, True, b"\xc0\xc1"),
        ("\r\n\t\u2028", 2**31, 5e-324, False, b"PSTf"),
        ("x" * 5000, -(2**31), 1.7976931348623157e308, True, b"y" * 5000),
        ("PSTf", 2**63 - 1, 0.1, False, b"z"),
        ("last", -(2**63), 1 / 3, True, b"\x91\x92"),
        (None, 7, 1.5, True, b"n"),
        ("none", None, None, None, None),
        (None, None, None, None, None),
    ]
]

WRITER = """
import asyncio, sys
import msgspec
from persisting.queue import PersistingBackend

async def main():
    rows = msgspec.msgpack.decode(open(sys.argv[2], "rb").read())
    options = msgspec.json.decode(sys.argv[3])
    backend = PersistingBackend(0, sys.argv[1], enable_wal=True, flush_interval=None, **options)
    for row in rows:
        await backend.put(row)
        await asyncio.gather(*(backend.put(row) for _ in range(3)))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "options",
    [{"wal_sync_interval": 0.0}, {"compression": "zstd"}, {"compression": "lz4"}],
    ids=["synced", "zstd", "lz4"],
)
async def test_plain_values_of_every_type_survive_a_kill(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, rows = tmp_path / "bucket", tmp_path / "rows"
    rows.write_bytes(msgspec.msgpack.encode(ROWS))
    with python(WRITER, folder, rows, msgspec.json.encode(options).decode()) as child:
        assert wait_for_line(child) == "ready"
        child.kill()
        child.wait()
    kinds = {frame.kind for frame in Recovery(folder / "wal", FileSystem(), 0).frames()}
    assert {RECORDS, BATCH} <= kinds, "the first row of a shape is a batch, later ones are plain"
    expected = [row for row in ROWS for _ in range(4)]
    for _ in range(2):
        backend = PersistingBackend(0, str(folder), enable_wal=True, flush_interval=None, **options)
        found = await backend.get()
        assert len(found) == len(expected)
        for put, got in zip(expected, found, strict=True):
            assert same(put, got), (put, got)
        await backend.close()
    assert segments_in(folder / "wal") == []


async def test_plain_rows_have_the_same_values_before_and_after_recovery(tmp_path: Path) -> None:
    """The buffer converts them once; recovery converts what the log holds."""
    folder, rows = tmp_path / "bucket", tmp_path / "rows"
    backend = PersistingBackend(0, str(tmp_path / "other"), enable_wal=True, flush_interval=None)
    for row in ROWS:
        for _ in range(4):
            await backend.put(row)
    buffered = await backend.get()
    await backend.close()
    rows.write_bytes(msgspec.msgpack.encode(ROWS))
    with python(WRITER, folder, rows, "{}") as child:
        assert wait_for_line(child) == "ready"
        child.kill()
        child.wait()
    backend = PersistingBackend(0, str(folder), flush_interval=None)
    assert same(buffered, await backend.get())
    await backend.close()
