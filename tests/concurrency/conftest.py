"""Both table backends, one of them with two settings of its log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.buckets import LANCE, WAL_SYNCED, WAL_ZSTD, Bucket


@pytest.fixture(params=[LANCE, WAL_SYNCED, WAL_ZSTD], ids=str)
async def bucket(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bucket]:
    bucket = Bucket(request.param, folder)
    yield bucket
    await bucket.close()
