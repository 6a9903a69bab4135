"""The numbered puts that the owner of a bucket is carrying out, and those that were given up.

A request may reach its owner after its sender has stopped waiting for it. A sender that wants to
send the same rows under other numbers must first be certain that the earlier request is never
carried out: it gives up the number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from persisting.bucket.producer_sequences import MAX_PRODUCERS
from persisting.errors import StorageError
from persisting.topic.bucket_client import ProducerSequence

_PAUSE_SECONDS = 0.002


class NumberedPuts:
    """The numbered puts of one bucket, while one node owns it."""

    def __init__(self) -> None:
        self._under_way: Counter[ProducerSequence] = Counter()
        self._given_up: dict[str, int] = {}
        """By producer, the last number that was given up."""

    @contextmanager
    def carrying_out(self, sequence: ProducerSequence) -> Iterator[None]:
        """Note that a put is under way; raise if it was given up."""
        if self.is_given_up(sequence):
            producer, number = sequence
            raise StorageError(f"put {number} of producer {producer!r} was given up by its sender")
        self._under_way[sequence] += 1
        try:
            yield
        finally:
            self._under_way[sequence] -= 1
            if not self._under_way[sequence]:
                del self._under_way[sequence]

    def is_given_up(self, sequence: ProducerSequence) -> bool:
        """Whether this put must no longer be carried out."""
        producer, number = sequence
        return number <= self._given_up.get(producer, -1)

    async def give_up(
        self,
        sequence: ProducerSequence,
        is_queued: Callable[[ProducerSequence], Awaitable[bool]],
    ) -> None:
        """Refuse this put, and earlier ones of its producer, from now on; wait until no request is
        carrying it out, and it is not queued for the log."""
        producer, number = sequence
        last = self._given_up.pop(producer, -1)
        self._given_up[producer] = max(last, number)
        if len(self._given_up) > MAX_PRODUCERS:
            del self._given_up[next(iter(self._given_up))]
        while True:
            if sequence not in self._under_way and not await is_queued(sequence):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
