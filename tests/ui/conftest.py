"""Topics to look at, a console that shows them, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.console import (
    FLAGS,
    HOSTILE,
    HOSTILE_GROUP,
    HOSTILE_TOPIC,
    RunningConsole,
    awaited,
    chromium,
    running_console,
)

from persisting.demo.trajectories import trajectories
from persisting.queue import read_queue, write_queue

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f"
    b"\x15\xc4\x89\x00\x00\x00\rIDATx\x9cc\xf8\xcf\xc0\xf0\x1f\x00\x05\x00\x01\xff\xa0\xd2\x99"
    b"\x1d\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with topics of trajectories, of hostile records, and of old buckets."""
    place = tmp_path_factory.mktemp("console") / "queues"
    awaited(_fill(str(place)))
    return place


async def _fill(place: str) -> None:
    writer = await write_queue(topic="runs", storage_path=place, durable=True, num_buckets=2)
    async with writer:
        for agent in ("agent-a", "agent-b"):
            await writer.put(trajectories(agent, 0, 60))
        await writer.flush()
        await writer.tag("v1")
        await writer.put([{**record, "extra": 1} for record in trajectories("agent-c", 0, 20)])
    reader = await read_queue(topic="runs", storage_path=place, group="trainers")
    async with reader:
        await reader.get(limit=50)
        await reader.commit()
    records: list[dict[str, Any]] = [
        {
            "id": HOSTILE,
            HOSTILE: HOSTILE,
            "text": f"needle {HOSTILE} \"'&{{{{7*7}}}} {{% raw %}}",
            "url": "javascript:window.hacked=1",
            "long": "x" * 5_000,
            "picture": PNG,
            "blob": b"\x00\x01<svg onload=window.hacked=1>",
            "v": [0.5, -0.25, 1.0, 2.0],
            "nested": [{"tool": HOSTILE, "deep": {"deeper": [HOSTILE]}}],
        }
    ]
    writer = await write_queue(topic=HOSTILE_TOPIC, storage_path=place, durable=True, num_buckets=1)
    async with writer:
        await writer.put(records)
        await writer.tag("tagged")
    reader = await read_queue(topic=HOSTILE_TOPIC, storage_path=place, group=HOSTILE_GROUP)
    async with reader:
        await reader.get(limit=1)
        await reader.commit()
    writer = await write_queue(topic="chat", storage_path=place, durable=True, num_buckets=4)
    async with writer:  # the records of one put arrive at the same time
        turns = [{"id": f"{n:02d}", "turn": n, "a,b": n % 3} for n in reversed(range(12))]
        await writer.put([{**turn, "session": "s", "role": HOSTILE} for turn in turns])
    member = await read_queue("chat", storage_path=place, group="solvers", mode="work")
    async with member:
        for delivery in await member.fetch(3):
            await delivery.reject(f"no way {HOSTILE}")
    writer = await write_queue(topic="empty", storage_path=place, durable=True, num_buckets=1)
    await writer.close()


@pytest.fixture(scope="class")
def storage(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template that a test, or the tests of a class, may change."""
    return Path(shutil.copytree(template, tmp_path_factory.mktemp("changing") / "queues"))


@pytest.fixture(scope="session")
def console(template: Path) -> Iterator[RunningConsole]:
    """A console that only reads; its topics stay as they are."""
    with running_console(template) as running:
        yield running


@pytest.fixture(scope="session")
def unchanged(template: Path) -> Iterator[RunningConsole]:
    """A console that may change topics, for tests whose requests change nothing."""
    with running_console(template, "--allow-changes") as running:
        yield running


@pytest.fixture(scope="class")
def changing(storage: Path) -> Iterator[RunningConsole]:
    """A console that may change a copy of the topics."""
    options = ("--allow-changes", "--backups", str(storage.parent / "backups"))
    with running_console(storage, *options) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium. While it runs, this thread has a running event loop, so that other modules
    cannot run theirs."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a page; any error of its scripts fails the test."""
    contexts, errors = [], []

    def opened(width: int = 1200, locale: str = "en-GB", scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, locale=locale, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(90_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append("a dialog opened"), dialog.dismiss()))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors
