"""Topics that are open in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persisting.topic import local


@contextmanager
def no_open_topics() -> Iterator[None]:
    """Fail if the block leaves a topic open, and forget the topic."""
    before = set(local._live)
    yield
    left = sorted(set(local._live) - before, key=str)
    for key in left:
        del local._live[key]
    assert not left, f"topics are left open: {left}"
