"""When records may be delivered to work groups, if not immediately: stored beside the records.

A delayed put is a numbered put: its producer's name says that it is one
(:mod:`persisting.bucket.delayed_puts`), and the number is the time before which the rows are not
delivered. So the log holds the delay with the rows, and every way to
a bucket carries it. The table holds the delays that have not passed as a property of its commits.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from persisting.bucket.delayed_puts import DELAYED
from persisting.bucket.producer_sequences import ProducerSequence
from persisting.errors import InvalidArgument, TableError

DELAYS = "persisting.delays"
"""Property of a table commit: the delays that had not passed."""

NO_DELAYS = {DELAYS: ""}
"""For a commit that replaces all rows: it would keep the delays of the version before."""

MOST_DELAYS = 65_536
"""Delayed puts of a bucket whose time has not come."""

Delay: TypeAlias = tuple[int, int, int]
"""The first offset, the number of rows, and the time in microseconds of Unix time."""


def is_delay(producer: ProducerSequence | None) -> bool:
    return producer is not None and producer[0].startswith(DELAYED)


def due_of(producers: Iterable[ProducerSequence]) -> int | None:
    """Return the time of a delayed put, None if these numbers belong to other puts."""
    return max((producer[1] for producer in producers if is_delay(producer)), default=None)


def refuse_without_log(producer: ProducerSequence | None) -> None:
    """Raise for a delayed put to a bucket that has no log."""
    if is_delay(producer):
        raise InvalidArgument(
            "put(delay=…) needs a topic with a log: backend 'persisting' with enable_wal=True. Or "
            "put the time into a field, and read with visible_at='field'"
        )


class Delays:
    """The delays of one bucket that have not passed. Guarded by the bucket."""

    def __init__(self, encoded: str | None = None) -> None:
        self._delays: list[Delay] = []
        if encoded:
            try:
                packed = zlib.decompress(base64.b64decode(encoded, validate=True))
                self._delays = msgspec.msgpack.decode(packed, type=list[Delay])
            except (binascii.Error, zlib.error, msgspec.DecodeError) as exc:
                raise TableError(f"the delays in the table cannot be read: {exc}") from exc

    def __len__(self) -> int:
        return len(self._delays)

    def add(self, first: int, rows: int, due: int) -> None:
        self._delays.append((first, rows, due))

    def add_all(self, delays: Sequence[Delay]) -> None:
        """Add delays, some of which may be known."""
        known = set(self._delays)
        self._delays += [delay for delay in delays if delay not in known]

    def pending(self, now: int) -> list[Delay]:
        """Return the delays that have not passed, and forget the others."""
        self._delays = [delay for delay in self._delays if delay[2] > now]
        return list(self._delays)

    def encode(self, end: int, now: int) -> str:
        """Return the value of :data:`DELAYS` for a table that ends at ``end``; empty without
        delays."""
        delays = [delay for delay in self.pending(now) if delay[0] < end]
        if not delays:
            return ""
        return base64.b64encode(zlib.compress(msgspec.msgpack.encode(delays))).decode()
