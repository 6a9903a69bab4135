"""Recovery of arbitrary bytes raises WALError or succeeds; it never fails otherwise."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.log_builder import content, make_log, recover, segments_in, write

from persisting.errors import WALError
from persisting.wal.frame import SEGMENT_HEADER_SIZE, SegmentHeader, encode_segment_header
from persisting.wal.segment import SegmentName

PIECES = st.one_of(
    st.binary(max_size=80),
    st.just(b"PSTf"),
    st.just(b"PSTWAL\r\n"),
    st.integers(0, 64).map(bytes),
)
GARBAGE = st.lists(PIECES, max_size=6).map(b"".join)


def outcome(folder: Path, after: int) -> list[bytes] | None:
    """Return what recovery finds, None for WALError; a second recovery must agree."""
    before = content(folder)
    try:
        found, recovery = recover(folder, after=after)
    except WALError:
        assert content(folder) == before
        return None
    log = recovery.open_log()
    log.close()
    again, _ = recover(folder, after=after)
    assert again == found
    return found


@given(st.lists(GARBAGE, min_size=1, max_size=3), st.integers(0, 5))
def test_recovery_of_garbage_segments_raises_or_finds_an_empty_log(
    files: list[bytes], after: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, data in enumerate(files, 1):
            (folder / str(SegmentName(number, 0x1234))).write_bytes(data)
        assert outcome(folder, after) in (None, [])


@given(GARBAGE, st.integers(0, 3))
def test_recovery_of_garbage_after_a_valid_header_raises_or_finds_an_empty_log(
    data: bytes, after: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        header = SegmentHeader(first_sequence=1, salt=0x1234)
        path = folder / str(SegmentName(1, 0x1234))
        path.write_bytes(encode_segment_header(header) + data)
        assert outcome(folder, after) in (None, [])


@given(
    st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 8), GARBAGE), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
@settings(max_examples=200)
def test_recovery_of_a_log_with_replaced_pieces_raises_or_finds_a_prefix(
    segments: list[list[bytes]],
    damage: list[tuple[int, int, bytes]],
    sync: bool,
    after: int,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_log(folder, *segments, sync=sync)
        whole, _ = recover(folder, after=after)
        for where, length, piece in damage:
            paths = segments_in(folder)
            path = paths[where % len(paths)]
            data = path.read_bytes()
            at = where % (len(data) + 1)
            path.write_bytes(data[:at] + piece + data[at + length :])
        found = outcome(folder, after)
        assert found is None or found == whole[: len(found)]


def test_a_segment_full_of_frame_magic_is_searched_once(tmp_path: Path) -> None:
    """Memory stays near the size of the file, however many positions look like a frame."""
    header = SegmentHeader(first_sequence=1, salt=0x1234)
    path = tmp_path / str(SegmentName(1, 0x1234))
    path.write_bytes(encode_segment_header(header) + b"PSTf" * (1 << 16))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        found, recovery = recover(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == []
    assert recovery.trimmed_bytes == size - SEGMENT_HEADER_SIZE
    assert peak < 8 * size + (1 << 20)


def test_a_log_with_garbage_at_its_end_can_be_appended_to(tmp_path: Path) -> None:
    for number, tail in enumerate((b"x", b"PSTf" * 20, bytes(5000), b"\xff" * 48)):
        folder = tmp_path / str(number)
        (path,) = make_log(folder, [b"a"])
        path.write_bytes(path.read_bytes() + tail)
        log = recover(folder)[1].open_log()
        write(log, b"b")
        log.close()
        assert recover(folder)[0] == [b"a", b"b"]
        shutil.rmtree(folder)
