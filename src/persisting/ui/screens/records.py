"""Browsing records, and one record in full."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.responses import Response

from persisting.actions.record_window import BoundedWindow, Found, bounded_window, by_arrival
from persisting.actions.text_values import format_size
from persisting.bucket.snapshot import Snapshot
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument, NoSuchTopic, OffsetOutOfRange
from persisting.suggestions import choices
from persisting.topic.topic_files import TopicFolder
from persisting.ui import pages, value_trees
from persisting.ui.console import Console, topic_of
from persisting.ui.owners import Unflushed, Wanted
from persisting.ui.requests import Parameters, address, path_number, written_positions

_DEFAULT_ROWS, _MAX_ROWS, _MAX_DOWNLOAD = 50, 500, 5_000
_DEFAULT_COLUMNS = 6
_AT_ONCE = 4
_PAGE_BYTES = 16 << 20
_DOWNLOAD_BYTES = 32 << 20
"""A page and a download read at most about this much, however large the records are in memory."""


@dataclass
class State:
    """Which state of a topic is shown: the current one, a tag, a time, or versions."""

    tag: str | None = None
    at: dt.datetime | None = None
    version: int | None = None
    """Of one bucket."""

    @classmethod
    def of(cls, given: Parameters) -> State:
        state = cls(given.text("tag", 128), given.time("at"), given.optional_number("version"))
        if sum(value is not None for value in (state.tag, state.at, state.version)) > 1:
            raise InvalidArgument("choose one of tag, at and version")
        return state

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of an address that shows this state."""
        at = None if self.at is None else self.at.isoformat()
        return {"tag": self.tag, "at": at, "version": self.version}

    def snapshots(self, source: TopicFolder, buckets: Iterable[int]) -> dict[int, Snapshot]:
        buckets = list(buckets)
        if self.version is not None:
            if len(buckets) != 1:
                raise InvalidArgument("each bucket has its own versions; choose a bucket too")
            return {buckets[0]: source.at(buckets[0], {buckets[0]: self.version})}
        state = self.tag if self.at is None else self.at
        if state is None:
            return {bucket: source.snapshot(bucket) for bucket in buckets}
        numbers = source.versions(state)
        return {bucket: source.at(bucket, numbers) for bucket in buckets}


@dataclass
class Window:
    """The records of a page, and where its neighbours begin."""

    rows: list[Found]
    fields: list[str]
    columns: list[str]
    asked: dict[int, int]
    """By bucket, the offset that the address of the page names, or the end of the files."""
    starts: dict[int, int]
    ends: dict[int, int]
    has_older: bool
    has_newer: bool
    first: dict[int, int]
    """By bucket, the first offset that exists."""
    last: dict[int, int]
    """By bucket, the offset after the last record."""
    schema: pa.Schema
    tags: list[str]
    buckets: list[int]
    cut: set[int]
    """Buckets whose records are so large that fewer were read."""
    chosen: list[str] | None = None
    """The columns that the reader has chosen."""

    def add(self, unflushed: dict[int, Unflushed], limit: int, *, newest: bool) -> None:
        """Add records that are in no file yet."""
        for bucket, part in unflushed.items():
            if part.is_cut:
                self.cut.add(bucket)
            if newest and part.is_cut:  # the records before them are on an older page
                self.rows = [found for found in self.rows if found.bucket != bucket]
            self.rows += [Found(bucket, offset, record) for offset, record in part.found]
            self.last[bucket] = max(self.last[bucket], part.bucket.end)
            for name in (name for record in part.records for name in record):
                if name not in self.fields:
                    self.fields.append(name)
        self.rows.sort(key=by_arrival)
        self.rows = self.rows[-limit:] if newest else self.rows[:limit]
        for bucket in self.starts:
            offsets = [found.offset for found in self.rows if found.bucket == bucket]
            if offsets:
                self.starts[bucket], self.ends[bucket] = min(offsets), max(offsets) + 1
            elif newest and bucket in unflushed and unflushed[bucket].records:
                # Records of other buckets fill the page.
                self.starts[bucket] = self.ends[bucket] = unflushed[bucket].end
            else:
                self.starts[bucket] = self.ends[bucket] = self.asked[bucket]
        self.has_older = any(start > self.first[b] for b, start in self.starts.items())
        self.has_newer = any(end < self.last[b] for b, end in self.ends.items())


async def browse(request: Request) -> Response:
    """Show a page of records."""
    topic, given = topic_of(request), Parameters.of(request)
    limit = given.number("limit", _DEFAULT_ROWS, least=1, most=_MAX_ROWS)
    state = State.of(given)
    window = await _window(request, given, state, limit, _PAGE_BYTES)
    base = f"/topics/{pages.segment(topic)}/records"
    bucket = given.optional_number("bucket")
    kept = {
        **state.parameters(),
        "bucket": bucket,
        "columns": window.chosen,
        "limit": limit if limit != _DEFAULT_ROWS else None,
    }
    starts, ends = written_positions(window.starts), written_positions(window.ends)
    return pages.render(
        request,
        "records.html",
        topic=topic,
        window=window,
        state=state,
        bucket=bucket,
        limit=limit,
        kept=kept,
        older=address(base, **kept, until=starts) if window.has_older else None,
        newer=address(base, **kept, **{"from": ends}) if window.has_newer else None,
        oldest=address(base, **kept, **{"from": written_positions(window.first)}),
        newest=address(base, **kept),
        shown={**kept, "from": starts, "limit": max(1, len(window.rows))},
        given=given,
        page_bytes=_PAGE_BYTES,
    )


async def download(request: Request) -> Response:
    """Return the records of a page as JSON lines or Parquet.

    If the records are too large, JSON lines end with a line that says so and where to continue, and
    Parquet says it in its metadata.
    """
    topic, given = topic_of(request), Parameters.of(request)
    limit = given.number("limit", _DEFAULT_ROWS, least=1, most=_MAX_DOWNLOAD)
    kind = given.choice("format", ("jsonl", "parquet"))
    state = State.of(given)
    window = await _window(request, given, state, limit, _DOWNLOAD_BYTES, all_columns=True)
    if kind == "jsonl":
        body = await in_thread(_json_lines, window)
        return _attachment(body, f"{topic}.jsonl", "application/x-ndjson")
    body = await in_thread(_parquet, window)
    return _attachment(body, f"{topic}.parquet", "application/vnd.apache.parquet")


def _json_lines(window: Window) -> bytes:
    lines: list[Any] = [*window.rows]
    if window.cut:
        lines.append(_cut_note(window))
    return b"".join(value_trees.as_json(line) + b"\n" for line in lines)


def _cut_note(window: Window) -> dict[str, str]:
    """Return what the end of a download that was cut says."""
    return {
        "cut": f"a download has at most about {format_size(_DOWNLOAD_BYTES)} of records",
        "until": written_positions(window.starts),
        "from": written_positions(window.ends),
    }


def _parquet(window: Window) -> bytes:
    fields = pa.schema([_field(window, name) for name in window.columns])
    table = pa.Table.from_pylist([found.record for found in window.rows], schema=fields)
    table = table.append_column("_bucket", pa.array([found.bucket for found in window.rows], "i4"))
    table = table.append_column("_offset", pa.array([found.offset for found in window.rows], "i8"))
    times = [None if r.time is None else dt.datetime.fromisoformat(r.time) for r in window.rows]
    table = table.append_column("_time", pa.array(times, pa.timestamp("us", tz="UTC")))
    if window.cut:
        note = json.dumps(_cut_note(window))
        table = table.replace_schema_metadata({"persisting.cut": note})
    target = io.BytesIO()
    pq.write_table(table, target)
    return target.getvalue()


def _field(window: Window, name: str) -> pa.Field:
    """Return a field of the topic; what no file has yet has the type of its values."""
    if name in window.schema.names:
        return window.schema.field(name)
    return pa.field(name, pa.array([found.record.get(name) for found in window.rows]).type)


def _attachment(body: bytes, name: str, media_type: str) -> Response:
    quoted = pages.segment(name)
    return Response(
        body,
        media_type=media_type,
        headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quoted}"},
    )


async def show(request: Request) -> Response:
    """Show one record as a tree."""
    topic, given = topic_of(request), Parameters.of(request)
    state = State.of(given)
    found, offsets = await _one(request, state)
    base = f"/topics/{pages.segment(topic)}/records/{found.bucket}"
    kept = state.parameters()
    return pages.render(
        request,
        "record.html",
        topic=topic,
        found=found,
        state=state,
        tree=value_trees.tree(found.record),
        here_in_list=address(
            f"/topics/{pages.segment(topic)}/records",
            **kept,
            bucket=found.bucket,
            **{"from": f"{found.bucket}:{max(offsets.start, found.offset - 10)}"},
        ),
        this=f"{base}/{found.offset}",
        kept=kept,
        before=address(f"{base}/{found.offset - 1}", **kept)
        if found.offset > offsets.start
        else None,
        after=address(f"{base}/{found.offset + 1}", **kept)
        if found.offset + 1 < offsets.stop
        else None,
        vectors=[name for name, value in found.record.items() if value_trees.is_vector(value)],
    )


async def as_json(request: Request) -> Response:
    """Return one record as JSON."""
    found, _ = await _one(request, State.of(Parameters.of(request)))
    body = await in_thread(value_trees.as_json, found.record)
    return Response(body, media_type="application/json")


async def image(request: Request) -> Response:
    """Return an image inside a record."""
    given = Parameters.of(request)
    found, _ = await _one(request, State.of(given))
    try:
        value = value_trees.value_at(found.record, given.required("path"))
    except LookupError:
        raise InvalidArgument("the record has no such value") from None
    kind = value_trees.image_type(value) if isinstance(value, bytes) else None
    if kind is None:
        raise InvalidArgument("the value is not an image that browsers show")
    policy = "default-src 'none'; sandbox"
    return Response(value, media_type=kind, headers={"Content-Security-Policy": policy})


async def _one(request: Request, state: State) -> tuple[Found, range]:
    """Return the record that an address names, and the offsets of its bucket."""
    bucket, offset = path_number(request, "bucket"), path_number(request, "offset")

    def read(source: TopicFolder) -> tuple[Found, int, int]:
        check_bucket(source, bucket)
        snapshot = state.snapshots(source, [bucket])[bucket]
        if not snapshot.start <= offset < snapshot.end:
            raise OffsetOutOfRange(
                f"there is no offset {offset} in bucket {bucket}; there are {snapshot.start} to "
                f"{snapshot.end - 1}"
            )
        window = bounded_window(source, bucket, snapshot, offset, offset + 1, _PAGE_BYTES)
        return window.rows[0], snapshot.start, snapshot.end

    console, topic = Console.of(request), topic_of(request)
    try:
        found, start, end = await console.view.read(topic, read)
    except OffsetOutOfRange:
        wanted = {bucket: Wanted(offset, offset + 1)}
        parts: dict[int, Unflushed] = {}
        if state == State():
            parts = await console.owners.unflushed(topic, wanted, 1, _PAGE_BYTES)
        if bucket not in parts or not parts[bucket].records:
            raise
        start, end = parts[bucket].bucket.start, parts[bucket].bucket.end
        found = Found(bucket, offset, parts[bucket].records[0])
    return found, range(start, end)


async def _window(
    request: Request,
    given: Parameters,
    state: State,
    limit: int,
    nbytes: int,
    *,
    all_columns: bool = False,
) -> Window:
    bucket, offset = given.optional_number("bucket"), given.optional_number("offset")
    since, start, until = given.time("time"), given.positions("from"), given.positions("until")

    def read(source: TopicFolder) -> tuple[Window, dict[int, int] | None]:
        if bucket is not None:
            check_bucket(source, bucket)
        numbers = list(source.buckets) if bucket is None else [bucket]
        snapshots = state.snapshots(source, numbers)
        forward: dict[int, int] | None = None
        if offset is not None:
            forward = dict.fromkeys(numbers, offset)
        elif since is not None:
            micros = round(since.timestamp() * 1e6)
            with ThreadPoolExecutor(_AT_ONCE) as pool:  # each searches files of its own
                offsets = pool.map(lambda b: snapshots[b].offset_at(micros), numbers)
                forward = dict(zip(numbers, offsets, strict=True))
        elif start is not None:
            forward = {b: start.get(b, snapshots[b].end) for b in numbers}
        places = forward or until or {}
        names: list[str] = source.schema().names
        chosen = given.names("columns", names)
        # A field that no file has yet may be in records that only the owner holds.
        columns = [name for name in chosen if name in names] if chosen else names
        if chosen is None and not all_columns:
            columns = names[:_DEFAULT_COLUMNS]
        newest = forward is None
        rows, cut = _read(source, snapshots, places, limit, nbytes, columns, newest=newest)
        window = _described(source, snapshots, rows, cut, columns, places)
        window.chosen = chosen
        return window, forward

    console, topic = Console.of(request), topic_of(request)
    window, forward = await console.view.read(topic, read)
    if state == State():
        wanted = _beyond(window.last, forward, until)
        if forward is not None:  # what follows records that were left out is on a newer page
            wanted = {b: part for b, part in wanted.items() if b not in window.cut}
        parts = await console.owners.unflushed(topic, wanted, limit, nbytes)
        window.add(parts, limit, newest=forward is None)
        if not window.columns:
            window.columns = window.fields if all_columns else window.fields[:_DEFAULT_COLUMNS]
    if window.chosen is not None:
        window.columns = _known_columns(window.chosen, window.fields)
    return window


def _beyond(
    ends: dict[int, int], forward: dict[int, int] | None, until: dict[int, int] | None
) -> dict[int, Wanted]:
    """Return which records after the ends of the files a page shows, by bucket."""
    if forward is not None:
        return {b: Wanted(max(end, forward[b]), newest=False) for b, end in ends.items()}
    return {b: Wanted(end, None if until is None else until.get(b)) for b, end in ends.items()}


def _read(
    source: TopicFolder,
    snapshots: dict[int, Snapshot],
    places: dict[int, int],
    limit: int,
    nbytes: int,
    columns: list[str],
    *,
    newest: bool,
) -> tuple[list[Found], set[int]]:
    """Return up to ``limit`` records of about ``nbytes`` in order of arrival, and the buckets with
    records that were left out because of their size.

    They are the first ones from ``places`` on, or with ``newest`` the last ones before them.
    """
    found: list[Found] = []
    cut: set[int] = set()
    budget = nbytes // max(1, len(snapshots))
    schema = source.schema()

    def read(bucket: int) -> BoundedWindow:
        snapshot = snapshots[bucket]
        if newest:
            end = min(max(places.get(bucket, snapshot.end), snapshot.start), snapshot.end)
            first = max(snapshot.start, end - limit)
        else:
            first = min(max(places[bucket], snapshot.start), snapshot.end)
            end = min(first + limit, snapshot.end)
        return bounded_window(
            source, bucket, snapshot, first, end, budget, columns, newest=newest, schema=schema
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for bucket, part in zip(snapshots, pool.map(read, snapshots), strict=True):
            found += part.rows
            if part.is_cut:
                cut.add(bucket)
    found.sort(key=by_arrival)
    return (found[-limit:] if newest else found[:limit]), cut


def _described(
    source: TopicFolder,
    snapshots: dict[int, Snapshot],
    rows: list[Found],
    cut: set[int],
    columns: list[str],
    places: dict[int, int],
) -> Window:
    asked, starts, ends = {}, {}, {}
    for bucket, snapshot in snapshots.items():
        offsets = [found.offset for found in rows if found.bucket == bucket]
        default = asked[bucket] = max(places.get(bucket, snapshot.end), snapshot.start)
        starts[bucket] = min(offsets, default=default)
        ends[bucket] = max(offsets) + 1 if offsets else default
    schema = source.schema()
    return Window(
        rows=rows,
        fields=schema.names,
        columns=columns,
        asked=asked,
        starts=starts,
        ends=ends,
        has_older=any(starts[b] > s.start for b, s in snapshots.items()),
        has_newer=any(ends[b] < s.end for b, s in snapshots.items()),
        first={b: s.start for b, s in snapshots.items()},
        last={b: s.end for b, s in snapshots.items()},
        schema=schema,
        tags=source.tag_files.names(),
        buckets=list(source.buckets),
        cut=cut,
    )


def _known_columns(chosen: list[str], fields: list[str]) -> list[str]:
    for name in chosen:
        if name not in fields:
            raise InvalidArgument(f"the topic has no field {name!r}; {choices(name, fields)}")
    return chosen


def check_bucket(source: TopicFolder, bucket: int) -> None:
    """Raise if a topic has no such bucket."""
    if bucket not in source.buckets:
        raise NoSuchTopic(
            f"the topic has no bucket {bucket}; its buckets are 0 to {len(source.buckets) - 1}"
        )
