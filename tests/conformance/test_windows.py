"""Offsets and limits, on rows that are buffered, flushed or both."""

from __future__ import annotations

from typing import Any

import pytest
from support.buckets import Bucket

from persisting.queue import InvalidArgument, StorageError

COUNT = 12
ROWS = [{"i": i} for i in range(COUNT)]
WINDOWS = [
    (0, None),
    (0, 0),
    (0, 1),
    (0, COUNT),
    (0, COUNT + 1),
    (3, 4),
    (5, 2),
    (6, 1),
    (COUNT - 1, 1),
    (COUNT - 1, None),
    (COUNT, None),
    (COUNT, 5),
    (COUNT + 100, None),
    (2**63, 2**63),
    (0, 2**70),
]


@pytest.fixture(params=[0, 6, COUNT], ids=["buffered", "both", "flushed"])
async def backend(request: pytest.FixtureRequest, bucket: Bucket) -> Any:
    backend = bucket.open()
    await backend.put_batch(ROWS[: request.param])
    await backend.flush()
    await backend.put_batch(ROWS[request.param :])
    return backend


async def test_a_window_is_the_slice_of_all_records(backend: Any) -> None:
    for offset, limit in WINDOWS:
        stop = None if limit is None else offset + limit
        assert await backend.get(offset, limit) == ROWS[offset:stop], (offset, limit)
        streamed = [r async for r in backend.get_stream(offset, limit)]
        assert streamed == ROWS[offset:stop], (offset, limit)
        table = await backend.get_arrow(offset, limit)
        assert table.to_pylist() == ROWS[offset:stop], (offset, limit)


async def test_offset_and_limit_can_be_passed_by_keyword(backend: Any) -> None:
    assert await backend.get(limit=2, offset=3) == ROWS[3:5]
    assert [r async for r in backend.get_stream(limit=2, offset=3)] == ROWS[3:5]


@pytest.mark.parametrize("bad", [-1, 1.0, "1", True, None])
async def test_invalid_offset_raises(bucket: Bucket, bad: Any) -> None:
    backend = bucket.open()
    await backend.put({"a": 1})
    for call in (backend.get, backend.get_arrow):
        with pytest.raises(InvalidArgument, match="offset"):
            await call(bad)
    with pytest.raises(InvalidArgument, match="offset"):
        async for _ in backend.get_stream(bad):
            pass


@pytest.mark.parametrize("bad", [-1, 1.5, "1", False])
async def test_invalid_limit_raises(bucket: Bucket, bad: Any) -> None:
    backend = bucket.open()
    for call in (backend.get, backend.get_arrow):
        with pytest.raises(InvalidArgument, match="limit") as caught:
            await call(0, bad)
        assert isinstance(caught.value, StorageError)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(InvalidArgument, match="limit"):
        async for _ in backend.get_stream(0, bad):
            pass


async def test_random_windows_over_many_flushes_return_the_right_records(stored: Bucket) -> None:
    backend = stored.open()
    rows = [{"i": i, "s": "x" * (i % 7)} for i in range(300)]
    for start in range(0, 300, 30):
        await backend.put_batch(rows[start : start + 30])
        await backend.flush()
    for offset in range(0, 300, 13):
        for limit in (1, 29, 30, 31, 100):
            assert await backend.get(offset, limit) == rows[offset : offset + limit]
