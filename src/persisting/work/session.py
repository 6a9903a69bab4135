"""What the readers of a work group on one event loop share: one member of the group.

Their claims and acknowledgements go to the keeper in common calls, and records are read ahead for
all of them. So a reader for every worker costs hardly more than a reader that all workers share.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from persisting.errors import StorageError, TableError
from persisting.work.fetches import BatchedFetches
from persisting.work.group_client import BatchedAcks, GroupClient, leases_of
from persisting.work.group_values import RecordLease, Settings
from persisting.work.leased_records import LeasedRecord, LeasedRecords

_UNREADABLE_PAUSE = 0.5
_DAMAGED_PAUSE = 5.0
_ASKING_SECONDS = 60.0


class WorkSession:
    """The way to a group for the readers of one event loop, and what they have in common."""

    def __init__(self, records: LeasedRecords, client: GroupClient, settings: Settings) -> None:
        self.settings = settings
        self.records = records
        self._client = client
        self._member = uuid.uuid4().hex
        self._fetches = BatchedFetches(self.claim_and_read, self.return_unused)
        self._acks = BatchedAcks(lambda leases: self.call("ack", leases=leases))
        self._last_claim = 0
        self._unanswered: set[int] = set()
        """The numbers of claims whose answers have not come."""
        self._asked: dict[Hashable, float] = {}
        """By reader, when it last asked for records."""
        self._users = 0

    @property
    def key(self) -> Hashable:
        """What sessions of the same group have in common. A copy of a topic, as a restored backup
        is, has the identity of the group but another folder."""
        return self._client.key, self.settings.identity

    @classmethod
    async def join(
        cls, records: LeasedRecords, client: GroupClient, settings: dict[str, Any]
    ) -> tuple[WorkSession, Settings]:
        """Return the session of this event loop, and the settings that the group has now.

        If there is a session, what the caller has brought is closed.
        """
        answer = await client.call("configure", {"settings": settings})
        agreed = msgspec.convert(answer, Settings)
        sessions = _sessions.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
        session = cls(records, client, agreed)
        present = sessions.setdefault(session.key, session)
        present._users += 1
        if present is not session:
            try:
                try:
                    await records.close()
                finally:
                    await client.close()
            except BaseException:
                await present.leave(None)
                raise
        return present, agreed

    async def leave(self, reader: Hashable) -> None:
        """Let a reader go; with the last one the session ends."""
        self._asked.pop(reader, None)
        self._users -= 1
        if self._users:
            return
        _sessions[asyncio.get_running_loop()].pop(self.key, None)
        try:
            # Calls of cancelled tasks still run, and need the client to give back their leases.
            await self._fetches.finish()
            await self._acks.finish()
            with suppress(StorageError):
                await self.call("leave", member=self._member)
        finally:
            try:
                await self._client.close()
            finally:
                await self.records.close()

    async def call(self, op: str, **args: Any) -> Any:
        """Call the keeper."""
        return await self._client.call(op, {**args, "identity": self.settings.identity})

    async def ack(self, lease: tuple[int, int, int]) -> bool:
        """Return whether the record is acknowledged; False if its lease is lost."""
        return await self._acks.ack(lease)

    # Claims

    async def fetch(self, reader: Hashable, limit: int, lease: float) -> list[LeasedRecord]:
        """Return up to ``limit`` records, without waiting for new ones."""
        self._asked[reader] = time.monotonic()
        return await self._fetches.fetch(limit, lease)

    async def claim_and_read(
        self, limit: int, lease: float, wait: float = 0.0
    ) -> list[LeasedRecord]:
        """Return what one claim gets; claim again if none of it can be read.

        Raises if no bucket with records can be read: one that cannot does not hold back the others.
        """
        unreadable: set[int] = set()
        error: StorageError | None = None
        while True:
            leases, expires = await self._claim(limit, lease, 0.0 if error else wait, unreadable)
            if not leases:
                if error is not None:
                    raise error
                return []
            try:
                records = await self._read(leases, expires)
            except TableError:
                raise
            except StorageError as exc:
                error = exc
                unreadable.update(leased.bucket for leased in leases)
                continue
            if records:
                return records

    async def _claim(
        self, count: int, lease: float, wait: float, unreadable: set[int]
    ) -> tuple[list[RecordLease], float]:
        """Claim records of buckets that are not ``unreadable``; return the leases, and when they
        end by the monotonic clock.

        If the caller is cancelled, no lease is left behind.
        """
        without = {"without": sorted(unreadable)} if unreadable else {}
        self._last_claim += 1
        number = self._last_claim
        self._unanswered.add(number)
        began = time.monotonic()
        claim = asyncio.ensure_future(
            self.call(
                "claim",
                member=self._member,
                count=count,
                lease=lease,
                wait=wait,
                number=number,
                answered=min(self._unanswered),
                readers=self._asking(began),
                **without,
            )
        )
        claim.add_done_callback(lambda _: self._unanswered.discard(number))
        try:
            leases, waited = await asyncio.shield(claim)
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon(claim, number))
            raise
        return leases_of(leases), began + waited + lease

    def _asking(self, now: float) -> int:
        """Return how many readers have asked for records lately."""
        return sum(now - asked < _ASKING_SECONDS for asked in self._asked.values()) or 1

    async def _abandon(self, claim: asyncio.Future[Any], number: int) -> None:
        """Return what a claim gets whose caller was cancelled."""
        if not claim.done():
            with suppress(StorageError):  # then the claim returns when its wait is over
                await self.call("stop_waiting", member=self._member, number=number)
        with suppress(StorageError):  # the keeper has ended: the leases end by themselves
            leases, _ = await claim
            if leases:
                await self.release_unused([lease[:3] for lease in leases_of(leases)])

    async def _read(self, leases: list[RecordLease], expires: float) -> list[LeasedRecord]:
        """Read the records of leases.

        What cannot be read now is left out and offered again: retention or a restore may have
        removed it, which the keeper notices within a second. A damaged record is offered again
        later, so that it holds back no other; the error is raised if there is nothing else.
        """
        damage: list[TableError] = []
        try:
            records = await self.records.read(leases, expires, damage)
            if len(records) < len(leases):
                read = {record.key for record in records}
                missing = [lease[:3] for lease in leases if lease[:3] not in read]
                pause = _DAMAGED_PAUSE if damage else _UNREADABLE_PAUSE
                await self.release_unused(missing, pause)
        except BaseException as exc:
            # Without a pause the next claim would get the same records.
            pause = _UNREADABLE_PAUSE if isinstance(exc, StorageError) else 0.0
            with suppress(StorageError):  # else the leases end by themselves
                keys = [lease[:3] for lease in leases]
                await asyncio.shield(self.release_unused(keys, pause))
            raise
        if damage and not records:
            raise damage[0]
        return records

    async def return_unused(self, records: Sequence[LeasedRecord]) -> None:
        """Return records that no code of the user has seen."""
        await self.release_unused([record.key for record in records])

    async def release_unused(self, keys: list[tuple[int, int, int]], delay: float = 0.0) -> None:
        """Have records delivered again; the delivery does not count."""
        await self.call("release", leases=keys, unused=True, delay=delay)


_sessions: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Hashable, WorkSession]
] = weakref.WeakKeyDictionary()
