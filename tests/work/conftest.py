"""Fixtures of the tests of work groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.work_places import WorkPlace


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[WorkPlace]:
    """A topic whose groups are kept in this process."""
    place = WorkPlace(tmp_path)
    yield place
    await place.close()
