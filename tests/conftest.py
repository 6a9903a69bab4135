"""Fixtures and settings for all tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.buckets import LANCE, PERSISTING, Bucket  # noqa: E402
from support.faults import FaultyFileSystem  # noqa: E402
from support.scheduling import FileScheduling, order  # noqa: E402
from support.tasks import spawning  # noqa: E402

from persisting import fs  # noqa: E402
from persisting.topic import live_topics, registry  # noqa: E402

# A busy machine is sometimes slow, which is not a fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell without job control lets its background jobs ignore Ctrl-C, and so would the processes
# that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: order(item.path.relative_to(TESTS)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Restore the format of caplog's handlers.

    After an error of a Spark query, Spark's loggers make every handler write JSON that is added to
    them, and pytest adds its handlers to each logger that does not propagate.
    """
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    if plugin is not None:
        plugin.caplog_handler.setFormatter(plugin.formatter)
        plugin.report_handler.setFormatter(plugin.formatter)


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Forget the backends that a test registers."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture(autouse=True)
def own_topics() -> Iterator[None]:
    """Forget the topics that a test leaves open, such as those of an owner that crashed: other
    tests find open topics by their names."""
    before = set(live_topics.live)
    yield
    with live_topics.guard:
        for address in set(live_topics.live) - before:
            del live_topics.live[address]


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
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Hide the warnings that a test causes."""
    caplog.set_level(logging.CRITICAL, "persisting")


@pytest.fixture
async def spawned() -> AsyncIterator[Any]:
    """A function that starts tasks, which are cancelled when the test ends."""
    async with spawning() as spawn:
        yield spawn
