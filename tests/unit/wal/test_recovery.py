"""The log in read mode: each kind of damage has its stated outcome.

Torn above what was synced: trimmed, a copy kept, logged. Broken at or below: WALError that names
file and position, and nothing is changed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.damage import flip_bit
from support.log_builder import (
    PREAMBLE_END,
    FailingFileSystem,
    content,
    make_log,
    new_log,
    recover,
    segments_in,
    size_of,
    trimmed,
    write,
)

from persisting.errors import WALError
from persisting.fs import FileSystem
from persisting.wal.frame import (
    FRAME_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)
from persisting.wal.segment import Segment, new_name

A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
FRAME = size_of(A)
START = {A: PREAMBLE_END, B: PREAMBLE_END + FRAME, C: PREAMBLE_END + 2 * FRAME}


def damaged(folder: Path, after: int = 0) -> str:
    """Return the message of the WALError that recovery raises; it must change nothing."""
    before = content(folder)
    with pytest.raises(WALError) as raised:
        recover(folder, after=after)
    assert content(folder) == before
    return str(raised.value)


# A whole log


def test_recovery_of_a_missing_folder_finds_an_empty_log(tmp_path: Path) -> None:
    found, recovery = recover(tmp_path / "wal")
    assert found == []
    assert recovery.last_sequence == 0


def test_recovery_leaves_other_files_in_the_folder_alone(tmp_path: Path) -> None:
    make_log(tmp_path, [A])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "trimmed").mkdir()
    (tmp_path / "trimmed" / "old").write_bytes(b"kept")
    before = content(tmp_path)
    assert recover(tmp_path)[0] == [A]
    assert content(tmp_path) == before


def test_recovery_of_a_whole_log_changes_nothing(tmp_path: Path) -> None:
    make_log(tmp_path, [A, (B, C)], [D])
    before = content(tmp_path)
    for _ in range(3):
        assert recover(tmp_path)[0] == [A, B, C, D]
    assert content(tmp_path) == before


def test_recovery_reports_the_last_sequence(tmp_path: Path) -> None:
    make_log(tmp_path, [A, B], [C])
    _, recovery = recover(tmp_path)
    assert recovery.last_sequence == 5
    assert recovery.trimmed_bytes == 0


def test_entries_that_the_table_holds_are_not_replayed(tmp_path: Path) -> None:
    make_log(tmp_path, [A, B], [C])
    assert recover(tmp_path, after=2)[0] == [B, C]
    assert recover(tmp_path, after=3)[0] == [C]
    assert recover(tmp_path, after=5)[0] == []
    assert recover(tmp_path, after=50)[1].last_sequence == 50


def test_a_log_that_begins_right_after_the_table_is_whole(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A], [B])
    first.unlink()
    assert recover(tmp_path, after=2)[0] == [B]


# Torn tails


@pytest.mark.parametrize("length", range(PREAMBLE_END, PREAMBLE_END + FRAME))
def test_a_tail_truncated_at_any_byte_is_trimmed_to_the_last_whole_entry(
    tmp_path: Path, length: int
) -> None:
    (path,) = make_log(tmp_path, [A])
    data = path.read_bytes()
    path.write_bytes(data[:length])
    found, recovery = recover(tmp_path)
    assert found == []
    assert recovery.trimmed_bytes == length - PREAMBLE_END
    assert trimmed(tmp_path) == ([data[PREAMBLE_END:length]] if length > PREAMBLE_END else [])
    assert recover(tmp_path)[0] == []


def test_a_log_truncated_at_every_byte_yields_its_whole_entries(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (path,) = make_log(source, [A, (B, C), D])
    data = path.read_bytes()
    ends = {
        PREAMBLE_END + FRAME: [A],
        PREAMBLE_END + 3 * FRAME: [A, B, C],
        PREAMBLE_END + 4 * FRAME: [A, B, C, D],
    }
    expected: list[bytes] = []
    for length in range(len(data) + 1):
        expected = ends.get(length, expected)
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:length])
        assert recover(folder)[0] == expected, length
        assert recover(folder)[0] == expected, length
        kept = b"".join(segment.read_bytes() for segment in segments_in(folder))
        copies = b"".join(trimmed(folder))
        assert kept + copies in (data[:length], data[SEGMENT_HEADER_SIZE:length]), length
        shutil.rmtree(folder)


@pytest.mark.parametrize("garbage", [b"\0" * 300, b"garbage", b"PSTf" * 100])
def test_garbage_after_the_last_frame_is_trimmed_and_kept(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = make_log(tmp_path, [A])
    data = path.read_bytes()
    path.write_bytes(data + garbage)
    with caplog.at_level(logging.WARNING):
        found, recovery = recover(tmp_path)
    assert found == [A]
    assert path.read_bytes() == data
    assert trimmed(tmp_path) == [garbage]
    assert recovery.trimmed_bytes == len(garbage)
    assert path.name in caplog.text
    assert str(len(data)) in caplog.text


def test_a_last_frame_with_a_flipped_bit_is_trimmed(tmp_path: Path) -> None:
    """No frame after it records it as synced."""
    (path,) = make_log(tmp_path, [A, B])
    flip_bit(path, START[B] + FRAME_HEADER_SIZE)
    assert recover(tmp_path)[0] == [A]
    assert len(trimmed(tmp_path)) == 1


def test_an_entry_of_several_frames_is_dropped_if_one_frame_is_missing(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, (B, C, D)])
    data = path.read_bytes()
    path.write_bytes(data[:-FRAME])
    assert recover(tmp_path)[0] == [A]
    assert trimmed(tmp_path) == [data[START[B] : -FRAME]]
    assert path.read_bytes() == data[: START[B]]


def test_unsynced_frames_torn_in_the_middle_end_the_log_there(tmp_path: Path) -> None:
    """A later page may have reached the disk before an earlier one."""
    (path,) = make_log(tmp_path, [A, B, C], sync=False)
    flip_bit(path, START[B] + 3)
    data = path.read_bytes()
    assert recover(tmp_path)[0] == [A]
    assert trimmed(tmp_path) == [data[START[B] :]]


def test_segments_after_an_unsynced_torn_segment_are_trimmed(tmp_path: Path) -> None:
    first, second, third = make_log(tmp_path, [A, B], [C], [D], sync=False)
    flip_bit(first, START[B] + 3)
    tail, later = first.read_bytes()[START[B] :], [second.read_bytes(), third.read_bytes()]
    assert recover(tmp_path)[0] == [A]
    assert segments_in(tmp_path) == [first]
    assert sorted(trimmed(tmp_path)) == sorted([tail, *later])
    assert recover(tmp_path)[0] == [A]


@pytest.mark.parametrize("length", [0, 1, SEGMENT_HEADER_SIZE - 1])
def test_a_last_segment_with_a_truncated_header_is_removed(tmp_path: Path, length: int) -> None:
    first, second = make_log(tmp_path, [A], [B])
    second.write_bytes(second.read_bytes()[:length])
    assert recover(tmp_path)[0] == [A]
    assert segments_in(tmp_path) == [first]


def test_recovery_of_an_empty_segment_file_finds_an_empty_log(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(b"")
    found, recovery = recover(tmp_path)
    assert found == []
    log = recovery.open_log()
    write(log, B)
    log.close()
    assert recover(tmp_path)[0] == [B]


def test_a_segment_file_of_zeros_is_torn(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(bytes(4096))
    assert recover(tmp_path)[0] == []
    assert trimmed(tmp_path) == [bytes(4096)]
    assert segments_in(tmp_path) == []


def test_a_trimmed_log_reuses_the_sequence_it_lost(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    path.write_bytes(path.read_bytes()[:-1])
    _, recovery = recover(tmp_path)
    log = recovery.open_log()
    write(log, C)
    log.close()
    assert recover(tmp_path)[0] == [A, C]


def test_two_trimmed_tails_leave_two_copies(tmp_path: Path) -> None:
    for tail in (b"x" * 9, b"y" * 9):
        folder = tmp_path / "wal"
        (path,) = make_log(folder, [A])
        path.write_bytes(path.read_bytes() + tail)
        recover(folder)
        path.unlink()
    assert sorted(trimmed(tmp_path / "wal")) == [b"x" * 9, b"y" * 9]


def test_frame_bytes_inside_a_torn_record_are_not_evidence_of_damage(tmp_path: Path) -> None:
    """A record may contain the bytes of a log; they are not evidence."""
    other = tmp_path / "other"
    (source,) = make_log(other, [A, B, C, D])
    folder = tmp_path / "wal"
    (path,) = make_log(folder, [A, source.read_bytes()])
    path.write_bytes(path.read_bytes()[:-1])
    assert recover(folder)[0] == [A]


# Damage


def with_flipped_bits(
    path: Path, positions: range, folder: Path
) -> Iterator[tuple[Path, int, bytes]]:
    """Yield a folder with the segment, one bit of it flipped, for every bit at these positions;
    also the position, and the bytes of the segment."""
    data = path.read_bytes()
    for position in positions:
        for bit in range(8):
            folder.mkdir()
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (folder / path.name).write_bytes(changed)
            yield folder, position, bytes(changed)
            shutil.rmtree(folder)


def test_any_flipped_bit_in_a_synced_frame_is_reported_as_damage_at_its_position(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    (path,) = make_log(source, [A, B, C])
    for folder, _, _ in with_flipped_bits(path, range(START[A], START[B]), tmp_path / "wal"):
        message = damaged(folder)
        assert path.name in message
        assert str(START[A]) in message


def test_no_flipped_bit_of_a_small_log_loses_entries_silently(tmp_path: Path) -> None:
    """Recovery raises WALError, or finds everything before the flipped bit and copies the rest."""
    source = tmp_path / "source"
    (path,) = make_log(source, [A, (B, C)])
    everywhere = range(path.stat().st_size)
    for folder, position, changed in with_flipped_bits(path, everywhere, tmp_path / "wal"):
        try:
            found, _ = recover(folder)
        except WALError:
            assert content(folder) == {path.name: changed}
        else:
            assert position >= START[B], "what the next entry says was synced is damage"
            assert found == [A]
            assert trimmed(folder) == [changed[START[B] :]]


def test_a_broken_segment_header_before_synced_frames_is_damage(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    flip_bit(path, 20)
    assert path.name in damaged(tmp_path)


def test_a_later_segment_is_evidence_of_damage_in_an_earlier_one(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    flip_bit(first, START[B] + FRAME_HEADER_SIZE)
    message = damaged(tmp_path)
    assert first.name in message
    assert str(START[B]) in message


def test_an_empty_segment_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    _, second, _ = make_log(tmp_path, [A], [B], [C])
    second.write_bytes(b"")
    assert second.name in damaged(tmp_path)


def test_a_truncated_segment_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    first.write_bytes(first.read_bytes()[:-1])
    message = damaged(tmp_path)
    assert first.name in message
    assert str(START[B]) in message


def test_a_segment_truncated_between_frames_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    first.write_bytes(first.read_bytes()[:-FRAME])
    assert "missing" in damaged(tmp_path)


def test_a_missing_frame_is_reported_as_damage_at_its_position(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B, C])
    data = path.read_bytes()
    path.write_bytes(data[: START[B]] + data[START[C] :])
    message = damaged(tmp_path)
    assert path.name in message
    assert str(START[B]) in message


def test_swapped_synced_frames_are_damage(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B, C])
    data = path.read_bytes()
    swapped = data[: START[A]] + data[START[B] : START[C]] + data[START[A] : START[B]]
    path.write_bytes(swapped + data[START[C] :])
    damaged(tmp_path)


def test_a_frame_written_twice_is_replayed_once(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    data = path.read_bytes()
    path.write_bytes(data + data[START[B] :])
    assert recover(tmp_path)[0] == [A, B]
    assert trimmed(tmp_path) == [data[START[B] :]]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_damage_and_the_error_says_where(tmp_path: Path, missing: int) -> None:
    paths = make_log(tmp_path, [A], [B], [C])
    paths[missing].unlink()
    message = damaged(tmp_path)
    assert paths[missing + 1].name in message
    assert "missing" in message


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_that_was_never_synced_ends_the_log_there(
    tmp_path: Path, missing: int
) -> None:
    """Power loss took its folder entry; no frame records it as durable."""
    paths = make_log(tmp_path, [A], [B], [C], sync=False)
    paths[missing].unlink()
    later = [path.read_bytes() for path in paths[missing + 1 :]]
    expected = [A][:missing]
    assert recover(tmp_path)[0] == expected
    assert sorted(trimmed(tmp_path)) == sorted(later)
    found, recovery = recover(tmp_path)
    assert found == expected
    log = recovery.open_log()
    write(log, D)
    log.close()
    assert recover(tmp_path)[0] == [*expected, D]


def test_a_copied_segment_is_damage(tmp_path: Path) -> None:
    first, second = make_log(tmp_path, [A], [B])
    for name in (second.name.replace("3", "5", 1), f"copy of {first.name}", "1.wal"):
        copy = tmp_path / name
        shutil.copy(first, copy)
        message = damaged(tmp_path)
        assert "copied or renamed" in message
        assert copy.name in message
        copy.unlink()


def test_a_renamed_segment_is_damage(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    for name in (path.name.replace("1", "7", 1), "renamed.wal", f"{7:016d}.wal"):
        renamed = path.rename(tmp_path / name)
        assert renamed.name in damaged(tmp_path)
        renamed.rename(path)


def test_a_segment_of_a_newer_format_is_refused_with_a_hint_to_upgrade(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    data = path.read_bytes()
    header = decode_segment_header(memoryview(data))
    newer = SegmentHeader(first_sequence=header.first_sequence, salt=header.salt, version=3)
    path.write_bytes(encode_segment_header(newer) + data[SEGMENT_HEADER_SIZE:])
    message = damaged(tmp_path)
    assert path.name in message
    assert "format 3" in message
    assert "upgrade" in message


# Segments without records


def begin_segment(folder: Path, sequence: int) -> Path:
    """Write what a process leaves that dies between the header and the first frame."""
    segment = Segment(folder, FileSystem(), new_name(sequence))
    segment.close()
    return segment.path


def test_a_segment_with_only_a_header_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    """Both begin at the same sequence; the order of their names is random."""
    for number in range(24):
        folder = tmp_path / str(number)
        folder.mkdir()
        begin_segment(folder, 1)
        for expected in ([A], [A, A], [A, A, A]):
            log = recover(folder)[1].open_log()
            log.release(0)
            write(log, A)
            log.close()
            begin_segment(folder, log.last_sequence + 1)
            assert recover(folder)[0] == expected


def test_a_segment_with_only_torn_entries_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / str(number)
        (path,) = make_log(folder, [A])
        path.write_bytes(path.read_bytes()[: SEGMENT_HEADER_SIZE + 5])
        log = recover(folder)[1].open_log()
        log.release(0)
        write(log, B)
        log.close()
        assert recover(folder)[0] == [B]


def test_two_segments_with_frames_of_the_same_sequence_are_damage(
    tmp_path: Path,
) -> None:
    make_log(tmp_path, [A])
    make_log(tmp_path / "other", [B])
    shutil.copy(segments_in(tmp_path / "other")[0], tmp_path)
    shutil.rmtree(tmp_path / "other")
    damaged(tmp_path)


# Segments that the table holds already


def test_a_released_segment_that_reappears_torn_is_skipped(tmp_path: Path) -> None:
    """Power loss undid its removal and took its bytes; the table holds its records."""
    for length in (0, 10, PREAMBLE_END + 3, PREAMBLE_END + FRAME + 5):
        folder = tmp_path / str(length)
        first, _ = make_log(folder, [A, B], [C])
        first.write_bytes(first.read_bytes()[:length])
        assert recover(folder, after=3)[0] == [C], length
        recovery = recover(folder, after=3)[1]
        log = recovery.open_log()
        log.release(3)
        write(log, D)
        log.close()
        assert recover(folder, after=3)[0] == [C, D]


def test_a_released_segment_that_reappears_does_not_displace_a_newer_one(tmp_path: Path) -> None:
    """Only sequences decide what the table holds, not the order of segments."""
    old = tmp_path / "old"
    make_log(old, [A], [B], [C])
    stale = segments_in(old)[-1]
    folder = tmp_path / "wal"
    folder.mkdir()
    shutil.copy(stale, folder)
    _, recovery = recover(folder, after=6)
    log = recovery.open_log()
    log.release(6)
    log.close()
    assert segments_in(folder) == []
    found = recover(folder, after=6)[1].open_log()
    write(found, D)
    found.close()
    shutil.copy(stale, folder)
    try:
        rows, recovery = recover(folder, after=6)
    except WALError:
        (folder / stale.name).unlink()
        rows, recovery = recover(folder, after=6)
    assert rows == [D]
    log = recovery.open_log()
    log.release(6)
    log.close()
    assert recover(folder, after=6)[0] == [D]


# Crashes and faults during recovery


def torn_logs(folder: Path) -> Iterator[tuple[str, Path, list[bytes]]]:
    """Yield (name, log folder, entries that recovery must find)."""
    (path,) = make_log(folder / "tail", [A, B])
    path.write_bytes(path.read_bytes()[:-3])
    yield "tail", folder / "tail", [A]
    first, _, _ = make_log(folder / "three", [A, B], [C], [D], sync=False)
    flip_bit(first, START[B] + 3)
    yield "three", folder / "three", [A]
    first, _ = make_log(folder / "header", [A], [B], sync=False)
    first.write_bytes(b"")
    yield "header", folder / "header", []
    make_log(folder / "whole", [A], [B])
    yield "whole", folder / "whole", [A, B]


def test_a_recovery_that_fails_at_any_call_is_completed_by_the_next(tmp_path: Path) -> None:
    for name, source, expected in torn_logs(tmp_path):
        for index in range(100):
            folder = tmp_path / f"{name}-{index}"
            shutil.copytree(source, folder)
            fs = FailingFileSystem()
            fs.fail_at(index)
            try:
                recover(folder, fs=fs)[1].open_log()
                finished = True
            except (WALError, OSError):
                finished = False
            found, recovery = recover(folder)
            assert found == expected, (name, index)
            log = recovery.open_log()
            write(log, b"more")
            log.close()
            assert recover(folder)[0] == [*expected, b"more"], (name, index)
            if finished:
                break
        else:
            raise AssertionError("the recovery never came to its end")


def test_a_second_recovery_finds_the_same_entries(tmp_path: Path) -> None:
    for name, folder, expected in torn_logs(tmp_path):
        first = recover(folder)
        after = content(folder)
        second = recover(folder)
        assert first[0] == second[0] == expected, name
        assert content(folder) == after, name
        assert first[1].last_sequence == second[1].last_sequence


def test_recovery_of_an_unreadable_segment_raises_and_changes_nothing(tmp_path: Path) -> None:
    make_log(tmp_path, [A], [B])
    before = content(tmp_path)
    fs = FailingFileSystem()
    fs.fail_on("read")
    with pytest.raises((OSError, WALError)):
        recover(tmp_path, fs=fs)
    assert content(tmp_path) == before


def test_a_torn_tail_is_not_cut_off_if_its_copy_cannot_be_written(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(path.read_bytes() + b"tail")
    before = path.read_bytes()
    fs = FailingFileSystem()
    fs.fail_on("create")
    with pytest.raises((OSError, WALError)):
        recover(tmp_path, fs=fs)
    assert path.read_bytes() == before


def test_the_log_of_a_killed_writer_is_recovered_whole(tmp_path: Path) -> None:
    """Not closed, not synced, only in the page cache: everything appended is found."""
    log = new_log(tmp_path, FileSystem())
    write(log, *[b"%03d" % i for i in range(50)], sync=False)
    log.seal()
    write(log, b"last", sync=False)
    assert recover(tmp_path)[0] == [*[b"%03d" % i for i in range(50)], b"last"]
    log.close()
