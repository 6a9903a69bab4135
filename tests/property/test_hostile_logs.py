"""Logs with valid checksums and invalid contents: a StorageError, in bounded memory."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from persisting.bucket import log_note
from persisting.errors import StorageError, WALError
from persisting.fs import FileSystem
from persisting.queue import PersistingBackend
from persisting.wal import FOLDER, frame, inspection
from persisting.wal.frame import Broken, Frame, SegmentHeader
from persisting.wal.segment import SegmentName

SALT = 0x1234
MOST_BYTES = 256 << 20

KINDS = [frame.SCHEMA, frame.ROWS, frame.MARK, frame.BATCH, frame.RECORDS, frame.START]


def with_sections(sections: list[Any], rows: bytes) -> bytes:
    """Return the payload of a frame with these sections."""
    encoded = msgspec.msgpack.encode(sections)
    return len(encoded).to_bytes(4, "little") + encoded + rows


NUMBERS = st.sampled_from([0, 1, 2, -1, 2**32, 2**63, 2**64 - 1])
SECTIONED = st.builds(
    with_sections,
    st.lists(st.lists(NUMBERS, min_size=3, max_size=6), max_size=3),
    st.lists(
        st.lists(st.none() | st.integers(0, 9) | st.text(max_size=3), max_size=2), max_size=3
    ).map(msgspec.msgpack.encode)
    | st.binary(max_size=20),
)
STARTS = st.tuples(NUMBERS, st.dictionaries(NUMBERS, NUMBERS, max_size=2)).map(
    msgspec.msgpack.encode
)
SCHEMAS = st.sampled_from(
    [
        pa.schema(fields).serialize().to_pybytes()
        for fields in ({}, {"n": pa.int64()}, {"n": pa.float32(), "t": pa.string()})
    ]
)

FRAMES = st.builds(
    Frame,
    kind=st.sampled_from([*KINDS, 0, 9, 255]),
    codec=st.integers(0, 5),
    flags=st.sampled_from([0, frame.MORE, 2, 65535]),
    raw_length=st.sampled_from([0, 1, 8, 100, 2**31 - 1, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 5) | st.just(2**64 - 1),
    synced=st.integers(0, 5) | st.just(2**64 - 1),
    arrival=st.integers(-(2**63), 2**63 - 1),
    payload=st.one_of(
        st.binary(max_size=60),
        st.sampled_from([bytes(9), b"\x90", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"{}" * 9]),
        SECTIONED,
        STARTS,
        SCHEMAS,
    ),
)
WELL_FORMED = st.one_of(
    *(
        st.builds(
            lambda kind, payload: Frame(kind, 0, 0, len(payload), 1, 0, 7, payload),
            st.just(kind),
            payloads,
        )
        for kind, payloads in (
            (frame.SCHEMA, SCHEMAS),
            (frame.START, STARTS),
            (frame.RECORDS, SECTIONED),
            (frame.BATCH, SECTIONED),
        )
    )
)
"""Frames of the right kind and length, whose contents may contradict each other."""
GARBAGE = st.binary(max_size=40)


def segment(frames: list[Frame], *, counted: bool, first: int = 1) -> bytes:
    """Write a segment with whole frames; ``counted`` gives them consecutive sequences."""
    parts = [frame.encode_segment_header(SegmentHeader(first, SALT))]
    for number, one in enumerate(frames, first):
        parts += frame.encode_frame(one._replace(sequence=number) if counted else one, SALT)
    return b"".join(parts)


COUNTED = st.builds(segment, st.lists(FRAMES, min_size=1, max_size=4), counted=st.just(True))
LOGS = st.one_of(
    st.builds(segment, st.lists(FRAMES, min_size=1, max_size=4), counted=st.booleans()),
    st.builds(segment, st.lists(WELL_FORMED, min_size=1, max_size=5), counted=st.just(True)),
)


@given(st.one_of(GARBAGE, LOGS), st.integers(0, 200))
def test_any_bytes_decode_as_a_frame_or_raise(data: bytes, position: int) -> None:
    for decode in (
        lambda: frame.decode_segment_header(memoryview(data)),
        lambda: frame.decode_frame(memoryview(data), position, SALT),
        lambda: list(frame.later_headers(memoryview(data), position, SALT)),
    ):
        with suppress(Broken):
            decode()


@given(COUNTED, GARBAGE, st.integers(0, 4))
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
def test_a_log_that_was_repaired_is_not_damaged(good: bytes, garbage: bytes, after: int) -> None:
    """A segment of another version, copied or renamed is refused as a whole."""
    with tempfile.TemporaryDirectory() as name:
        folder = laid_out(Path(name), [good + garbage])
        try:
            wanted = inspection.repair(folder, after, None)
            done = inspection.repair(folder, after, FileSystem())
        except WALError:
            return
        assert (done.kept_frames, done.cut_bytes) == (wanted.kept_frames, wanted.cut_bytes)
        assert inspection.inspect(folder, after).state != "damaged"


def laid_out(folder: Path, files: list[bytes]) -> Path:
    for number, data in enumerate(files, 1):
        (folder / str(SegmentName(number, SALT))).write_bytes(data)
    return folder


@given(st.lists(st.one_of(GARBAGE, LOGS), min_size=1, max_size=3), st.integers(0, 4))
def test_inspecting_any_log_changes_nothing(files: list[bytes], after: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = laid_out(Path(name), files)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        report = inspection.inspect(folder, after)
        assert report.state in ("empty", "whole", "torn", "damaged")
        with suppress(WALError):  # of another version, copied or renamed: nothing to trim
            inspection.repair(folder, after, None)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def opened(data: bytes) -> None:
    """Open a bucket with this log, and read it."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "bucket_0" / FOLDER
        log.mkdir(parents=True)
        (log / str(SegmentName(1, SALT))).write_bytes(data)

        async def use() -> None:
            backend = PersistingBackend(0, str(log.parent), enable_wal=True, flush_interval=None)
            try:
                await backend.get()
            finally:
                await backend.close()

        with suppress(StorageError):
            asyncio.run(use())


@settings(max_examples=60)
@given(LOGS)
def test_a_bucket_with_any_log_opens_or_raises(data: bytes) -> None:
    opened(data)


def indexed(data: bytes) -> None:
    """Open a bucket whose note names this log of a dead owner, and read it; the log must stay as
    it is unless the bucket opens."""
    with tempfile.TemporaryDirectory() as name:
        bucket = Path(name) / "bucket_0"
        bucket.mkdir()
        log = Path(name) / log_note.LOGS_FOLDER / f"{1:020d}-00000001"
        log.mkdir(parents=True)
        segment_path = log / str(SegmentName(1, SALT))
        segment_path.write_bytes(data)
        log_note.write(bucket, log, 0, FileSystem())

        async def use() -> None:
            backend = PersistingBackend(0, str(bucket), flush_interval=None)
            try:
                await backend.get()
            finally:
                await backend.close()

        try:
            asyncio.run(use())
        except StorageError:
            assert segment_path.read_bytes() == data
            assert (bucket / log_note.FILE).exists()


@settings(max_examples=60)
@given(LOGS)
def test_a_bucket_that_notes_any_log_opens_or_raises(data: bytes) -> None:
    indexed(data)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=3000, derandomize=False)
@given(LOGS)
def test_a_bucket_that_notes_any_log_opens_or_raises_in_many_examples(data: bytes) -> None:
    indexed(data)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=3000, derandomize=False)
@given(LOGS)
def test_a_bucket_with_any_log_opens_or_raises_in_many_examples(data: bytes) -> None:
    opened(data)


@pytest.mark.parametrize("codec", range(1, 5))
@pytest.mark.parametrize("kind", [frame.SCHEMA, frame.ROWS, frame.RECORDS])
def test_frame_with_a_huge_declared_length_allocates_little_memory(kind: int, codec: int) -> None:
    """The frame declares the largest possible length."""
    payload = b"\x28\xb5\x2f\xfd" + bytes(20)
    if kind == frame.RECORDS:
        payload = with_sections([[0, 0, 0, 1]], payload)
    promising = Frame(kind, codec, 0, 2**32 - 1, 1, 0, 0, payload)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        opened(segment([promising], counted=True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
