"""A server that refuses, delays and loses requests, or is killed: what was acknowledged is stored
once, the errors name the cause, and it continues afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, fresh_prefix
from support.store_puts import Topic

pytestmark = pytest.mark.timeout(600)

ANSWERS = (409, 412, 429, 500, 503)
FAULTS: dict[str, dict[str, Any]] = {
    **{str(status): {"answer": status} for status in ANSWERS},
    "lost answer": {"lose": True},
    "lost request": {"drop": True},
    "timeout": {"hold": 2.5},
}
REQUESTS = {
    "the log": ("PUT-if-absent", "/slots/"),
    "the lease": ("PUT-if-match", "/lease.json"),
    "the table": ("PUT-if-absent", "/_versions/"),
    "a group": ("PUT-if-match", "/groups/"),
}


async def met(proxy: FaultProxy, topic: Topic, what: str, fault: str) -> None:
    """Use the topic until requests of this kind have met this fault."""
    match, also = REQUESTS[what]
    added = proxy.add(match, also=also, times=2, **FAULTS[fault])
    while not added.met:
        await topic.put(2)
        if what == "the table":
            await topic.flush()
        elif what == "a group":
            await topic.consume()
        else:
            await asyncio.sleep(0.05)  # until the next heartbeat
    await topic.put(2)


@pytest.mark.parametrize("what", REQUESTS)
async def test_acknowledged_records_are_stored_once_whatever_the_server_answers(
    proxy: FaultProxy, prefix: str, what: str
) -> None:
    topic = Topic(proxy.port, prefix)
    await topic.put(2)
    for status in ANSWERS:
        await met(proxy, topic, what, str(status))
    await met(proxy, topic, what, "lost answer")
    proxy.heal()
    await topic.flush()
    await topic.put(2)
    await topic.check()
    assert len(topic.acknowledged) >= 14


@pytest.mark.nightly
@pytest.mark.parametrize("what", REQUESTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_repeated_fault_loses_nothing(
    proxy: FaultProxy, prefix: str, what: str, fault: str
) -> None:
    topic = Topic(proxy.port, prefix)
    await topic.put(2)
    for _ in range(3):
        await met(proxy, topic, what, fault)
    proxy.heal()
    await topic.flush()
    await topic.put(2)
    await topic.check()


async def test_error_names_what_the_server_answered(proxy: FaultProxy, prefix: str) -> None:
    topic = Topic(proxy.port, prefix)
    await topic.put(1)
    proxy.add("PUT-if-absent", also="/slots/", answer=403, times=1)
    await topic.put(1)
    (failure,) = topic.failures
    assert "/slots/" in str(failure)
    assert "injected by the test" in str(failure)
    assert "nothing of this put was stored" in str(failure)
    await topic.flush()
    await topic.put(1)
    await topic.check()


# The server itself


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SeaweedFS]:
    running = SeaweedFS(tmp_path / "seaweedfs")
    running.start()
    yield running
    running.kill()


async def put_while_it_is_killed(server: SeaweedFS, kills: int) -> Topic:
    """Put records while the server is killed and started again."""
    topic = Topic(server.port, fresh_prefix())
    await topic.put(5)
    ended = threading.Event()

    def kill_and_start() -> None:
        for _ in range(kills):
            server.kill()
            server.start()
        ended.set()

    killing = asyncio.create_task(asyncio.to_thread(kill_and_start))
    while not ended.is_set():
        await topic.put(1)
    await killing
    while len(topic.acknowledged) < 10:  # the server answers with 500 for a while after its start
        await topic.put(1)
    return topic


async def test_killed_server_loses_nothing(own_server: SeaweedFS) -> None:
    topic = await put_while_it_is_killed(own_server, 1)
    await topic.flush()
    await topic.check()


@pytest.mark.nightly
async def test_server_that_is_killed_again_and_again_loses_nothing(own_server: SeaweedFS) -> None:
    topic = await put_while_it_is_killed(own_server, 5)
    await topic.flush()
    await topic.check()
