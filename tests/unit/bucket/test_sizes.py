"""Large data is split into chunks; a record that is too large is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.buckets import LANCE, WAL_SYNCED, Bucket, Kind

from persisting.bucket import chunk
from persisting.queue import SchemaError
from persisting.records import EMPTY, RecordEncoder, Rules

WIDE = 200


def wide(rows: int) -> pa.Table:
    items = pa.array(np.zeros(rows * WIDE))
    numbers = pa.array(np.arange(rows))
    return pa.table({"n": numbers, "v": pa.FixedSizeListArray.from_arrays(items, WIDE)})


def test_arrow_data_is_cut_by_bytes_as_well_as_by_rows() -> None:
    table = wide(60_000)
    found = chunk.prepare_arrow(RecordEncoder(EMPTY, Rules(evolving=True), defined=False), table)
    sizes = [one.batch.nbytes for one in found.chunks]
    assert max(sizes) <= 64 * 1024 * 1024 < sum(sizes)
    rows = pa.Table.from_batches([one.batch for one in found.chunks])
    assert rows.column("n").to_pylist() == list(range(60_000))


@pytest.mark.parametrize("kind", [LANCE, WAL_SYNCED], ids=str)
async def test_record_too_large_for_a_log_frame_is_refused(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk, "_MAX_RECORD_BYTES", 1_000_000)
    monkeypatch.setattr(chunk, "MAX_BATCH_BYTES", 500_000)
    bucket = Bucket(kind, tmp_path / "b")
    backend = bucket.open()
    await backend.put({"text": "x"})
    for put in (
        backend.put({"text": "x" * 1_100_000}),
        backend.put_batch([{"text": "x"}, {"text": "x" * 1_100_000}]),
        backend.put_arrow(pa.table({"text": ["x", "x" * 1_100_000]})),
    ):
        with pytest.raises(SchemaError, match=r"a record takes 1,1\d\d,.* bytes"):
            await put
    await backend.put_batch([{"text": "y" * 300_000}] * 5)
    backend = await bucket.reopen(backend)
    assert [len(one["text"]) for one in await backend.get()] == [1, *[300_000] * 5]
    await bucket.close()


@pytest.mark.parametrize("kind", [LANCE, WAL_SYNCED], ids=str)
async def test_single_puts_share_a_batch_of_a_limited_size(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk, "_MAX_RECORD_BYTES", 1_000_000)
    monkeypatch.setattr(chunk, "MAX_BATCH_BYTES", 500_000)
    bucket = Bucket(kind, tmp_path / "b")
    backend = bucket.open(flush_threshold=1000)
    await backend.put({"n": 0, "text": ""})
    await asyncio.gather(*(backend.put({"n": n, "text": "x" * 200_000}) for n in range(1, 20)))
    chunks = backend.bucket.buffer.chunks
    assert max(one.nbytes for one in chunks) < 800_000
    backend = await bucket.reopen(backend)
    assert [one["n"] for one in await backend.get()] == list(range(20))
    await bucket.close()
