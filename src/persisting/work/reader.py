"""Reading a topic as a member of a work group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from persisting.concurrency.closing import AsyncClosing
from persisting.errors import BucketClosed, InvalidArgument, LeaseLost, NoSuchTopic
from persisting.options import check_timeout
from persisting.topic.bucket_client import Topic
from persisting.topic.synchronous import SyncQueue
from persisting.topic.work_metrics import WorkMetrics
from persisting.work.client import ACK_STEP, GroupClient
from persisting.work.dead_letters import FIELD, letter_place
from persisting.work.delivery import Delivery
from persisting.work.group_place import is_in_memory, place_of
from persisting.work.group_values import Letter, Settings
from persisting.work.leased_records import LeasedRecord, LeasedRecords, OpenLetters
from persisting.work.letter_search import find_letters
from persisting.work.record_order import order_of
from persisting.work.run import HandlerRun
from persisting.work.session import GroupSession

WAIT_SECONDS = 4.0
"""The longest wait of one claim; a reader repeats it."""

_MOST_LEASE = 30 * 24 * 3600.0
_MOST_DELAY = 366 * 24 * 3600.0
_MOST_REASON = 4096
_REDRIVE_STEP = 2000


@dataclass(frozen=True)
class WorkOptions:
    """How a member takes part in a work group."""

    group: str
    lease: float = 30.0
    max_deliveries: int | None = None
    ordered_by: str | None = None
    priority: str | None = None
    visible_at: str | None = None
    breaker: bool | None = None
    enable_metrics: bool = False

    def check(self) -> None:
        """Raise if an option has a wrong type or value."""
        _seconds("lease", self.lease, 0.01, _MOST_LEASE)
        most = self.max_deliveries
        if most is not None and (type(most) is not int or not 1 <= most <= 1_000_000):
            raise InvalidArgument(f"max_deliveries must be a whole number from 1, got {most!r}")
        if self.breaker not in (None, True, False):
            raise InvalidArgument(f"breaker must be True or False, got {self.breaker!r}")
        for name in ("ordered_by", "priority", "visible_at"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidArgument(f"{name} must be the name of a field, got {value!r}")

    def check_topic(self, topic: Topic) -> None:
        """Raise if the topic cannot have such a group."""
        if is_in_memory(topic):
            raise InvalidArgument(
                f"topic {topic.name!r} is in memory and cannot store a work group; use the backend "
                "'persisting'"
            )
        ordered = self.ordered_by
        if ordered is not None and topic.num_buckets > 1 and ordered != topic.bucket_column:
            raise InvalidArgument(
                f"ordered_by={ordered!r} cannot be kept: topic {topic.name!r} is divided into "
                f"buckets by {topic.bucket_column!r}, so records with the same {ordered!r} have no "
                "common order. Create the topic with that bucket_column, or with one bucket"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What all members of the group must agree on; None where this member does not care."""
        return {
            "max_deliveries": self.max_deliveries,
            "ordered_by": self.ordered_by,
            "priority": self.priority,
            "visible_at": self.visible_at,
            "breaker": self.breaker,
        }


class WorkReader(AsyncClosing):
    """Gets records of all buckets for a work group, each under a lease of its own.

    The readers of a group on one event loop are one member of it: they share calls of the keeper.
    """

    def __init__(self, session: GroupSession, options: WorkOptions, settings: Settings) -> None:
        self._session, self._options = session, options
        self._metrics: WorkMetrics | None = None
        self._buffered: dict[tuple[int, int, int], Delivery] = {}
        """Deliveries that were fetched and not handed out yet."""
        self._waits: set[asyncio.Task[list[LeasedRecord]]] = set()
        """Claims that wait for records."""
        self._fetching = 0
        self._fetched = asyncio.Event()
        """Set when a fetch has ended."""
        self._runs: set[HandlerRun] = set()
        """The calls of :meth:`run` that have not returned."""
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._has_left = False
        self._closed: asyncio.Task[None] | None = None
        self.max_deliveries = settings.max_deliveries

    @classmethod
    async def open(
        cls, topic: Topic, client: GroupClient, options: WorkOptions, open_letters: OpenLetters
    ) -> WorkReader:
        """Join a group; the caller has checked the options."""
        metrics = None
        if options.enable_metrics:
            place, group = place_of(topic), options.group
            metrics = WorkMetrics(topic.name, group, str(place), lambda: place.read_status(group))
        records = LeasedRecords(topic, options.group, open_letters)
        try:
            session, settings = await GroupSession.join(records, client, options.settings)
        except BaseException:
            if metrics is not None:
                metrics.remove()
            raise
        reader = cls(session, options, settings)
        reader._metrics = metrics
        return reader

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._session.records.topic.name

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._options.group

    @property
    def lease(self) -> float:
        """Seconds that a record is leased for."""
        return self._options.lease

    @property
    def group_key(self) -> Hashable:
        """What readers of the same group of the same topic have in common."""
        return self._session.key

    @property
    def closing(self) -> bool:
        """Whether the reader is closed, or about to be."""
        return self._closing.is_set()

    def _check_open(self) -> None:
        """Raise if records may no longer be fetched."""
        if self.closing:
            raise self._closed_error()

    def _check_joined(self) -> None:
        """Raise if the group can no longer be called. While the reader closes, it can: handlers
        of :meth:`run` store their outcomes."""
        if self._has_left:
            raise self._closed_error()

    def _closed_error(self) -> BucketClosed:
        return BucketClosed(f"the work reader of topic {self.topic!r} is closed")

    async def _call(self, op: str, **args: Any) -> Any:
        self._check_joined()
        return await self._session.call(op, **args)

    # Deliveries

    async def fetch(
        self, limit: int = 1, wait: bool = False, timeout: float | None = None
    ) -> list[Delivery]:
        """Return up to ``limit`` deliveries, each leased to this member.

        Everything that was put before the call can be among them. With ``wait`` it waits for the
        first one, or until ``timeout`` seconds have passed.
        """
        if type(limit) is not int or limit < 1:
            raise InvalidArgument(f"limit must be a whole number from 1, got {limit!r}")
        check_timeout(timeout)
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        self._fetching += 1
        try:
            records = await self._session.fetch(id(self), limit, self.lease)
            if not records and not wait:
                # The keeper may not have seen the latest records yet.
                await self._session.call("look")
                records = await self._session.fetch(id(self), limit, self.lease)
            while not records and wait:
                left = WAIT_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                records = await self._wait_for_records(limit, min(left, WAIT_SECONDS))
            if records and self.closing:
                await self._session.return_unused(records)
            self._check_open()
        finally:
            self._fetching -= 1
            self._fetched.set()
        return [Delivery(self, record) for record in records]

    async def _wait_for_records(self, limit: int, seconds: float) -> list[LeasedRecord]:
        self._check_open()
        waiting = asyncio.create_task(self._session.claim_and_read(limit, self.lease, seconds))
        self._waits.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.done() and waiting.exception() is None:
                # The cancellation came after the records.
                await asyncio.shield(self._session.return_unused(waiting.result()))
            if waiting not in self._waits:
                self._check_open()  # not the caller was cancelled, but the reader closed
            raise
        finally:
            self._waits.discard(waiting)

    async def deliveries(
        self, prefetch: int = 1, *, wait: bool = True, timeout: float | None = None
    ) -> AsyncIterator[Delivery]:
        """Yield deliveries one by one; ``prefetch`` of them are leased at a time.

        Nothing renews their leases: those of prefetched records run while the ones before them are
        worked on. A record whose lease has ended meanwhile is left out, and delivered again
        without counting this time. With ``wait=False``, or once nothing came for ``timeout``
        seconds, the stream ends.
        """
        if type(prefetch) is not int or prefetch < 1:
            raise InvalidArgument(f"prefetch must be a whole number from 1, got {prefetch!r}")
        fetched: list[Delivery] = []
        try:
            while not self.closing:
                fetched = await self.fetch(prefetch, wait, timeout)
                if not fetched:
                    return
                self._buffered.update((delivery.key, delivery) for delivery in fetched)
                fetched.reverse()
                while fetched:
                    delivery = fetched.pop()
                    if self._buffered.pop(delivery.key, None) is None:
                        return  # closed meanwhile
                    if delivery.seconds_left > 0:
                        yield delivery
                    else:
                        await self._return_unused([delivery])
        finally:
            if not self.closing:  # else close() returns what is buffered
                unused = [d for d in fetched if self._buffered.pop(d.key, None) is not None]
                if unused:
                    await self._return_unused(unused)

    async def _return_unused(self, deliveries: Sequence[Delivery]) -> None:
        await self._session.release_unused([delivery.key for delivery in deliveries])

    # Outcomes

    async def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Finish many records with one call.

        Raises :class:`LeaseLost` if leases are lost; the other records are acknowledged.
        """
        listed = list(deliveries)
        for delivery in listed:
            if not isinstance(delivery, Delivery) or delivery.group_key != self.group_key:
                raise InvalidArgument(
                    f"{delivery!r} is not a delivery of work group {self.group!r} of topic "
                    f"{self.topic!r}: acknowledge it with a reader of its own group"
                )
        lost: list[Sequence[int]] = []
        for first in range(0, len(listed), ACK_STEP):
            keys = [delivery.key for delivery in listed[first : first + ACK_STEP]]
            lost += await self._call("ack", leases=keys)
        if lost:
            raise LeaseLost(
                f"{len(lost)} of {len(listed)} leases are lost, of bucket and offset "
                f"{', '.join(f'{b}/{o}' for b, o, _ in lost[:10])}: they ended, and the records "
                "were delivered again or are finished. The others are acknowledged"
            )

    async def acknowledge(self, delivery: Delivery) -> None:
        """Finish one record; calls of many tasks share one call to the keeper."""
        self._check_joined()
        if not await self._session.ack(delivery.key):
            raise delivery.lost()

    async def give_back(
        self, deliveries: Sequence[Delivery], delay: float = 0.0, *, failed: bool = False
    ) -> None:
        """Have records delivered again, ``delay`` seconds from now."""
        _seconds("delay", delay, 0.0, _MOST_DELAY)
        lost = await self._call(
            "release", leases=[d.key for d in deliveries], delay=delay, failed=failed
        )
        if lost:
            raise deliveries[0].lost()

    async def reject_delivery(self, delivery: Delivery, reason: str) -> None:
        """Move a record to the dead letters."""
        if not isinstance(reason, str):
            raise InvalidArgument(f"reason must be text, got {reason!r}")
        bucket, offset, token = delivery.key
        await self._call(
            "reject", bucket=bucket, offset=offset, token=token, reason=_shortened(reason)
        )

    async def fail_delivery(self, delivery: Delivery, reason: str, delay: float) -> None:
        """Have a record whose handler has raised delivered again, ``delay`` seconds from now; move
        it to the dead letters if this was its last attempt."""
        bucket, offset, token = delivery.key
        await self._call(
            "fail",
            bucket=bucket,
            offset=offset,
            token=token,
            reason=_shortened(reason),
            delay=delay,
        )

    async def renew(
        self, deliveries: Sequence[Delivery], lease: float | None = None
    ) -> list[Delivery]:
        """Renew leases; return the deliveries whose leases are lost."""
        seconds = self._options.lease if lease is None else lease
        _seconds("lease", seconds, 0.01, _MOST_LEASE)
        began = time.monotonic()
        until, lost = await self._call("extend", leases=[d.key for d in deliveries], lease=seconds)
        gone = {tuple(key) for key in lost}
        for delivery in deliveries:
            if delivery.key not in gone:
                delivery.renewed(until, began + seconds)
        return [delivery for delivery in deliveries if delivery.key in gone]

    async def run(
        self,
        handler: Callable[[dict[str, Any]], Any],
        concurrency: int = 1,
        *,
        backoff: float = 1.0,
        max_backoff: float = 300.0,
        wait: bool = True,
    ) -> int:
        """Call ``handler`` with every record, ``concurrency`` of them at a time.

        A record is acknowledged when its handler returns; meanwhile its lease is renewed. If the
        handler raises, the record is delivered again after a pause, which doubles with every
        attempt from ``backoff`` to ``max_backoff`` seconds and varies at random. After the last
        attempt the record goes to the dead letters, with the error as the reason. A function that
        is not a coroutine runs in a thread.

        Runs until the reader is closed; with ``wait=False`` until nothing can be delivered. Returns
        how many records were acknowledged. When the reader is closed, or this call is cancelled,
        handlers that run are cancelled, and their records are delivered again immediately. A thread
        cannot be cancelled: its record is delivered again when the lease has ended.
        """
        _seconds("backoff", backoff, 0.0, _MOST_DELAY)
        _seconds("max_backoff", max_backoff, 0.0, _MOST_DELAY)
        if type(concurrency) is not int or concurrency < 1:
            raise InvalidArgument(f"concurrency must be a whole number from 1, got {concurrency!r}")
        self._check_open()
        run = HandlerRun(self, handler, concurrency, backoff=backoff, max_backoff=max_backoff)
        self._runs.add(run)
        try:
            return await run.until_done(wait=wait)
        finally:
            self._runs.discard(run)

    # The group

    async def stats(self) -> dict[str, Any]:
        """Return the group's numbers: in flight, retrying, dead, unacknowledged, by bucket."""
        stats: dict[str, Any] = await self._call("stats")
        return {"topic": self.topic, **stats}

    async def release_all(self) -> int:
        """Release the leases of all members, who lose them; return how many there were."""
        return int(await self._call("release_all"))

    async def dead_letters(self, where: str | None = None) -> list[dict[str, Any]]:
        """Return the dead letters of this group that were not re-driven.

        Each is the record with the field ``dead_letter``: number, topic, bucket, offset, reason and
        more. ``where`` is an SQL condition on any of these, such as ``dead_letter.attempts > 3``.
        """
        async with aclosing(self._undriven_letters(where)) as pages:
            return [letter async for page in pages for _, letter in page]

    async def redrive(
        self,
        where: str | None = None,
        *,
        numbers: Iterable[int] | None = None,
        offsets: Iterable[int | tuple[int, int]] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Deliver dead records again, as if for the first time: all, those that meet an SQL
        condition, those of some dead letters by number, or by their offsets in the topic of the
        dead letters, for buckets other than 0 as pairs of bucket and offset.

        Each dead letter is re-driven once, whatever is killed meanwhile: repeat the call. Returns
        how many were, or with ``dry_run`` would be. Other groups do not see it.
        """
        chosen = None if numbers is None else set(numbers)
        places = None if offsets is None else {_place(offset) for offset in offsets}
        # All are found before the first is re-driven: it may fail again, and be found again.
        letters = []
        async with aclosing(self._undriven_letters(where)) as pages:
            async for page in pages:
                letters += [
                    self._address(place, letter)
                    for place, letter in page
                    if (chosen is None or letter[FIELD]["number"] in chosen)
                    and (places is None or place in places)
                ]
        if dry_run:
            return len(letters)
        count = 0
        for first in range(0, len(letters), _REDRIVE_STEP):
            count += await self._call("redrive", letters=letters[first : first + _REDRIVE_STEP])
        return count

    async def _undriven_letters(
        self, where: str | None
    ) -> AsyncGenerator[list[tuple[int, dict[str, Any]]], None]:
        """Yield the dead letters that were not re-driven, page by page, each with its place."""
        try:
            letters = await self._session.records.dead_letters()
        except NoSuchTopic:
            return
        identity = self._session.settings.identity
        async with aclosing(find_letters(letters, identity, where)) as pages:
            async for page in pages:
                if page:
                    addresses = [self._address(*item) for item in page]
                    left = set(await self._call("undriven", letters=addresses))
                    yield [item for item in page if item[1][FIELD]["number"] in left]

    def _address(self, place: int, letter: dict[str, Any]) -> Letter:
        """Return a dead letter as the keeper knows it."""
        origin = letter[FIELD]
        bucket, offset = origin["bucket"], origin["offset"]
        settings, key, priority = self._session.settings, 0, 0
        if settings.reads_ahead:
            _, key, priority = order_of(letter, settings, offset, 0)
        return Letter(origin["number"], place, bucket, offset, origin["generation"], key, priority)

    def sync(self) -> SyncWorkReader:
        """Return the same reader for code without an event loop: every method blocks."""
        return SyncWorkReader(self, self._loop)

    async def close(self) -> None:
        """Return what was prefetched and leave the group; may be called twice.

        Fetches that wait raise :class:`BucketClosed`, and :meth:`run` returns. Deliveries that were
        handed out keep their leases until these end. A handler may close its own reader: the call
        returns immediately, and the rest is done when the handler has returned.
        """
        caller = asyncio.current_task()
        if self._closed is None:
            self._closing.set()
            self._closed = asyncio.create_task(self._close(caller))
        if not any(run.runs_in(caller) for run in self._runs):
            await asyncio.shield(self._closed)

    async def _close(self, caller: asyncio.Task[Any] | None) -> None:
        waits, self._waits = self._waits, set()
        for waiting in waits:
            waiting.cancel()
        for run in list(self._runs):
            await asyncio.wait([run.stop(caller)])
        while self._fetching:
            self._fetched.clear()
            await self._fetched.wait()
        unused = list(self._buffered.values())
        self._buffered.clear()
        if self._metrics is not None:
            self._metrics.remove()
        try:
            if unused:
                await self._return_unused(unused)
        finally:
            self._has_left = True
            await self._session.leave(id(self))


class SyncWorkReader(SyncQueue):
    """A work reader whose methods block, as do those of its deliveries."""

    def deliveries(self, *args: Any, **kwargs: Any) -> Iterator[SyncQueue]:
        """See :meth:`WorkReader.deliveries`."""
        for delivery in self.__getattr__("deliveries")(*args, **kwargs):
            yield SyncQueue(delivery, self._home)

    def fetch(self, *args: Any, **kwargs: Any) -> list[SyncQueue]:
        """See :meth:`WorkReader.fetch`."""
        fetched = self._run(self._queue.fetch(*args, **kwargs))
        return [SyncQueue(delivery, self._home) for delivery in fetched]

    def ack(self, deliveries: Iterable[SyncQueue]) -> None:
        """See :meth:`WorkReader.ack`."""
        self._run(self._queue.ack([delivery._queue for delivery in deliveries]))


def _shortened(reason: str) -> str:
    """Return the reason of a dead letter as it can be stored."""
    return reason.encode("utf-8", "replace").decode()[:_MOST_REASON]


def _place(offset: int | tuple[int, int]) -> int:
    """Return the place of a dead letter that the user gave."""
    bucket, position = (0, offset) if isinstance(offset, int) else offset
    if type(bucket) is not int or type(position) is not int or bucket < 0 or position < 0:
        raise InvalidArgument(f"offsets must be whole numbers from 0, or pairs, got {offset!r}")
    return letter_place(bucket, position)


def _seconds(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidArgument(
            f"{name} must be a number of seconds from {least:g} to {most:g}, got {value!r}"
        )
