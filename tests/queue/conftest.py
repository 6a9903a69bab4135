"""Places for topics of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.open_topics import no_open_topics
from support.topic_homes import Home, home_in
from support.topic_places import Place


@pytest.fixture(autouse=True)
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Fail a test that leaves a topic open."""
    with no_open_topics():
        yield


@pytest.fixture(params=["memory", "lance", "persisting", "custom"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(request.param, tmp_path / "queues")
    yield made
    await made.close()


@pytest.fixture(params=["memory", "lance", "persisting"])
async def typed_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place whose backend stores every type of value."""
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


@pytest.fixture
async def make_home(tmp_path: Path) -> AsyncIterator[Any]:
    """Make homes of this process in the test's folder; they are closed at the end."""
    made: list[Home] = []

    def make(kind: str) -> Home:
        made.append(Home(kind, tmp_path))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture(
    params=[
        "here-persisting",
        pytest.param("one-persisting", marks=pytest.mark.nightly),
        pytest.param("here-lance", marks=pytest.mark.nightly),
        pytest.param("one-lance", marks=pytest.mark.nightly),
    ]
)
async def home(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Home]:
    async for made in home_in(*request.param.split("-"), tmp_path / "queues"):
        yield made
