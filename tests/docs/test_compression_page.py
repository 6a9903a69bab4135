"""What docs/guide/compression.md says about codecs and sizes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from corebench import records
from support.doc_pages import both, code, tables

from persisting.options import COMPRESSIONS
from persisting.queue import LanceBackend, PersistingBackend
from persisting.table.layout import _ENCODINGS, EFFECTIVE

OPTIONS = [None, *COMPRESSIONS]


@pytest.mark.parametrize("page", both("guide/compression.md"), ids=["en", "zh"])
def test_the_table_of_options_is_that_of_the_code(page: Path):
    rows = {eval(code(row[0])): row for row in tables(page)[0][1:]}  # noqa: S307
    assert set(rows) == set(OPTIONS)
    for option, row in rows.items():
        assert code(row[3]) == str(EFFECTIVE[option])
        chunk = _ENCODINGS[option].get(b"lance-encoding:minichunk-size")
        if chunk is not None and option != "zstd":
            assert f"{int(chunk) // 1024} KiB" in row[2]


async def sizes(path: Path, option: str | None, made: list) -> tuple[int, int]:
    """Bytes in the log and in the table."""
    options = {"flush_threshold": 1 << 40, "flush_interval": None}
    backend = PersistingBackend(0, str(path), enable_wal=True, compression=option, **options)
    async with backend:
        for start in range(0, len(made), 1000):
            await backend.put_batch(made[start : start + 1000])
        log = (await backend.stats())["wal_size"]
    return log, sum(file.stat().st_size for file in (path / "data.lance" / "data").iterdir())


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_zstd_is_smaller_than_lz4_and_both_act(tmp_path, kind):
    made = list(islice(records.docstrings() if kind == "text" else records.events(2000), 2000))
    found = {
        option: await sizes(tmp_path / str(option), option, made)
        for option in (None, "lz4", "zstd")
    }
    for log_or_table in (0, 1):
        none, lz4, zstd = (found[option][log_or_table] for option in (None, "lz4", "zstd"))
        assert zstd < lz4
        assert zstd < none
    assert found["lz4"][0] < found[None][0]
    if kind == "text":
        assert found["lz4"][1] < found[None][1]


async def test_snappy_packs_the_log(tmp_path):
    made = list(records.events(2000))
    plain, _ = await sizes(tmp_path / "plain", None, made)
    packed, _ = await sizes(tmp_path / "packed", "snappy", made)
    assert packed < plain / 2


async def test_another_option_applies_to_new_data_and_the_old_stays_readable(tmp_path):
    text = {"text": "once upon a time " * 50}
    for option in (None, "zstd", "lz4", "snappy", None):
        async with LanceBackend(0, str(tmp_path), compression=option) as backend:
            await backend.put_batch([text] * 500)
            assert await backend.get() == [text] * backend.total_count()
            assert (await backend.stats())["compression_effective"] == EFFECTIVE[option]
    assert backend.total_count() == 2500
