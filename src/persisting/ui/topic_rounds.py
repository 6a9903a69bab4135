"""Samples every topic by reading its files. Blocking.

A topic whose files have not changed since the last round is not opened again. The results are
messages, because rounds run in a process of their own, :mod:`persisting.ui.sample_worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from persisting.errors import StorageError
from persisting.topic.group_admin import Span
from persisting.topic.inspect import Description, describe, spans_of
from persisting.topic.topic_files import TopicFolder
from persisting.ui.storage_view import Signature, TopicsView

_REREAD_SECONDS = 60.0
"""How often the live members of groups and the sizes of old files are read."""
_MAX_PAUSE_SECONDS = 0.1
_INSPECTED_LOG_BYTES = 1 << 20
"""The state of larger logs is not shown: inspecting a log reads it."""


class RoundStart(msgspec.Struct, tag=True):
    """A round has begun; these topics exist."""

    names: list[str]


class TopicUpdate(msgspec.Struct, tag=True):
    """The files of a topic that is new or has changed."""

    topic: str
    description: Description | None
    """None if the topic cannot be opened."""
    problem: str | None
    spans: dict[int, Span]
    """By bucket, the offsets of its acknowledged records, as far as they are in files."""
    has_flushed: bool
    """Whether tables have other versions than in the last sample."""
    time: float
    """When its files were read."""


class RoundEnd(msgspec.Struct, tag=True):
    """Topics about which the round has said nothing are as they were."""

    problem: str | None = None
    """Why the topics could not be listed."""


Message: TypeAlias = RoundStart | TopicUpdate | RoundEnd


@dataclass
class _Known:
    """What the last sample of a topic has seen."""

    signature: Signature
    read_at: float


class TopicRounds:
    """Rounds through the topics of a storage folder."""

    def __init__(self, view: TopicsView) -> None:
        self._view = view
        self._known: dict[str, _Known] = {}
        self._is_first = True

    def sample_all(self, wait: Callable[[float], object] = time.sleep) -> Iterator[Message]:
        """Sample every topic once. After the first round, half of the time is spent waiting."""
        try:
            names = self._view.names()
        except StorageError as exc:
            yield RoundEnd(str(exc))
            return
        yield RoundStart(names)
        for name in names:
            started = time.monotonic()
            update = self._update_of(name)
            if update is not None:
                yield update
            if not self._is_first:
                wait(min(time.monotonic() - started, _MAX_PAUSE_SECONDS))
        for name in set(self._known) - set(names):
            del self._known[name]
        self._is_first = False
        yield RoundEnd()

    def _update_of(self, name: str) -> TopicUpdate | None:
        """Return what is new about a topic."""
        last, now = self._known.get(name), time.time()
        try:
            signature = self._view.signature(name)
            if last is not None and last.signature == signature:
                if now - last.read_at < _REREAD_SECONDS:
                    return None
            has_flushed = last is None or last.signature.versions != signature.versions
            self._known[name] = _Known(signature, now)
            return read_topic(self._view, name, has_flushed=has_flushed)
        except Exception as exc:  # one topic that cannot be read does not hide the others
            self._known.pop(name, None)
            problem = str(exc) if isinstance(exc, StorageError) else f"{type(exc).__name__}: {exc}"
            return TopicUpdate(name, None, problem, {}, False, now)


def read_topic(view: TopicsView, name: str, *, has_flushed: bool = False) -> TopicUpdate:
    """Read the files of a topic."""
    now = time.time()
    description: Description | None = None
    spans: dict[int, Span] = {}
    problem: str | None = None
    try:
        description, spans = view.read_now(name, _described)
        problem = next((b.problem for b in description.buckets if b.problem), None)
    except StorageError as exc:
        problem = str(exc)
    return TopicUpdate(name, description, problem, spans, has_flushed, now)


def _described(source: TopicFolder) -> tuple[Description, dict[int, Span]]:
    description = describe(source, most_log_bytes=_INSPECTED_LOG_BYTES)
    readable = [b for b in description.buckets if b.problem is None]
    spans = {b.bucket: Span(b.start_offset, b.end_offset, []) for b in readable}
    logged = [b.bucket for b in readable if b.log_bytes]
    return description, spans | (spans_of(source, logged) if logged else {})
