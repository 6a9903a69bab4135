"""The live tail: records as they are acknowledged, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from persisting.actions.record_window import Found, bounded_window, by_arrival
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, StorageError
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages, value_trees
from persisting.ui.console import Console, topic_of
from persisting.ui.owners import OwnedBucket, Wanted
from persisting.ui.requests import Parameters, written_positions
from persisting.ui.screens.records import check_bucket

_ALIVE_SECONDS = 10.0
_READ_ROWS = 2_000
"""Records read in one poll; more than that are left out unread."""
_READ_BYTES = 8 << 20
_OWNER_ROWS = 500
"""Records requested from owners in one poll."""
_MAX_TAILS = 16
_MAX_RATE = 500
_CUT = 2_000
_READER = "tails"
"""Tails read by themselves, so that pages of the topic do not wait for them."""


@dataclass
class _Tail:
    """One reader's place in a topic."""

    buckets: list[int] | None
    contains: str
    rate: int
    """Records shown per second."""
    places: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    flushed: dict[int, int] = field(default_factory=dict)
    """By bucket, the end of what is in files."""
    allowance: float = 0.0
    """Records that may be shown now."""
    looked: float = field(default_factory=time.monotonic)


@dataclass
class _Look:
    """What one poll of the topic found."""

    shown: list[Found]
    skipped: int
    """Records that were left unread, or that the rate limit left out."""
    filtered: int
    """Records that the filter left out."""
    restored: list[int]


async def show(request: Request) -> Response:
    """Show the page that follows a topic."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    buckets = await console.view.read(topic, lambda source: list(source.buckets))
    return pages.render(
        request,
        "tail.html",
        topic=topic,
        buckets=buckets,
        bucket=given.optional_number("bucket"),
        contains=given.text("filter", 200) or "",
        rate=given.number("rate", 20, least=1, most=_MAX_RATE),
        max_rate=_MAX_RATE,
    )


async def events(request: Request) -> Response:
    """Stream what is put."""
    console, topic, given = Console.of(request), topic_of(request), Parameters.of(request)
    if console.tails >= _MAX_TAILS:
        raise InvalidArgument(f"{_MAX_TAILS} live tails are already open; close one")
    bucket = given.optional_number("bucket")
    last = request.headers.get("last-event-id", "")
    places = Parameters({"from": last} if last else {"from": given.text("from", 50_000) or ""})
    following = _Tail(
        None if bucket is None else [bucket],
        (given.text("filter", 200) or "").casefold(),
        given.number("rate", 20, least=1, most=_MAX_RATE),
        places.positions("from") or {},
    )
    following.allowance = following.rate
    owned = await console.owners.buckets(topic)
    await console.view.read(topic, lambda source: _begin(source, following, owned), _READER)
    return StreamingResponse(
        _stream(request, console, topic, following),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _stream(
    request: Request, console: Console, topic: str, following: _Tail
) -> AsyncIterator[bytes]:
    if console.tails >= _MAX_TAILS:  # others have come first since the request was accepted
        return
    console.tails += 1
    try:
        yield _event("start", {}, following)
        sent = time.monotonic()
        while not await request.is_disconnected():
            try:
                look = await console.view.read(
                    topic, lambda source: _look(source, following), _READER
                )
                await _look_beyond(console, topic, following, look)
                records = await in_thread(_chosen, look, following)
            except StorageError as exc:
                yield _event("problem", {"message": str(exc)}, following)
                await asyncio.sleep(2)
                continue
            for bucket in look.restored:
                yield _event("restored", {"bucket": bucket}, following)
            if look.shown or look.skipped or look.filtered:
                yield records
                sent = time.monotonic()
            elif time.monotonic() - sent > _ALIVE_SECONDS:
                yield b": alive\n\n"
                sent = time.monotonic()
            await asyncio.sleep(console.view.poll_seconds)
    finally:
        console.tails -= 1


def _begin(source: TopicFolder, following: _Tail, owned: dict[int, OwnedBucket]) -> None:
    """Begin at the end, except where an earlier stream of the same reader stopped."""
    if following.buckets is None:
        following.buckets = list(source.buckets)
    for bucket in following.buckets:
        check_bucket(source, bucket)
        snapshot = source.snapshot(bucket)
        end = max(snapshot.end, owned[bucket].end if bucket in owned else 0)
        place = following.places.get(bucket, end)
        following.places[bucket] = min(max(place, snapshot.start), end)
        following.epochs[bucket] = snapshot.epoch


def _look(source: TopicFolder, following: _Tail) -> _Look:
    """Read what is new and move the reader's place after it."""
    now = time.monotonic()
    following.allowance = min(
        following.rate, following.allowance + (now - following.looked) * following.rate
    )
    following.looked = now
    found: list[Found] = []
    unread, restored = 0, []
    buckets = following.buckets or []
    most = _READ_ROWS // max(1, len(buckets))
    if not following.contains:  # what the rate limit would leave out need not be read
        most = min(most, int(following.allowance))
    for bucket in buckets:
        snapshot = source.snapshot(bucket)
        place = following.places[bucket]
        following.flushed[bucket] = snapshot.end
        before = following.epochs[bucket]
        if snapshot.epoch != before:
            restored.append(bucket)
            following.epochs[bucket] = snapshot.epoch
            ends = [one.end for one in source.table(bucket).restores[before : snapshot.epoch]]
            place = following.places[bucket] = min([place, snapshot.end, *ends])
        if snapshot.end <= place:
            continue  # the reader has seen records that are in no file yet
        first = max(place, snapshot.start, snapshot.end - most)
        if first < snapshot.end:
            budget = _READ_BYTES // len(buckets)
            window = bounded_window(
                source, bucket, snapshot, first, snapshot.end, budget, newest=True
            )
            first, found = window.first, found + window.rows
        unread += max(0, first - max(place, snapshot.start))
        following.places[bucket] = snapshot.end
    return _Look(found, unread, 0, restored)


async def _look_beyond(console: Console, topic: str, following: _Tail, look: _Look) -> None:
    """Add what owners have acknowledged that is in no file yet."""
    most = max(1, _OWNER_ROWS // len(following.places))
    wanted = {bucket: Wanted(place) for bucket, place in following.places.items()}
    parts = await console.owners.unflushed(topic, wanted, most, _READ_BYTES)
    for bucket, part in parts.items():
        if part.bucket.end < following.places[bucket]:
            # An owner without a log was killed, and what only it knew is lost.
            look.restored.append(bucket)
            following.places[bucket] = following.flushed[bucket]
        elif part.records:
            look.shown += [Found(bucket, offset, record) for offset, record in part.found]
            look.skipped += part.first - following.places[bucket]
            following.places[bucket] = part.end


def _chosen(look: _Look, following: _Tail) -> bytes:
    """Leave out what the filter and the rate limit do not let through; encode the rest."""
    matching = [place for place in look.shown if _contains(place.record, following.contains)]
    matching.sort(key=by_arrival)
    look.filtered = len(look.shown) - len(matching)
    allowed = int(following.allowance)
    look.shown = matching[-allowed:] if allowed else []
    following.allowance -= len(look.shown)
    look.skipped += len(matching) - len(look.shown)
    return _event("records", _described(look), following)


def _contains(record: dict[str, Any], text: str) -> bool:
    return not text or text in value_trees.as_json(record).decode().casefold()


def _described(look: _Look) -> dict[str, Any]:
    return {
        "skipped": look.skipped,
        "filtered": look.filtered,
        "records": [
            {
                "bucket": found.bucket,
                "offset": found.offset,
                "time": pages.when(found.time),
                "text": _line(found.record),
            }
            for found in look.shown
        ],
    }


def _line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON with its values cut."""
    brief = {name: _brief(value) for name, value in record.items() if value is not None}
    return value_trees.as_json(brief).decode()[:_CUT]


def _brief(value: Any) -> Any:
    plain = isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) < 200)
    return value if plain else value_trees.brief(value, 200)


def _event(name: str, data: dict[str, Any], following: _Tail) -> bytes:
    """Encode an event; JSON has no line breaks, so a record cannot begin another event."""
    place = written_positions(following.places)
    return f"event: {name}\nid: {place}\ndata: ".encode() + value_trees.as_json(data) + b"\n\n"
