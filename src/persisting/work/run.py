"""Handlers for a work group: a record is acknowledged when its handler returns, else retried."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from persisting.errors import LeaseLost, StorageError
from persisting.work.delivery import Delivery

if TYPE_CHECKING:
    from persisting.work.reader import WorkReader

log = logging.getLogger("persisting")

_LEASE_PARTS = 3
"""A lease is renewed when a third of it has passed."""

_FAILED_PAUSE = 0.5


class HandlerRun:
    """One call of :meth:`WorkReader.run`: handles deliveries until it is stopped."""

    def __init__(
        self,
        reader: WorkReader,
        handler: Callable[[dict[str, Any]], Any],
        concurrency: int,
        *,
        backoff: float,
        max_backoff: float,
    ) -> None:
        self._reader, self._handler, self._concurrency = reader, handler, concurrency
        self._backoff, self._max_backoff = backoff, max_backoff
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )
        self._tasks: dict[asyncio.Task[None], Delivery] = {}
        self._handling: set[Delivery] = set()
        """Deliveries whose handlers have not returned."""
        self._cancelled: set[Delivery] = set()
        """Those of them whose handlers were cancelled, whatever they raise then."""
        self._ended = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._acknowledged = 0

    async def until_done(self, *, wait: bool) -> int:
        """Handle deliveries; see :meth:`WorkReader.run`."""
        renewal = asyncio.create_task(self._renew())
        try:
            while self._stopping is None:
                free = self._concurrency - len(self._tasks)
                if free <= 0:
                    await self._one_ended()
                    continue
                deliveries = await self._fetch(free, wait)
                for delivery in deliveries:
                    task = asyncio.create_task(self._handle(delivery))
                    self._tasks[task] = delivery
                    self._handling.add(delivery)
                    task.add_done_callback(self._end)
                if not deliveries and not wait:
                    if not self._tasks:
                        break
                    await self._one_ended()
            await self._stopped()
            return self._acknowledged
        finally:
            try:
                await self._stopped()
            finally:
                renewal.cancel()

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one of the handlers."""
        return task in self._tasks

    def stop(self, caller: asyncio.Task[Any] | None = None) -> asyncio.Task[None]:
        """Begin no further handler and cancel those that run; return the task that does it.

        Their records are delivered again immediately. A handler that is the caller runs to its end,
        and the outcomes of those that have returned are still stored.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(caller))
            self._ended.set()
        return self._stopping

    async def _stopped(self) -> None:
        await asyncio.shield(self.stop())

    async def _fetch(self, count: int, wait: bool) -> list[Delivery]:
        """Fetch deliveries; a keeper that fails for a while is asked again."""
        try:
            return await self._reader.fetch(count, wait=wait, timeout=1.0 if wait else None)
        except StorageError as exc:
            if self._reader.closing:
                return []
            log.warning("work group %r: %s", self._reader.group, exc)
            await asyncio.sleep(_FAILED_PAUSE)
            return []

    async def _one_ended(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._ended.set()
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "work group %r: the outcome of a record could not be stored: %s",
                self._reader.group,
                task.exception(),
            )

    async def _handle(self, delivery: Delivery) -> None:
        try:
            if self._is_async:
                await self._handler(delivery.record)
            else:
                await asyncio.to_thread(self._handler, delivery.record)
        except (Exception, asyncio.CancelledError) as exc:
            if delivery not in self._cancelled:
                self._handling.discard(delivery)
                await self._failed(delivery, exc)
            return
        self._handling.discard(delivery)
        try:
            await delivery.ack()
        except LeaseLost as exc:
            log.warning("work group %r: %s", self._reader.group, exc)
        else:
            self._acknowledged += 1

    async def _failed(self, delivery: Delivery, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        try:
            await self._reader.fail_delivery(delivery, reason, self._pause(delivery))
        except LeaseLost as exc:
            log.warning("work group %r: %s", self._reader.group, exc)

    def _pause(self, delivery: Delivery) -> float:
        """Return the pause before the next attempt: at random from half of it to the whole."""
        longest = min(self._max_backoff, self._backoff * 2.0 ** min(delivery.attempt - 1, 60))
        return longest * random.uniform(0.5, 1.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._reader.lease / _LEASE_PARTS)
            active = list(self._tasks.values())
            if not active:
                continue
            try:
                for delivery in await self._reader.renew(active):
                    if delivery in self._handling:  # else its outcome may have just been stored
                        log.warning("work group %r: %s", self._reader.group, delivery.lost())
            except StorageError as exc:
                log.warning("work group %r cannot renew leases: %s", self._reader.group, exc)

    async def _stop(self, caller: asyncio.Task[Any] | None) -> None:
        running = dict(self._tasks)
        for task, delivery in running.items():
            if delivery in self._handling and task is not caller:
                self._cancelled.add(delivery)
                task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)
        left = [delivery for delivery in running.values() if delivery in self._handling]
        if left and self._is_async:  # a thread continues, and keeps its record until the lease ends
            try:
                await self._reader.give_back(left)
            except StorageError as exc:
                log.warning("work group %r: %s", self._reader.group, exc)
