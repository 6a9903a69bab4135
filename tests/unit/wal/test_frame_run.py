"""Frames that are read in runs pass and fail the same checks as frames that are read one by one."""

from __future__ import annotations

import random

import pytest

from persisting.wal import frame_run
from persisting.wal.frame import (
    MORE,
    RECORDS,
    Broken,
    Frame,
    decode_frame,
    encode_frame,
)
from persisting.wal.frame_run import read_run

SALT = 0xC0FFEE11
FIRST = 40


def log_of(flags: list[int]) -> bytes:
    """Return frames with these flags and payloads of different lengths."""
    rng = random.Random(3)
    frames = [
        Frame(RECORDS, 0, flag, 9, FIRST + n, n, 7 - n, rng.randbytes(n % 5 * 20))
        for n, flag in enumerate(flags)
    ]
    return b"".join(part for frame in frames for part in encode_frame(frame, SALT))


def one_by_one(data: bytes) -> tuple[list[Frame], int, str | None, int]:
    """Return the frames of complete entries, where they end, why they end there if it is not the
    end, and the sequence of the frame that is missing."""
    frames: list[Frame] = []
    position = end = complete = 0
    while position < len(data):
        try:
            frame, following = decode_frame(memoryview(data), position, SALT)
            if frame.sequence != FIRST + len(frames):
                raise Broken(
                    position, f"sequence {frame.sequence} follows {FIRST + len(frames) - 1}"
                )
        except Broken as broken:
            return frames[:complete], end, str(broken), FIRST + len(frames)
        frames.append(frame)
        position = following
        if not frame.flags & MORE:
            complete, end = len(frames), position
    reason = f"the last entry is incomplete at byte {end}" if end < position else None
    return frames[:complete], end, reason, FIRST + len(frames)


def in_runs(data: bytes) -> tuple[list[Frame], int, str | None, int]:
    frames: list[Frame] = []
    position, sequence, broken, missing = 0, FIRST, None, FIRST
    while position < len(data) and broken is None:
        run = read_run(data, position, SALT, sequence)
        frames += [run.frame(index) for index in range(len(run.positions))]
        assert run.next_sequence == sequence + len(run.positions)
        position, sequence, broken, missing = run.end, run.next_sequence, run.broken, run.missing
    return frames, position, None if broken is None else str(broken), missing


ENTRIES = [0, 0, MORE, 0, MORE, MORE, MORE, MORE, 0, 0, MORE, 0]


@pytest.fixture(params=[1, 2, 3, 4096])
def run_frames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(frame_run, "_RUN_FRAMES", request.param)
    return int(request.param)


@pytest.mark.parametrize("count", range(len(ENTRIES) + 1))
def test_complete_entries_are_read_in_runs_of_any_length(run_frames: int, count: int) -> None:
    data = log_of(ENTRIES[:count])
    assert in_runs(data) == one_by_one(data)


def test_frames_after_a_cut_are_refused_with_the_same_reason(run_frames: int) -> None:
    data = log_of(ENTRIES)
    for size in range(len(data)):
        assert in_runs(data[:size]) == one_by_one(data[:size]), size


def test_flipped_bit_ends_a_run_with_the_same_reason(run_frames: int) -> None:
    data, rng = log_of(ENTRIES), random.Random(5)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        found = in_runs(bytes(damaged))
        assert found == one_by_one(bytes(damaged)), position
        assert found[2] is not None


def test_frame_of_another_sequence_ends_a_run(run_frames: int) -> None:
    frames = [Frame(RECORDS, 0, 0, 1, sequence, 0, 0, b"x") for sequence in (FIRST, FIRST + 2)]
    data = b"".join(part for frame in frames for part in encode_frame(frame, SALT))
    assert in_runs(data) == one_by_one(data)
    assert in_runs(data)[2] == f"sequence {FIRST + 2} follows {FIRST} at byte 49"


def test_frames_of_another_segment_are_refused() -> None:
    assert read_run(log_of([0, 0]), 0, SALT + 1, FIRST).broken is not None
