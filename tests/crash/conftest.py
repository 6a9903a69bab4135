"""Fixtures for the crash tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.filesystems import QuickFileSystem

from persisting import fs

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, if the machine has /dev/shm: these tests open thousands of buckets.

    Syncs of the real disk do not matter here; the recorded disk models them.
    """
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix="persisting-", dir=MEMORY if usable else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the real disk, for large files."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """Skip syncs, in tests that end without a power loss."""
    with fs.use(QuickFileSystem()):
        yield


@pytest.fixture(autouse=True)
def _quiet(no_warnings: None) -> None:
    """These tests cause warnings about torn tails and failed flushes."""
