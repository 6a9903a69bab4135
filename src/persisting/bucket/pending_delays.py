"""The delayed puts of an open bucket whose time has not come."""

from __future__ import annotations

import time

from persisting.bucket.buffer import Buffer
from persisting.bucket.delays import DELAYS, MOST_DELAYS, Delay
from persisting.bucket.schema_state import SchemaState
from persisting.errors import InvalidArgument


class PendingDelays:
    """Reads and bounds the delays in the buffer of a bucket."""

    def __init__(self, place: object, buffer: Buffer, schema: SchemaState) -> None:
        """``schema`` has the lock that guards the buffer."""
        self._place, self._buffer, self._lock = place, buffer, schema.lock

    def check_room(self) -> None:
        """Raise if the bucket cannot take another delayed put."""
        with self._lock:
            if len(self._buffer.delays) < MOST_DELAYS:
                return
            count = len(self._buffer.delays.pending(_now()))
        if count >= MOST_DELAYS:
            raise InvalidArgument(
                f"{self._place} has {count} delayed puts whose time has not come, and takes no "
                "more. Put several records at once, or put the time into a field and read with "
                "visible_at='field'"
            )

    def all(self) -> list[Delay]:
        """Return the delays that have not passed."""
        with self._lock:
            return self._buffer.delays.pending(_now())

    def table_property(self) -> dict[str, str]:
        """Return the property of a table commit for the delays before the table's end."""
        with self._lock:
            encoded = self._buffer.delays.encode(self._buffer.view.end, _now())
        return {DELAYS: encoded} if encoded else {}


def _now() -> int:
    return time.time_ns() // 1000
