"""The bytes of the log: segment headers and frames. Pure functions, no files.

The layout is specified in docs/reference/wal-format.md; the constants here are that document's.
All numbers are little-endian, all checksums CRC-32 (the zlib polynomial).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import msgspec

FORMAT_VERSION = 2

SEGMENT_MAGIC = b"PSTWAL\r\n"
FRAME_MAGIC = b"PSTf"

SCHEMA = 1
ROWS = 2
"""Format 1: Arrow rows of one bucket. Recovery still reads it."""
MARK = 3
"""Format 1: a producer sequence. Recovery still reads it."""
BATCH = 4
RECORDS = 5
START = 6

MORE = 1
"""Flag of a frame whose entry continues in the next frame; only complete entries count."""

_SEGMENT = struct.Struct("<8sHHIQ")
_SEGMENT_CRC = struct.Struct("<I")
SEGMENT_HEADER_SIZE = _SEGMENT.size + _SEGMENT_CRC.size

_FRAME = struct.Struct("<4sBBHIIQQqI")
_FRAME_CRC = struct.Struct("<I")
FRAME_HEADER_SIZE = _FRAME.size + _FRAME_CRC.size
_WHOLE_HEADER = struct.Struct(_FRAME.format + "I")
_HEADER_BEGINS = re.compile(re.escape(FRAME_MAGIC) + rb"[\x00-\x0f][\x00-\x0f][\x00-\x0f]\x00")


class Broken(Exception):
    """The bytes at ``position`` are not a complete header or frame."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"{reason} at byte {position}")
        self.position, self.reason = position, reason


@dataclass(frozen=True)
class SegmentHeader:
    """The first bytes of a segment: its first sequence and its salt."""

    first_sequence: int
    salt: int
    """Random, and part of the checksums of frame headers: no record can forge a frame."""
    version: int = FORMAT_VERSION


class SegmentStart(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a ``START`` frame, the first frame of each segment since format 2."""

    previous: int
    """The last sequence of the log before this segment. Sequences may skip numbers here."""
    buckets: dict[int, int]
    """By bucket, the last sequence before this segment that holds records of it."""


def encode_start(start: SegmentStart) -> bytes:
    return msgspec.msgpack.encode(start)


def decode_start(payload: bytes | memoryview, position: int) -> SegmentStart:
    try:
        return msgspec.msgpack.decode(payload, type=SegmentStart)
    except msgspec.DecodeError as exc:
        raise Broken(position, f"the start frame cannot be read ({exc})") from exc


class Frame(NamedTuple):
    """One unit of the log. ``synced`` is the last sequence known durable when it was written."""

    kind: int
    codec: int
    flags: int
    raw_length: int
    sequence: int
    synced: int
    arrival: int
    payload: bytes | memoryview


def encode_segment_header(header: SegmentHeader) -> bytes:
    body = _SEGMENT.pack(
        SEGMENT_MAGIC,
        header.version,
        SEGMENT_HEADER_SIZE,
        header.salt,
        header.first_sequence,
    )
    return body + _SEGMENT_CRC.pack(crc32(body))


def decode_segment_header(data: memoryview) -> SegmentHeader:
    if len(data) < SEGMENT_HEADER_SIZE:
        raise Broken(0, "the segment header is truncated")
    body = data[: _SEGMENT.size]
    if _SEGMENT_CRC.unpack_from(data, _SEGMENT.size)[0] != crc32(body):
        raise Broken(0, "the segment header fails its checksum")
    magic, version, _, salt, first_sequence = _SEGMENT.unpack(body)
    if magic != SEGMENT_MAGIC:
        raise Broken(0, "the file does not begin as a log segment")
    return SegmentHeader(first_sequence, salt, version)


def encode_frame(frame: Frame, salt: int, head: bytes = b"") -> tuple[bytes, bytes | memoryview]:
    """Return header and payload, to be written one after the other.

    ``head`` are bytes of the payload before ``frame.payload``. A payload may be large, so it is
    copied only once, when all frames are joined.
    """
    body = _FRAME.pack(
        FRAME_MAGIC,
        frame.kind,
        frame.codec,
        frame.flags,
        len(head) + len(frame.payload),
        frame.raw_length,
        frame.sequence,
        frame.synced,
        frame.arrival,
        crc32(frame.payload, crc32(head)),
    )
    return body + _FRAME_CRC.pack(crc32(body, salt)) + head, frame.payload


def first_frame_start(data: memoryview, header: SegmentHeader) -> SegmentStart | None:
    """Return the content of a segment's start frame; None in format 1, or if it is broken."""
    if header.version < 2:
        return None
    with suppress(Broken):
        frame, _ = decode_frame(data, SEGMENT_HEADER_SIZE, header.salt)
        if frame.kind == START:
            return decode_start(frame.payload, SEGMENT_HEADER_SIZE)
    return None


def decode_frame(data: memoryview, position: int, salt: int) -> tuple[Frame, int]:
    """Return the frame at ``position`` and the position after it, or raise :class:`Broken`."""
    start = position + FRAME_HEADER_SIZE
    if start > len(data):
        raise Broken(position, "the frame header is truncated")
    magic, kind, codec, flags, length, raw_length, sequence, synced, arrival, checksum, own = (
        _WHOLE_HEADER.unpack_from(data, position)
    )
    if crc32(data[position : position + _FRAME.size], salt) != own:
        raise Broken(position, "the frame header fails its checksum")
    if magic != FRAME_MAGIC:
        raise Broken(position, "no frame begins here")
    end = start + length
    if end > len(data):
        raise Broken(position, "the frame is truncated")
    payload = data[start:end]
    if crc32(payload) != checksum:
        raise Broken(position, "the frame's payload fails its checksum")
    return Frame(kind, codec, flags, raw_length, sequence, synced, arrival, payload), end


def later_headers(data: memoryview, position: int, salt: int) -> Iterator[Frame]:
    """Yield intact frame headers found anywhere from ``position`` on, without their payloads.

    Each candidate costs one small checksum, so the search takes linear time whatever the bytes are.
    """
    for match in _HEADER_BEGINS.finditer(data, position):
        if match.start() + FRAME_HEADER_SIZE <= len(data):
            with suppress(Broken):
                yield _decode_frame_header(data, match.start(), salt)


def _decode_frame_header(data: memoryview, position: int, salt: int) -> Frame:
    body = data[position : position + _FRAME.size]
    if _FRAME_CRC.unpack_from(data, position + _FRAME.size)[0] != crc32(body, salt):
        raise Broken(position, "the frame header fails its checksum")
    magic, kind, codec, flags, _, raw_length, sequence, synced, arrival, _ = _FRAME.unpack(body)
    if magic != FRAME_MAGIC:
        raise Broken(position, "no frame begins here")
    return Frame(kind, codec, flags, raw_length, sequence, synced, arrival, b"")
