"""A Pulsing system for each snippet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A Pulsing system in this process; relative paths are in the test's folder."""
    import pulsing as pul

    monkeypatch.chdir(tmp_path)
    system = await pul.actor_system("127.0.0.1:0")
    yield system
    from persisting.cluster.host import host_here

    host = host_here(system._inner)
    if host is not None:
        await host.close()
    await system.shutdown()
