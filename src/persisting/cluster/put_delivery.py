"""Bringing the rows of a put to the owners of its buckets: one call per owner, stored once.

Every call carries a producer sequence, which each bucket stores at most once. So rows are sent
again, under the same sequence, until their owner has answered: also to another owner, and also if
the buckets of one call have meanwhile moved to several owners.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, NamedTuple

from persisting.cluster import wire
from persisting.cluster.locator import LOST, OwnerLocator, Patience
from persisting.cluster.wire import Request
from persisting.errors import BucketClosed, StorageError
from persisting.topic.bucket_client import ProducerSequence
from persisting.topic.bucket_set import all_results

_UPLOAD_ATTEMPTS = 5

_TOGETHER_SECONDS = 1.0
"""How long buckets that are located wait for the others of their put, so that an owner stores its
part of the put as a whole. Then they are sent without them."""


class PackedRows(NamedTuple):
    """The rows for one bucket, as pieces that each fit a message."""

    pieces: list[bytes]
    is_arrow: bool
    schema: bytes | None = None
    """The schema of records that are sent as columns; :func:`wire.pack_columns`."""


class Outcome(NamedTuple):
    """How a delivery ended for some of its buckets."""

    buckets: list[int]
    node: str | None
    """The owner that answered, None if no owner was found."""
    error: Exception | None


class PutDelivery:
    """Sends packed rows to the owners of their buckets."""

    def __init__(self, locator_of: Callable[[int], OwnerLocator]) -> None:
        self._locator_of = locator_of
        self._single_bucket_nodes: set[str] = set()
        """Nodes of an older version, which take the rows of one bucket per call."""

    async def to_owner(
        self,
        node: str,
        rows: dict[int, PackedRows],
        sequence: ProducerSequence,
        patience: Patience,
    ) -> dict[int, Exception]:
        """Store rows at one owner, in one call.

        Return the buckets for which another owner must be found, with the reason. All others are
        stored.
        """
        lost: dict[int, Exception] = {}
        while True:
            here = {b: packed for b, packed in rows.items() if b not in lost}
            for bucket in [b for b in here if self._locator_of(b).node != node]:
                lost[bucket] = BucketClosed(f"bucket {bucket} is no longer on node {node}")
                del here[bucket]
            if not here:
                return lost
            if len(here) > 1 and node in self._single_bucket_nodes:
                calls = [self.to_owner(node, {b: here[b]}, sequence, patience) for b in here]
                for lost_bucket in await all_results(calls):
                    lost |= lost_bucket
                return lost
            try:
                missing = await self._send(here, sequence, patience)
            except LOST as exc:
                return lost | self._forget(here, exc)
            except StorageError as exc:
                if len(here) == 1 or not wire.is_unknown_request(exc, "put_parts"):
                    raise
                self._single_bucket_nodes.add(node)
                continue
            if not missing:
                return lost
            # Nothing was stored: send what is left without the missing buckets.
            lost |= self._forget(missing, BucketClosed(f"node {node} does not own {missing}"))

    async def everywhere(
        self,
        rows: dict[int, PackedRows],
        sequence: ProducerSequence,
        patience: Patience,
        lost: dict[int, Exception] | None = None,
    ) -> AsyncGenerator[Outcome, None]:
        """Store rows wherever their buckets are; yield an outcome for every bucket.

        ``lost`` has the buckets whose owner has just been lost, with the reason.
        """
        left, lost = dict(rows), dict(lost or {})
        locating: dict[int, asyncio.Task[str]] = {}
        try:
            while left:
                for bucket, error in await self._pause(lost, patience):
                    del left[bucket]
                    yield Outcome([bucket], None, error)
                lost = {}
                groups: dict[str, dict[int, PackedRows]] = {}
                for bucket in [b for b in left if b not in locating]:
                    locator = self._locator_of(bucket)
                    if locator.node is None:
                        locating[bucket] = asyncio.ensure_future(locator.locate(patience))
                    else:
                        groups.setdefault(locator.node, {})[bucket] = left[bucket]
                for bucket, task in await _ended(locating, wait=not groups):
                    try:
                        groups.setdefault(task.result(), {})[bucket] = left[bucket]
                    except Exception as exc:
                        del left[bucket]
                        yield Outcome([bucket], None, exc)
                sends = [self.to_owner(n, group, sequence, patience) for n, group in groups.items()]
                results = await asyncio.gather(*sends, return_exceptions=True)
                for (node, group), result in zip(groups.items(), results, strict=True):
                    if isinstance(result, dict):
                        lost |= result
                        ended, failure = [b for b in group if b not in result], None
                    elif isinstance(result, Exception):
                        ended, failure = list(group), result
                    else:
                        raise result
                    for bucket in ended:
                        del left[bucket]
                    if ended:
                        yield Outcome(ended, node, failure)
        finally:
            for task in locating.values():
                task.cancel()

    async def _pause(
        self, lost: dict[int, Exception], patience: Patience
    ) -> list[tuple[int, Exception]]:
        """Pause before lost owners are looked for; return the buckets that are given up."""
        pauses = [self._locator_of(b).lost(exc, patience) for b, exc in lost.items()]
        results = await asyncio.gather(*pauses, return_exceptions=True)
        return [(b, r) for b, r in zip(lost, results, strict=True) if isinstance(r, Exception)]

    def _forget(self, buckets: Iterable[int], exc: Exception) -> dict[int, Exception]:
        for bucket in buckets:
            self._locator_of(bucket).forget()
        return dict.fromkeys(buckets, exc)

    async def _send(
        self, rows: dict[int, PackedRows], sequence: ProducerSequence, patience: Patience
    ) -> list[int]:
        """Send rows to the owner of all their buckets, in several messages if one cannot hold
        them; they are stored as a whole. Return the buckets that are missing there."""
        # Any bucket of the owner takes the call; it must get all messages of the put.
        owner = self._locator_of(next(iter(rows))).connection()
        if owner is None:
            raise BucketClosed("the owner is no longer known")
        pieces = [piece for packed in rows.values() for piece in packed.pieces]
        *before, last = wire.in_messages(pieces)
        for _ in range(_UPLOAD_ATTEMPTS):
            args: dict[str, Any] = {"mark": list(sequence)}
            schema = next(iter(rows.values())).schema
            if schema is not None:
                args["columns"] = schema
            if before:
                upload = uuid.uuid4().hex
                for number, message in enumerate(before):
                    await owner.ask(Request("stage", {"upload": upload, "number": number}, message))
                    patience.renew()
                args |= {"upload": upload, "staged": len(before)}
            reply = await owner.ask(_put_request(rows, args, last))
            if reply.value != "resend":
                return reply.value["missing"] if isinstance(reply.value, dict) else []
        raise StorageError(
            f"a put of {len(before) + 1} messages did not arrive as a whole in "
            f"{_UPLOAD_ATTEMPTS} attempts: the owner dropped the first messages each time; put "
            "fewer rows at once"
        )


def _put_request(
    rows: dict[int, PackedRows], args: dict[str, Any], message: list[bytes]
) -> Request:
    if len(rows) == 1:
        (packed,) = rows.values()
        return Request("put", args, message, packed.is_arrow)
    buckets = [[bucket, len(packed.pieces), packed.is_arrow] for bucket, packed in rows.items()]
    return Request("put_parts", {**args, "buckets": buckets}, message)


async def _ended(
    locating: dict[int, asyncio.Task[str]], wait: bool
) -> list[tuple[int, asyncio.Task[str]]]:
    """Take out the searches that end within ``_TOGETHER_SECONDS``; with ``wait`` at least one."""
    if locating:
        ended, _ = await asyncio.wait(locating.values(), timeout=_TOGETHER_SECONDS)
        if wait and not ended:
            await asyncio.wait(locating.values(), return_when=asyncio.FIRST_COMPLETED)
    return [(b, locating.pop(b)) for b, task in list(locating.items()) if task.done()]
