"""Records read back equal: buffered, flushed and reopened."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, WAL_ZSTD, Bucket, Kind
from support.comparing import assert_same, canonical, equal_but_for_absent
from support.record_strategies import tables

EXAMPLES = 30
NIGHTLY_EXAMPLES = 1500


async def _store(kind: Kind, rows: list[dict[str, Any]], check: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bucket = Bucket(kind, Path(folder))
        backend = bucket.open()
        try:
            half = len(rows) // 2
            await backend.put_batch(rows[:half])
            for row in rows[half:]:
                await backend.put(row)
            check(rows, await backend.get(), "buffered")
            await backend.flush()
            check(rows, await backend.get(), "flushed")
            await backend.put_batch(rows)
            check(rows * 2, await backend.get(), "flushed and buffered")
            check((rows * 2)[1:], await backend.get(1), "a window")
            backend = await bucket.reopen(backend)
            check(rows * 2, await backend.get(), "reopened")
            arrow = await backend.get_arrow()
            assert arrow.num_rows == len(rows) * 2
            await backend.put_arrow(arrow)
            check(rows * 4, await backend.get(), "put as Arrow")
        finally:
            await bucket.close()


def _exactly(rows: list[dict[str, Any]], got: list[dict[str, Any]], when: str) -> None:
    assert_same(rows, got, when)


def _but_for_absent(rows: list[dict[str, Any]], got: list[dict[str, Any]], when: str) -> None:
    assert len(rows) == len(got), when
    for expected, found in zip(canonical(rows), got, strict=True):
        assert equal_but_for_absent(expected, found), f"{when}\n{expected!r}\n{found!r}"
    orders = {tuple(found) for found in got}
    assert len(orders) <= 1, f"{when}: fields come in different orders {orders}"


def strict(examples: int) -> Any:
    @settings(max_examples=examples, derandomize=examples <= EXAMPLES)
    @given(rows=tables(lacking=False))
    def check(kind: Kind, rows: list[dict[str, Any]]) -> None:
        asyncio.run(_store(kind, rows, _exactly))

    return check


def evolving(examples: int) -> Any:
    @settings(max_examples=examples, derandomize=examples <= EXAMPLES)
    @given(rows=tables(lacking=True))
    def check(kind: Kind, rows: list[dict[str, Any]]) -> None:
        asyncio.run(_store(kind, rows, _but_for_absent))

    return check


complete_kinds = pytest.mark.parametrize("kind", [LANCE, WAL_ZSTD], ids=str)
lacking_kinds = pytest.mark.parametrize("kind", [PERSISTING, WAL_SYNCED], ids=str)

test_complete_records_read_back_equal = complete_kinds(strict(EXAMPLES))
test_records_that_lack_fields_read_back_equal = lacking_kinds(evolving(EXAMPLES))

test_nightly_complete_records_read_back_equal = pytest.mark.nightly(
    pytest.mark.timeout(3600)(complete_kinds(strict(NIGHTLY_EXAMPLES)))
)
test_nightly_records_that_lack_fields_read_back_equal = pytest.mark.nightly(
    pytest.mark.timeout(3600)(lacking_kinds(evolving(NIGHTLY_EXAMPLES)))
)
