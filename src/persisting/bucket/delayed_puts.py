"""Which delayed puts a bucket has stored, so that one that is repeated is stored once.

Every delayed put has a name of its own, since its number is a time. The name consists of the
writer's session, the put's place in the session, and the first put of the session that the writer
has no answer to. Puts before that one are never repeated, so the bucket forgets them.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

DELAYED = "~delay-"
"""Prefix of the names of delayed puts: they are anonymous producers."""

NamedPut: TypeAlias = tuple[str, int]
"""The name of a delayed put, and the time before which its rows are not delivered."""

MOST_REMEMBERED = 4096
"""Delayed puts that a bucket remembers; beyond it, those of the session that put longest ago are
forgotten. A session that continues holds no more of them than it had in flight."""


class DelayedPutNames:
    """The names of the delayed puts of one writer."""

    def __init__(self) -> None:
        self._session = uuid.uuid4().hex[:16]
        self._lock = threading.Lock()
        self._last = 0
        self._unanswered: dict[int, None] = {}

    @contextmanager
    def put(self, due: int) -> Iterator[NamedPut]:
        """Name a put whose rows are not delivered before ``due``. It is not repeated after the
        block."""
        with self._lock:
            self._last += 1
            place = self._last
            self._unanswered[place] = None
            first = next(iter(self._unanswered))
        try:
            yield f"{DELAYED}{self._session}.{place}.{first}", due
        finally:
            with self._lock:
                del self._unanswered[place]


class DelayedPuts:
    """The delayed puts that may be repeated. Guarded by the bucket."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        """The one that put last is the last."""
        self._count = 0

    def has(self, name: str) -> bool:
        """Whether this put is stored."""
        session, place, _ = _parts(name)
        known = self._sessions.get(session)
        return known is not None and known.has(place)

    def all(self) -> list[NamedPut]:
        """Return the puts, those of the session that put last at the end."""
        return [put for session in self._sessions.values() for put in session.puts.values()]

    def add(self, put: NamedPut) -> None:
        """Note a put as stored, and forget those that are no longer repeated."""
        name, place, first = _parts(put[0])
        session = self._sessions.pop(name, None) or _Session()
        before = len(session.puts)
        session.add(place, first, put)
        self._count += len(session.puts) - before
        if session.puts:
            self._sessions[name] = session
        while self._count > MOST_REMEMBERED:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        name, session = next(iter(self._sessions.items()))
        del session.puts[next(iter(session.puts))]
        self._count -= 1
        if not session.puts:
            del self._sessions[name]


class _Session:
    def __init__(self) -> None:
        self.puts: dict[int, NamedPut] = {}
        self._first = 0

    def has(self, place: int) -> bool:
        return place < self._first or place in self.puts

    def add(self, place: int, first: int, put: NamedPut) -> None:
        if place >= self._first:
            self.puts.setdefault(place, put)
        if first > self._first:
            self.puts = {at: known for at, known in self.puts.items() if at >= first}
            self._first = first


def _parts(name: str) -> tuple[str, int, int]:
    """Return the session, the place and the first unanswered put of a name; a name of another form
    is a session of one put."""
    session, _, numbers = name.removeprefix(DELAYED).partition(".")
    place, _, first = numbers.partition(".")
    try:
        return session, int(place), int(first)
    except ValueError:
        return name, 0, 0
