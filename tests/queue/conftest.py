"""Places for topics of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("queue_contract", "places")

from places import Place  # noqa: E402

from persisting.topic import local  # noqa: E402


@pytest.fixture(autouse=True)
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Whatever a test does, its topics close: no handle and no lock is left behind."""
    before = set(local._live)
    yield
    left = sorted(set(local._live) - before)
    for key in left:
        del local._live[key]
    assert not left, f"topics are left open: {left}"


@pytest.fixture(params=["memory", "lance", "persisting", "custom"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(request.param, tmp_path / "queues")
    yield made
    await made.close()


@pytest.fixture(params=["memory", "lance", "persisting"])
async def typed_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """With a backend that keeps every type of value."""
    made = Place(request.param, tmp_path / "queues")
    yield made
    await made.close()


@pytest.fixture(params=["lance", "persisting"])
async def table_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(request.param, tmp_path / "queues")
    yield made
    await made.close()


@pytest.fixture
async def logged_place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place("persisting", tmp_path / "queues")
    yield made
    await made.close()
