"""Flushes that fail again and again: each attempt costs requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from persisting.bucket import flusher
from persisting.bucket.flusher import Flusher
from persisting.errors import TableError
from persisting.metrics import NO_METRICS


def fail() -> NoReturn:
    raise TableError("the store does not answer")


def test_flushes_that_fail_are_repeated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(flusher.timer, "after", lambda _, call: waiting.append(call))
    flushes = Flusher(
        Path("bucket"),
        NO_METRICS,
        None,
        commit=fail,
        buffered=lambda: 1,
        after_flush=lambda: None,
        turns=lambda: None,
    )
    for _ in range(3):  # as puts that wait for room do
        with pytest.raises(TableError):
            flushes.flush()
    assert len(waiting) == 1
    repeated: list[None] = []
    monkeypatch.setattr(flushes._task, "request", lambda: repeated.append(None))
    waiting.pop()()
    assert len(repeated) == 1
    with pytest.raises(TableError):
        flushes.flush()
    assert len(waiting) == 1
