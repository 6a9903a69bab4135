"""Fixtures and settings for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.buckets import LANCE, PERSISTING, Bucket  # noqa: E402
from support.faults import FaultyFileSystem  # noqa: E402
from support.tasks import spawning  # noqa: E402

from persisting import fs  # noqa: E402
from persisting.topic import registry  # noqa: E402

# A busy machine is sometimes slow, which is not a fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for several processes (``make test``): the tests of a file stay in one process,
    and so do all tests that need Spark, which then starts once. Spark tests run first, since they
    take longest."""
    for item in items:
        spark = "spark" in getattr(item, "fixturenames", ()) or "spark" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("spark" if spark else item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args != ("spark",))


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Forget the backends that a test registers."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a bucket inside a topic; it does not exist yet."""
    return tmp_path / "topic" / "bucket_0"


@pytest.fixture
async def lance(folder: Path) -> AsyncIterator[Bucket]:
    """A bucket that LanceBackend opens."""
    bucket = Bucket(LANCE, folder)
    yield bucket
    await bucket.close()


@pytest.fixture
async def persisting(folder: Path) -> AsyncIterator[Bucket]:
    """A bucket that PersistingBackend opens."""
    bucket = Bucket(PERSISTING, folder)
    yield bucket
    await bucket.close()


@pytest.fixture
def faults() -> Iterator[FaultyFileSystem]:
    """A file system that fails on demand; buckets opened in the test use it."""
    with fs.use(FaultyFileSystem()) as replaced:
        assert isinstance(replaced, FaultyFileSystem)
        yield replaced
        replaced.heal()


@pytest.fixture
async def spawned() -> AsyncIterator[Any]:
    """A function that starts tasks, which are cancelled when the test ends."""
    async with spawning() as spawn:
        yield spawn
