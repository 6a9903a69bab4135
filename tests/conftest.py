"""Fixtures for every folder of tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.buckets import LANCE, PERSISTING, Bucket  # noqa: E402
from support.faults import FaultyFileSystem  # noqa: E402

from persisting import fs  # noqa: E402
from persisting.topic import registry  # noqa: E402

# A busy machine takes longer now and then, which says nothing of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run by several processes (``make test``), a file's tests stay together, and all that need
    Spark do, so that it starts once; they come first, since they take longest."""
    for item in items:
        spark = "spark" in getattr(item, "fixturenames", ()) or "spark" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("spark" if spark else item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args != ("spark",))


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """What a test registers is known to that test only."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bucket folder as a topic lays it out; it does not exist yet."""
    return tmp_path / "topic" / "bucket_0"


@pytest.fixture
async def lance(folder: Path) -> AsyncIterator[Bucket]:
    """A bucket for LanceBackend."""
    bucket = Bucket(LANCE, folder)
    yield bucket
    await bucket.close()


@pytest.fixture
async def persisting(folder: Path) -> AsyncIterator[Bucket]:
    """A bucket for PersistingBackend."""
    bucket = Bucket(PERSISTING, folder)
    yield bucket
    await bucket.close()


@pytest.fixture
def faults() -> Iterator[FaultyFileSystem]:
    """Buckets opened in this test are on a file system that fails on demand."""
    with fs.use(FaultyFileSystem()) as replaced:
        assert isinstance(replaced, FaultyFileSystem)
        yield replaced
        replaced.heal()


@pytest.fixture
async def spawned() -> AsyncIterator[Any]:
    """Start tasks that are cancelled, if need be, when the test ends."""
    tasks: list[asyncio.Task[Any]] = []

    def spawn(coroutine: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(coroutine))
        return tasks[-1]

    yield spawn
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
