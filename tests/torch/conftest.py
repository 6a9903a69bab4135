"""Tests with real torch and torchdata, which ``make test-torch`` installs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.training_topics import make_topic

ROWS = 1000
collect_ignore_glob = [] if find_spec("torch") and find_spec("torchdata") else ["test_*.py"]
_SECONDS = 1200
"""Importing torch in several worker processes is slow on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic of 1000 rows in three buckets, with the tag v1."""
    return make_topic(tmp_path_factory.mktemp("training"), ROWS)
