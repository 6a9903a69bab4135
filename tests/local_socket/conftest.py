"""Topics that another process owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.open_topics import no_open_topics
from support.owner_process import OwnerProcess
from support.topic_homes import Home
from support.topic_places import Place

from persisting.queue import QueueWriter


@pytest.fixture(autouse=True)
async def no_topic_is_left_open() -> AsyncIterator[None]:
    """Fail a test that leaves a topic open."""
    with no_open_topics():
        yield


@pytest.fixture
def owner() -> Iterator[OwnerProcess]:
    """A process of the test's own."""
    process = OwnerProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def shared_owner() -> Iterator[OwnerProcess]:
    """A process for all tests of a module."""
    process = OwnerProcess()
    yield process
    process.close()


class SocketPlace(Place):
    """A place whose buckets belong to another process, so that every call goes through its
    socket."""

    def __init__(self, kind: str, folder: Path, owner: OwnerProcess) -> None:
        super().__init__(kind, folder)
        self._owner = owner
        self._owned: set[str] = set()

    async def write(self, **given: Any) -> QueueWriter:
        writer = await super().write(**given)
        topic = given.get("topic", self.topic)
        if topic not in self._owned:
            self._owned.add(topic)
            await self._owner.own(Path(given.get("storage_path", self.folder)), topic)
        return writer

    async def close(self) -> None:
        await super().close()
        for topic in self._owned:
            await self._owner.ask("close", topic)


class SocketHome(SocketPlace, Home):
    """Tables that belong to another process."""


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
