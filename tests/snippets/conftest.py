"""A system for each snippet, and the modules of the queue's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A Pulsing system of this process; relative paths lead to the test's folder."""
    import pulsing as pul

    monkeypatch.chdir(tmp_path)
    made = await pul.actor_system("127.0.0.1:0")
    yield made
    from persisting.cluster.host import host_here

    host = host_here(made._inner)
    if host is not None:
        await host.close()
    await made.shutdown()
