"""Topics that many tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training_topics import make_topic

ROWS = 1000


@pytest.fixture(scope="session")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic of 1000 rows in three buckets, with the tag v1."""
    return make_topic(tmp_path_factory.mktemp("training"), ROWS)
