"""Bringing the rows of a put to the owners of its buckets: one call per owner, stored once.

Every call carries a producer sequence, which each bucket stores at most once. So rows are sent
again, under the same sequence, until their owner has answered: even to another owner, and even if
the buckets of one call have meanwhile moved to several owners.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, NamedTuple

from persisting.cluster import wire
from persisting.cluster.locator import LOST, OwnerLocator, Patience
from persisting.cluster.transport import Answered, PostingTarget
from persisting.cluster.wire import PackedColumns, Reply, Request
from persisting.errors import BucketClosed, StorageError
from persisting.records.record_columns import RecordColumns
from persisting.topic.bucket_client import ProducerSequence

_UPLOAD_ATTEMPTS = 5

_TOGETHER_SECONDS = 1.0
"""How long buckets that are located wait for the others of their put, so that an owner stores its
part of the put as a whole. Then they are sent without them."""


class ColumnRange(NamedTuple):
    """The rows for one bucket among those of a put that is sent as columns."""

    packed: PackedColumns
    start: int
    rows: int


class PackedRows(NamedTuple):
    """The rows for one bucket: pieces that each fit a message, or a part of packed columns."""

    pieces: list[bytes]
    is_arrow: bool
    columns: ColumnRange | None = None


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
        answer: Reply | Exception | None = None,
    ) -> dict[int, Exception]:
        """Store rows at one owner, in one call.

        Return the buckets for which another owner must be found, with the reason. All others are
        stored. ``answer`` is the outcome of :meth:`post`, if the rows were sent by that.
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
                return lost | await self._one_by_one(node, here, sequence, patience)
            try:
                if answer is None or lost:
                    missing = await self._send(here, sequence, patience)
                else:
                    posted, answer = answer, None
                    found = _missing_in(posted)
                    if found is None:
                        continue
                    missing = found
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

    def can_post(self, node: str, bucket: int) -> bool:
        """Whether :meth:`post` may be possible for a bucket of an owner."""
        owner = self._locator_of(bucket).connection()
        return isinstance(owner, PostingTarget) and owner.node == node

    def post(
        self,
        node: str,
        rows: dict[int, PackedRows],
        sequence: ProducerSequence,
        answered: Answered,
    ) -> bool:
        """Send rows to one owner immediately and without a task, if that is possible; ``answered``
        then gets the outcome. If that is not :func:`is_stored`, continue with :meth:`to_owner`."""
        if len(rows) == 1:  # the put of a lone producer: as little as possible
            ((bucket, packed),) = rows.items()
            if packed.columns is None and len(packed.pieces) == 1:
                owner = self._locator_of(bucket).connection()
                if not isinstance(owner, PostingTarget) or owner.node != node:
                    return False
                args = {"mark": sequence}
                return owner.post(Request("put", args, packed.pieces, packed.is_arrow), answered)
        target: PostingTarget | None = None
        for bucket in rows:
            owner = self._locator_of(bucket).connection()
            if not isinstance(owner, PostingTarget) or owner.node != node:
                return False
            target = owner  # any of them takes the call
        if target is None or (len(rows) > 1 and node in self._single_bucket_nodes):
            return False
        content = _content(rows)
        if content is None or sum(map(len, content.pieces)) > wire.MESSAGE_BYTES:
            return False
        request = _put_request(rows, {"mark": sequence, **content.args}, content.pieces)
        return target.post(request, answered)

    async def _one_by_one(
        self,
        node: str,
        rows: dict[int, PackedRows],
        sequence: ProducerSequence,
        patience: Patience,
    ) -> dict[int, Exception]:
        """Like :meth:`to_owner`, but in one call per bucket."""
        calls = [self.to_owner(node, {b: packed}, sequence, patience) for b, packed in rows.items()]
        lost: dict[int, Exception] = {}
        failed: dict[int, Exception] = {}
        results = await asyncio.gather(*calls, return_exceptions=True)
        for bucket, result in zip(rows, results, strict=True):
            if isinstance(result, dict):
                lost |= result
            elif isinstance(result, Exception):
                failed[bucket] = result
            else:
                raise result
        if failed and not lost:
            raise next(iter(failed.values()))
        # A bucket that did not answer may still store its rows. Nothing fails until all have
        # answered, so that the sender knows what is stored.
        return lost | failed

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
        """Pause before lost owners are searched for; return the buckets that are given up."""
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
        content = _content(rows)
        if content is None:
            content = await asyncio.to_thread(_content_of_some, rows)
        *before, last = wire.in_messages(content.pieces)
        for _ in range(_UPLOAD_ATTEMPTS):
            args: dict[str, Any] = {"mark": list(sequence), **content.args}
            if before:
                upload = uuid.uuid4().hex
                for number, message in enumerate(before):
                    await owner.ask(Request("stage", {"upload": upload, "number": number}, message))
                    patience.renew()
                args |= {"upload": upload, "staged": len(before)}
            missing = _missing_in(await owner.ask(_put_request(rows, args, last)))
            if missing is not None:
                return missing
        raise StorageError(
            f"a put of {len(before) + 1} messages did not arrive as a whole in "
            f"{_UPLOAD_ATTEMPTS} attempts: the owner dropped the first messages each time; put "
            "fewer rows at once"
        )


def is_stored(answer: Reply | Exception) -> bool:
    """Whether an owner has stored all rows of a call."""
    return isinstance(answer, Reply) and answer.error is None and answer.value == "stored"


def _missing_in(answer: Reply | Exception) -> list[int] | None:
    """Return the buckets that the owner lacks, None if it wants the rows again; raise an error."""
    if isinstance(answer, Exception):
        raise answer
    value = wire.raise_error(answer).value
    if value == "resend":
        return None
    return value["missing"] if isinstance(value, dict) else []


class _Content(NamedTuple):
    """The rows of a call: their pieces, and what the owner must know to read them."""

    pieces: list[bytes]
    args: dict[str, Any]


def _content(rows: dict[int, PackedRows]) -> _Content | None:
    """Return the rows as they are packed; None if they are a part of packed columns."""
    ranges = [packed.columns for packed in rows.values()]
    if ranges[0] is None:
        return _Content([piece for packed in rows.values() for piece in packed.pieces], {})
    packed, end = ranges[0].packed, 0
    for part in ranges:
        assert part is not None
        if part.start != end:
            return None
        end += part.rows
    if end != len(packed.columns):
        return None
    return _Content(packed.pieces, {"columns": packed.schema})


def _content_of_some(rows: dict[int, PackedRows]) -> _Content:
    """Return rows that are a part of packed columns."""
    ranges = [packed.columns for packed in rows.values() if packed.columns is not None]
    parts = [part.packed.columns.slice(part.start, part.rows) for part in ranges]
    packed = wire.pack_columns(RecordColumns.joined(parts))
    return _Content(packed.pieces, {"columns": packed.schema})


def _put_request(
    rows: dict[int, PackedRows], args: dict[str, Any], message: list[bytes]
) -> Request:
    if len(rows) == 1:
        (packed,) = rows.values()
        return Request("put", args, message, packed.is_arrow)
    buckets = [
        [bucket, packed.columns.rows if packed.columns else len(packed.pieces), packed.is_arrow]
        for bucket, packed in rows.items()
    ]
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
