"""What a member needs of its group's keeper, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol

from persisting.errors import StorageError
from persisting.work.group_values import RecordLease
from persisting.work.keeper import Keeper

CALLS = frozenset(
    {
        "ack",
        "claim",
        "configure",
        "extend",
        "fail",
        "leave",
        "look",
        "redrive",
        "reject",
        "release",
        "release_all",
        "stats",
        "stop_waiting",
        "undriven",
    }
)

ENDED_WITH_CALLER = frozenset({"claim"})
"""Calls that end when the connection of their caller does: nobody would get the records."""


ACK_STEP = 1024
"""Acknowledgements in one call, fewer than the leases whose end the keeper remembers: a repeated
call finds its own."""


class GroupClient(Protocol):
    """The way to the keeper of one group. A call is repeated if the keeper is lost."""

    @property
    def key(self) -> Hashable:
        """What ways to the same keeper have in common."""

    async def call(self, op: str, args: dict[str, Any]) -> Any:
        """Return the result of a call of the keeper: one of :data:`CALLS`."""

    async def close(self) -> None:
        """Give the way up; a keeper in this process that nobody else uses ends."""


async def answer(keeper: Keeper, op: str, args: dict[str, Any]) -> Any:
    """Call a keeper as a request asks.

    A member sends the identity of its group, which may have been deleted and created again.
    """
    given = dict(args)
    if given.pop("identity", keeper.identity) != keeper.identity:
        raise StorageError(
            f"work group {keeper.group!r} of {keeper.place} was deleted and created again "
            "since this reader was opened; open a new reader"
        )
    return await getattr(keeper, op)(**given)


def leases_of(reply: Any) -> list[RecordLease]:
    """Return leases that may have come over a wire."""
    return [RecordLease(*lease) for lease in reply]


class BatchedAcks:
    """Sends the acknowledgements of many tasks in few calls: one is under way at a time."""

    def __init__(self, send: Callable[[list[tuple[int, int, int]]], Awaitable[Any]]) -> None:
        self._send = send
        self._waiting: list[tuple[tuple[int, int, int], asyncio.Future[bool]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def ack(self, lease: tuple[int, int, int]) -> bool:
        """Return whether the record is acknowledged; False if its lease is lost."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await future

    async def finish(self) -> None:
        """Wait until no acknowledgement is under way."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:ACK_STEP], self._waiting[ACK_STEP:]
                try:
                    lost = {tuple(lease) for lease in await self._send([item[0] for item in batch])}
                except BaseException as exc:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(exc)
                    if not isinstance(exc, Exception):
                        raise
                    continue
                for lease, future in batch:
                    if not future.done():
                        future.set_result(lease not in lost)
        finally:
            self._sending = None
