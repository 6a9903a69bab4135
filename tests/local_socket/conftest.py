"""Topics that another process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.open_topics import no_open_topics
from support.owner_process import OwnerProcess
from support.socket_places import SocketHome, SocketPlace
from support.topic_homes import Home
from support.topic_places import Place


@pytest.fixture(autouse=True)
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Fail a test that leaves a topic open."""
    with no_open_topics():
        yield


@pytest.fixture
def owner() -> Iterator[OwnerProcess]:
    """The test's own process."""
    with OwnerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def shared_owner() -> Iterator[OwnerProcess]:
    """A process for all tests of a module."""
    with OwnerProcess() as process:
        yield process


@pytest.fixture(params=["persisting", pytest.param("lance", marks=pytest.mark.nightly)])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, shared_owner: OwnerProcess
) -> AsyncIterator[Place]:
    made = SocketPlace(request.param, tmp_path / "queues", shared_owner)
    yield made
    await made.close()


typed_place = table_place = place


@pytest.fixture
async def logged_place(tmp_path: Path, shared_owner: OwnerProcess) -> AsyncIterator[Place]:
    made = SocketPlace("persisting", tmp_path / "queues", shared_owner)
    yield made
    await made.close()


@pytest.fixture(params=["persisting", pytest.param("lance", marks=pytest.mark.nightly)])
async def home(
    request: pytest.FixtureRequest, tmp_path: Path, shared_owner: OwnerProcess
) -> AsyncIterator[Home]:
    made = SocketHome(request.param, tmp_path / "queues", shared_owner)
    yield made
    await made.close()


@pytest.fixture
async def evolving_home(tmp_path: Path, shared_owner: OwnerProcess) -> AsyncIterator[Home]:
    made = SocketHome("persisting", tmp_path / "queues", shared_owner)
    yield made
    await made.close()
