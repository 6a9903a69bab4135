"""One leased record, in the hands of a member."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from persisting.errors import LeaseLost
from persisting.work.group_values import lost_lease
from persisting.work.leased_records import LeasedRecord

if TYPE_CHECKING:
    from persisting.work.reader import WorkReader


class Delivery:
    """A record that is leased to this member until it is acknowledged, released or rejected.

    After the end of the lease another member may get the record. Until that happens, this member
    can still acknowledge it.
    """

    __slots__ = ("_expires", "_lease", "_reader", "history", "record")

    def __init__(self, reader: WorkReader, leased: LeasedRecord) -> None:
        self._reader, self._lease, self._expires = reader, leased.lease, leased.expires
        self.record = leased.record
        self.history = leased.history
        """A line for every time that the record went to the dead letters; empty before the
        first."""

    @property
    def bucket(self) -> int:
        return self._lease.bucket

    @property
    def offset(self) -> int:
        return self._lease.offset

    @property
    def attempt(self) -> int:
        """How many times the record was delivered to this group, this time included; 1 at first."""
        return self._lease.attempt

    @property
    def first_delivery(self) -> dt.datetime:
        return _utc(self._lease.first)

    @property
    def last_delivery(self) -> dt.datetime:
        """When this delivery began."""
        return _utc(self._lease.last)

    @property
    def lease_end(self) -> dt.datetime:
        return _utc(self._lease.until)

    @property
    def key(self) -> tuple[int, int, int]:
        """Bucket, offset and the token of the lease, which no other delivery has."""
        return self._lease[:3]

    @property
    def group_key(self) -> Hashable:
        """What deliveries of the same group of the same topic have in common."""
        return self._reader.group_key

    @property
    def seconds_left(self) -> float:
        """Seconds until the lease ends, by this process's clock; negative afterwards."""
        return self._expires - time.monotonic()

    async def ack(self) -> None:
        """Finish the record: it is never delivered to this group again.

        Raises :class:`LeaseLost` if the record was delivered again, or is finished.
        """
        await self._reader.acknowledge(self)

    async def release(self, delay: float = 0.0) -> None:
        """Have the record delivered again, ``delay`` seconds from now."""
        await self._reader.give_back([self], delay)

    async def reject(self, reason: str = "") -> None:
        """Move the record to the dead letters; return when it can be read there."""
        await self._reader.reject_delivery(self, reason)

    async def extend(self, lease: float | None = None) -> None:
        """Let the lease end ``lease`` seconds from now; by default as long as at first."""
        lost = await self._reader.renew([self], lease)
        if lost:
            raise self.lost()

    def renewed(self, until: int, expires: float) -> None:
        """Note the new end of the lease."""
        self._lease, self._expires = self._lease._replace(until=until), expires

    def lost(self) -> LeaseLost:
        return lost_lease(self.bucket, self.offset)

    def __repr__(self) -> str:
        return (
            f"<Delivery bucket={self.bucket} offset={self.offset} attempt={self.attempt} "
            f"record={self.record!r}>"
        )


def _utc(time: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(time / 1e6, dt.timezone.utc)
