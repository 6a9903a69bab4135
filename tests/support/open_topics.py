"""Topics that are open in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persisting.topic import live_topics


@contextmanager
def no_open_topics() -> Iterator[None]:
    """Fail if the block leaves a topic open, and forget the topic."""
    before = set(live_topics.live)
    yield
    left = sorted(set(live_topics.live) - before, key=str)
    for key in left:
        del live_topics.live[key]
    assert not left, f"topics are left open: {left}"
