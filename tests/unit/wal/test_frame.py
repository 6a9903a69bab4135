"""The bytes of the log: encoding round trips, and broken bytes are detected."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.wal import frame
from persisting.wal.frame import (
    FRAME_HEADER_SIZE,
    MORE,
    ROWS,
    SCHEMA,
    SEGMENT_HEADER_SIZE,
    Broken,
    Frame,
    SegmentHeader,
    decode_frame,
    decode_segment_header,
    encode_segment_header,
    later_headers,
)

SALT = 0xC0FFEE11
HEADER = SegmentHeader(first_sequence=17, salt=SALT)
FRAME = Frame(
    kind=ROWS,
    codec=1,
    flags=MORE,
    raw_length=900,
    sequence=21,
    synced=19,
    arrival=1_700_000_000_000_000,
    payload=b"a payload, packed",
)

frames = st.builds(
    Frame,
    kind=st.integers(0, 15),
    codec=st.integers(0, 15),
    flags=st.integers(0, 15),
    raw_length=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    synced=st.integers(0, 2**64 - 1),
    arrival=st.integers(-(2**63), 2**63 - 1),
    payload=st.binary(max_size=200),
)
salts = st.integers(0, 2**32 - 1)


def encoded(given: Frame, salt: int) -> bytes:
    return b"".join(frame.encode_frame(given, salt))


def read(data: bytes, position: int = 0, salt: int = SALT) -> tuple[Frame, int]:
    frame, end = decode_frame(memoryview(data), position, salt)
    return frame._replace(payload=bytes(frame.payload)), end


def flipped(data: bytes) -> Iterator[bytes]:
    """Yield the data with each of its bits flipped, one at a time."""
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@given(frames, salts, st.binary(max_size=20), st.binary(max_size=20))
def test_a_frame_at_any_position_decodes_to_what_was_encoded(
    given: Frame, salt: int, before: bytes, after: bytes
) -> None:
    data = before + encoded(given, salt) + after
    found, end = read(data, len(before), salt)
    assert found == given
    assert end == len(data) - len(after)


@given(st.integers(0, 2**64 - 1), salts, st.integers(0, 2**16 - 1))
def test_a_segment_header_decodes_to_what_was_encoded(first: int, salt: int, version: int) -> None:
    header = SegmentHeader(first_sequence=first, salt=salt, version=version)
    assert decode_segment_header(memoryview(encode_segment_header(header))) == header


def test_frames_are_encoded_without_gaps() -> None:
    second = FRAME._replace(sequence=22, payload=b"")
    data = encoded(FRAME, SALT) + encoded(second, SALT)
    _, end = read(data)
    assert read(data, end) == (second, len(data))


@pytest.mark.parametrize("payload", [b"", b"x", FRAME.payload])
def test_a_frame_truncated_at_any_byte_is_broken(payload: bytes) -> None:
    data = encoded(FRAME._replace(payload=payload), SALT)
    for length in range(len(data)):
        with pytest.raises(Broken):
            read(data[:length])


def test_a_segment_header_truncated_at_any_byte_is_broken() -> None:
    data = encode_segment_header(HEADER)
    for length in range(len(data)):
        with pytest.raises(Broken):
            decode_segment_header(memoryview(data[:length]))


def test_a_frame_with_any_bit_flipped_is_broken() -> None:
    for broken in flipped(encoded(FRAME, SALT)):
        with pytest.raises(Broken) as raised:
            read(broken)
        assert raised.value.position == 0


def test_a_segment_header_with_any_bit_flipped_is_broken() -> None:
    for broken in flipped(encode_segment_header(HEADER)):
        with pytest.raises(Broken):
            decode_segment_header(memoryview(broken))


def test_zeros_decode_neither_as_a_frame_nor_as_a_header() -> None:
    with pytest.raises(Broken):
        read(bytes(4096))
    with pytest.raises(Broken):
        decode_segment_header(memoryview(bytes(4096)))


def test_a_frame_with_the_salt_of_another_segment_is_broken() -> None:
    with pytest.raises(Broken):
        read(encoded(FRAME, SALT), salt=SALT ^ 1)


def test_a_frame_length_beyond_the_file_is_broken_and_allocates_nothing() -> None:
    body = struct.pack("<4sBBHIIQQqI", b"PSTf", ROWS, 0, 0, 2**32 - 1, 0, 1, 0, 0, 0)
    data = body + struct.pack("<I", zlib.crc32(body, SALT)) + b"short"
    with pytest.raises(Broken, match="truncated"):
        read(data)


@given(st.binary(max_size=300), st.integers(0, 40))
def test_arbitrary_bytes_decode_as_a_frame_or_raise_broken(data: bytes, position: int) -> None:
    with pytest.raises(Broken) as raised:
        read(data, position)
    assert raised.value.position == position


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_as_a_segment_header_or_raise_broken(data: bytes) -> None:
    with pytest.raises(Broken):
        decode_segment_header(memoryview(data))


@given(st.lists(frames, max_size=4), st.binary(max_size=60))
def test_later_headers_finds_frames_after_garbage(given: list[Frame], garbage: bytes) -> None:
    data = garbage + b"".join(encoded(f, SALT) for f in given)
    found = list(later_headers(memoryview(data), 0, SALT))
    assert [(f.sequence, f.synced) for f in found] == [(f.sequence, f.synced) for f in given]


def test_later_headers_finds_frames_between_a_truncated_frame_and_the_end() -> None:
    data = encoded(FRAME, SALT)
    cut = data[: FRAME_HEADER_SIZE + 3]
    assert [f.sequence for f in later_headers(memoryview(cut + data), 0, SALT)] == [21, 21]
    assert [f.sequence for f in later_headers(memoryview(cut + data), 1, SALT)] == [21]


def test_later_headers_ignores_frame_bytes_inside_a_record() -> None:
    forged = Frame(ROWS, 0, 0, 0, 10**9, 10**9, 0, b"")
    outer = FRAME._replace(payload=encoded(forged, SALT ^ 5) * 3)
    found = later_headers(memoryview(encoded(outer, SALT)), 0, SALT)
    assert [f.sequence for f in found] == [FRAME.sequence]


def test_encoded_bytes_match_the_format_document() -> None:
    body = struct.pack("<8sHHIQ", b"PSTWAL\r\n", 2, 28, SALT, 17)
    assert encode_segment_header(HEADER) == body + struct.pack("<I", zlib.crc32(body))
    body = struct.pack(
        "<4sBBHIIQQqI",
        b"PSTf",
        2,
        1,
        1,
        17,
        900,
        21,
        19,
        1_700_000_000_000_000,
        zlib.crc32(FRAME.payload),
    )
    checksum = struct.pack("<I", zlib.crc32(body, SALT))
    assert encoded(FRAME, SALT) == body + checksum + FRAME.payload
    assert (SEGMENT_HEADER_SIZE, FRAME_HEADER_SIZE) == (28, 48)
    assert (SCHEMA, ROWS, frame.MARK, frame.BATCH, frame.RECORDS, frame.START) == (1, 2, 3, 4, 5, 6)
    assert (MORE, frame.FORMAT_VERSION) == (1, 2)
