"""Every test of this folder runs with every backend; add new backends to ``support.buckets``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.buckets import ALL, LANCE, MEMORY, PERSISTING, TABLES, WAL_ZSTD, Bucket


@pytest.fixture(params=ALL, ids=str)
async def bucket(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bucket]:
    """A bucket of each backend."""
    bucket = Bucket(request.param, folder)
    yield bucket
    await bucket.close()


@pytest.fixture(params=TABLES, ids=str)
async def stored(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bucket]:
    """A bucket of each backend that keeps records on disk."""
    bucket = Bucket(request.param, folder)
    yield bucket
    await bucket.close()


@pytest.fixture(params=[MEMORY, LANCE, PERSISTING, WAL_ZSTD], ids=str)
async def keeper(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bucket]:
    """A bucket for tests of values, which do not depend on when the log is synced."""
    bucket = Bucket(request.param, folder)
    yield bucket
    await bucket.close()
