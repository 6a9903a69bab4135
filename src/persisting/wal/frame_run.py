"""Reads many frames in one step: a log of single puts holds a frame for each record.

The checks are those of :func:`~persisting.wal.frame.decode_frame`, which also explains a failure,
made for all frames together.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from zlib import crc32

import numpy as np

from persisting.wal.frame import (
    FRAME_HEADER_SIZE,
    FRAME_MAGIC,
    MORE,
    Broken,
    Frame,
    decode_frame,
)

_RUN_FRAMES = 4096
"""Frames in a run; more only if an entry has more."""

_LENGTH = struct.Struct(f"<8xI{FRAME_HEADER_SIZE - 12}x")
"""A frame header, of which only the length of the payload is read."""

HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("flags", "<u2"),
        ("length", "<u4"),
        ("raw_length", "<u4"),
        ("sequence", "<u8"),
        ("synced", "<u8"),
        ("arrival", "<i8"),
        ("checksum", "<u4"),
        ("header_checksum", "<u4"),
    ]
)
_COVERED = FRAME_HEADER_SIZE - 4
"""Bytes of a header that its own checksum covers."""


@cache
def _checksum_parts() -> np.ndarray:
    """Return what each value of each covered byte adds to the checksum of a header: CRC-32 is
    linear."""
    zeros = crc32(bytes(_COVERED))
    parts = np.empty((_COVERED, 256), "u4")
    for position in range(_COVERED):
        for value in range(256):
            header = bytearray(_COVERED)
            header[position] = value
            parts[position, value] = crc32(header) ^ zeros
    return parts


class FrameRun(NamedTuple):
    """Frames of complete entries, one after the other in a segment."""

    data: bytes
    """The segment."""
    positions: np.ndarray
    """Where each frame begins."""
    headers: np.ndarray
    """Their headers, of the type :data:`HEADER`."""
    end: int
    """The position after the last complete entry."""
    next_sequence: int
    """The sequence after that entry."""
    broken: Broken | None
    """What follows it, unless that is another run or the end of the segment."""
    missing: int
    """The sequence of the broken frame."""

    def frame(self, index: int) -> Frame:
        """Return a frame as an object."""
        kind, codec, flags, length, raw_length, sequence, synced, arrival = self.headers[
            index
        ].tolist()[1:9]
        start = int(self.positions[index]) + FRAME_HEADER_SIZE
        payload = memoryview(self.data)[start : start + length]
        return Frame(kind, codec, flags, raw_length, sequence, synced, arrival, payload)


def read_run(data: bytes, position: int, salt: int, sequence: int) -> FrameRun:
    """Read and check the frames from ``position`` on, where ``sequence`` is expected."""
    limit, at_end = _RUN_FRAMES, False
    while True:
        positions, end = _follow_lengths(data, position, limit)
        headers = _headers(data, positions)
        whole = _whole_frames(data, positions, headers, salt, sequence)
        at_end = whole < len(positions) or end > len(data) - FRAME_HEADER_SIZE
        complete = np.flatnonzero(headers["flags"][:whole] & MORE == 0)
        if at_end or len(complete):
            break
        limit *= 4  # the entry has more frames
    count = int(complete[-1]) + 1 if len(complete) else 0
    ends = positions + FRAME_HEADER_SIZE + headers["length"]
    entry_end = int(ends[count - 1]) if count else position
    broken = None
    if at_end:
        read = int(ends[whole - 1]) if whole else position
        if read < len(data):
            broken = _reason(data, read, salt, sequence + whole)
        elif count < whole:
            broken = Broken(entry_end, "the last entry is incomplete")
    return FrameRun(
        data,
        positions[:count],
        headers[:count],
        entry_end,
        sequence + count,
        broken,
        sequence + whole,
    )


def _follow_lengths(data: bytes, position: int, limit: int) -> tuple[np.ndarray, int]:
    """Return where frames begin, if the lengths in their headers are right, and where they end."""
    positions: list[int] = []
    add, unpack = positions.append, _LENGTH.unpack_from
    with suppress(struct.error):  # no further header fits
        for _ in range(limit):
            (length,) = unpack(data, position)
            add(position)
            position += FRAME_HEADER_SIZE + length
    return np.array(positions, "int64"), position


def _headers(data: bytes, positions: np.ndarray) -> np.ndarray:
    if not len(positions):
        return np.empty(0, HEADER)
    return bytes_at(np.frombuffer(data, "u1"), positions, FRAME_HEADER_SIZE).view(HEADER)[:, 0]


def bytes_at(content: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """Return ``size`` bytes from each of the positions on, which must all be there."""
    return np.lib.stride_tricks.sliding_window_view(content, size)[positions]


def _whole_frames(
    data: bytes, positions: np.ndarray, headers: np.ndarray, salt: int, sequence: int
) -> int:
    """Return how many of the frames pass all checks, from the first one on."""
    count = len(positions)
    if not count:
        return 0
    ends = positions + FRAME_HEADER_SIZE + headers["length"]
    fields = np.ascontiguousarray(headers.view("u1").reshape(count, FRAME_HEADER_SIZE).T)
    checksums = np.full(count, crc32(bytes(_COVERED), salt), "u4")
    for part, values in zip(_checksum_parts(), fields[:_COVERED], strict=True):
        checksums ^= np.take(part, values)
    is_whole = checksums == headers["header_checksum"]
    is_whole &= headers["magic"] == FRAME_MAGIC
    is_whole &= headers["sequence"] == np.arange(count, dtype="u8") + np.uint64(sequence)
    is_whole &= ends <= len(data)
    count = _leading(is_whole)
    bounds = zip((positions[:count] + FRAME_HEADER_SIZE).tolist(), ends.tolist(), strict=False)
    payloads = np.array([crc32(data[begin:end]) for begin, end in bounds], "u4")
    return _leading(payloads == headers["checksum"][:count])


def _leading(flags: np.ndarray) -> int:
    """Return how many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _reason(data: bytes, position: int, salt: int, sequence: int) -> Broken:
    """Explain why the bytes at ``position`` are not the frame of ``sequence``."""
    try:
        frame, _ = decode_frame(memoryview(data), position, salt)
    except Broken as broken:
        return broken
    return Broken(position, f"sequence {frame.sequence} follows {sequence - 1}")
