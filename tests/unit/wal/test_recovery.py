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
    """The WALError that a recovery raises, having changed nothing."""
    before = content(folder)
    with pytest.raises(WALError) as raised:
        recover(folder, after=after)
    assert content(folder) == before
    return str(raised.value)


def hurt(path: Path, position: int) -> None:
    """Turn one bit."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


# Nothing wrong


def test_a_missing_folder_is_an_empty_log(tmp_path: Path) -> None:
    found, recovery = recover(tmp_path / "wal")
    assert found == []
    assert recovery.last_sequence == 0


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    make_log(tmp_path, [A])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "trimmed").mkdir()
    (tmp_path / "trimmed" / "old").write_bytes(b"kept")
    before = content(tmp_path)
    assert recover(tmp_path)[0] == [A]
    assert content(tmp_path) == before


def test_a_whole_log_is_read_without_changing_it(tmp_path: Path) -> None:
    make_log(tmp_path, [A, (B, C)], [D])
    before = content(tmp_path)
    for _ in range(3):
        assert recover(tmp_path)[0] == [A, B, C, D]
    assert content(tmp_path) == before


def test_recovery_says_where_the_log_goes_on(tmp_path: Path) -> None:
    make_log(tmp_path, [A, B], [C])
    _, recovery = recover(tmp_path)
    assert recovery.last_sequence == 5
    assert recovery.trimmed_bytes == 0


def test_what_the_table_holds_is_not_replayed(tmp_path: Path) -> None:
    make_log(tmp_path, [A, B], [C])
    assert recover(tmp_path, after=2)[0] == [B, C]
    assert recover(tmp_path, after=3)[0] == [C]
    assert recover(tmp_path, after=5)[0] == []
    assert recover(tmp_path, after=50)[1].last_sequence == 50


def test_a_log_that_begins_after_what_the_table_holds_is_whole(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A], [B])
    first.unlink()
    assert recover(tmp_path, after=2)[0] == [B]


# Torn


@pytest.mark.parametrize("length", range(PREAMBLE_END, PREAMBLE_END + FRAME))
def test_a_tail_cut_at_any_byte_is_trimmed_to_the_last_whole_frame(
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


def test_a_log_cut_at_every_byte_gives_its_whole_entries(tmp_path: Path) -> None:
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


def test_the_last_frame_with_a_bit_turned_is_trimmed(tmp_path: Path) -> None:
    """Nothing after it says that it had been synced."""
    (path,) = make_log(tmp_path, [A, B])
    hurt(path, START[B] + FRAME_HEADER_SIZE)
    assert recover(tmp_path)[0] == [A]
    assert len(trimmed(tmp_path)) == 1


def test_an_entry_of_several_frames_is_dropped_whole_when_one_is_missing(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, (B, C, D)])
    data = path.read_bytes()
    path.write_bytes(data[:-FRAME])
    assert recover(tmp_path)[0] == [A]
    assert trimmed(tmp_path) == [data[START[B] : -FRAME]]
    assert path.read_bytes() == data[: START[B]]


def test_unsynced_frames_torn_in_the_middle_end_the_log_there(tmp_path: Path) -> None:
    """A later page may have reached the disk before an earlier one."""
    (path,) = make_log(tmp_path, [A, B, C], sync=False)
    hurt(path, START[B] + 3)
    data = path.read_bytes()
    assert recover(tmp_path)[0] == [A]
    assert trimmed(tmp_path) == [data[START[B] :]]


def test_segments_after_an_unsynced_torn_one_are_set_aside(tmp_path: Path) -> None:
    first, second, third = make_log(tmp_path, [A, B], [C], [D], sync=False)
    hurt(first, START[B] + 3)
    tail, later = first.read_bytes()[START[B] :], [second.read_bytes(), third.read_bytes()]
    assert recover(tmp_path)[0] == [A]
    assert segments_in(tmp_path) == [first]
    assert sorted(trimmed(tmp_path)) == sorted([tail, *later])
    assert recover(tmp_path)[0] == [A]


@pytest.mark.parametrize("length", [0, 1, SEGMENT_HEADER_SIZE - 1])
def test_a_last_segment_without_a_whole_header_is_removed(tmp_path: Path, length: int) -> None:
    first, second = make_log(tmp_path, [A], [B])
    second.write_bytes(second.read_bytes()[:length])
    assert recover(tmp_path)[0] == [A]
    assert segments_in(tmp_path) == [first]


def test_an_empty_log_file_is_an_empty_log(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(b"")
    found, recovery = recover(tmp_path)
    assert found == []
    log = recovery.open_log()
    write(log, B)
    log.close()
    assert recover(tmp_path)[0] == [B]


def test_a_file_of_zeros_is_a_torn_segment(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(bytes(4096))
    assert recover(tmp_path)[0] == []
    assert trimmed(tmp_path) == [bytes(4096)]
    assert segments_in(tmp_path) == []


def test_after_a_trim_the_log_goes_on_with_the_sequence_it_lost(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    path.write_bytes(path.read_bytes()[:-1])
    _, recovery = recover(tmp_path)
    log = recovery.open_log()
    write(log, C)
    log.close()
    assert recover(tmp_path)[0] == [A, C]


def test_two_torn_tails_leave_two_copies(tmp_path: Path) -> None:
    for tail in (b"x" * 9, b"y" * 9):
        folder = tmp_path / "wal"
        (path,) = make_log(folder, [A])
        path.write_bytes(path.read_bytes() + tail)
        recover(folder)
        path.unlink()
    assert sorted(trimmed(tmp_path / "wal")) == [b"x" * 9, b"y" * 9]


def test_a_torn_tail_that_holds_something_like_a_frame_is_still_torn(tmp_path: Path) -> None:
    """A record may hold the bytes of a log; they prove nothing."""
    other = tmp_path / "other"
    (source,) = make_log(other, [A, B, C, D])
    folder = tmp_path / "wal"
    (path,) = make_log(folder, [A, source.read_bytes()])
    path.write_bytes(path.read_bytes()[:-1])
    assert recover(folder)[0] == [A]


# Damaged


def test_a_synced_frame_with_any_bit_turned_is_damage_at_its_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (path,) = make_log(source, [A, B, C])
    data = path.read_bytes()
    for position in range(START[A], START[B]):
        for bit in range(8):
            folder = tmp_path / "wal"
            folder.mkdir()
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (folder / path.name).write_bytes(changed)
            message = damaged(folder)
            assert path.name in message
            assert str(START[A]) in message
            shutil.rmtree(folder)


def test_every_bit_of_a_small_log_turned_loses_nothing_silently(tmp_path: Path) -> None:
    """WALError, or everything before the turned bit, with a copy of the rest."""
    source = tmp_path / "source"
    (path,) = make_log(source, [A, (B, C)])
    data = path.read_bytes()
    for position in range(len(data)):
        for bit in range(8):
            folder = tmp_path / "wal"
            folder.mkdir()
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (folder / path.name).write_bytes(changed)
            try:
                found, _ = recover(folder)
            except WALError:
                assert content(folder) == {path.name: bytes(changed)}
            else:
                assert position >= START[B], "what the next entry says was synced is damage"
                assert found == [A]
                assert trimmed(folder) == [bytes(changed[START[B] :])]
            shutil.rmtree(folder)


def test_a_header_that_is_hurt_under_synced_frames_is_damage(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    hurt(path, 20)
    assert path.name in damaged(tmp_path)


def test_damage_in_an_earlier_segment_is_proved_by_a_later_one(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    hurt(first, START[B] + FRAME_HEADER_SIZE)
    message = damaged(tmp_path)
    assert first.name in message
    assert str(START[B]) in message


def test_an_empty_segment_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    _, second, _ = make_log(tmp_path, [A], [B], [C])
    second.write_bytes(b"")
    assert second.name in damaged(tmp_path)


def test_a_cut_segment_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    first.write_bytes(first.read_bytes()[:-1])
    message = damaged(tmp_path)
    assert first.name in message
    assert str(START[B]) in message


def test_a_segment_cut_between_two_frames_before_a_synced_one_is_damage(tmp_path: Path) -> None:
    first, _ = make_log(tmp_path, [A, B], [C])
    first.write_bytes(first.read_bytes()[:-FRAME])
    assert "missing" in damaged(tmp_path)


def test_a_frame_missing_in_the_middle_is_damage_at_the_hole(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B, C])
    data = path.read_bytes()
    path.write_bytes(data[: START[B]] + data[START[C] :])
    message = damaged(tmp_path)
    assert path.name in message
    assert str(START[B]) in message


def test_synced_frames_that_changed_places_are_damage(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B, C])
    data = path.read_bytes()
    swapped = data[: START[A]] + data[START[B] : START[C]] + data[START[A] : START[B]]
    path.write_bytes(swapped + data[START[C] :])
    damaged(tmp_path)


def test_a_frame_written_twice_is_kept_once(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A, B])
    data = path.read_bytes()
    path.write_bytes(data + data[START[B] :])
    assert recover(tmp_path)[0] == [A, B]
    assert trimmed(tmp_path) == [data[START[B] :]]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_damage_that_names_where(tmp_path: Path, missing: int) -> None:
    paths = make_log(tmp_path, [A], [B], [C])
    paths[missing].unlink()
    message = damaged(tmp_path)
    assert paths[missing + 1].name in message
    assert "missing" in message


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_that_was_never_synced_ends_the_log_there(
    tmp_path: Path, missing: int
) -> None:
    """Its name was lost with the power; nothing says that it had been durable."""
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


def test_a_newer_format_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    data = path.read_bytes()
    header = decode_segment_header(memoryview(data))
    newer = SegmentHeader(first_sequence=header.first_sequence, salt=header.salt, version=2)
    path.write_bytes(encode_segment_header(newer) + data[SEGMENT_HEADER_SIZE:])
    message = damaged(tmp_path)
    assert path.name in message
    assert "format 2" in message
    assert "upgrade" in message


# Segments without records


def begin_segment(folder: Path, sequence: int) -> Path:
    """What a process leaves that dies after the header and before the first frame."""
    segment = Segment(folder, FileSystem(), new_name(sequence))
    segment.close()
    return segment.path


def test_a_segment_with_only_a_header_gives_way_to_the_next_one(tmp_path: Path) -> None:
    """Both begin at one sequence; which of the names comes first is chance."""
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


def test_a_segment_whose_entries_are_all_torn_gives_way_to_the_next_one(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / str(number)
        (path,) = make_log(folder, [A])
        path.write_bytes(path.read_bytes()[: SEGMENT_HEADER_SIZE + 5])
        log = recover(folder)[1].open_log()
        log.release(0)
        write(log, B)
        log.close()
        assert recover(folder)[0] == [B]


def test_two_segments_that_begin_at_one_sequence_and_both_hold_frames_are_damage(
    tmp_path: Path,
) -> None:
    make_log(tmp_path, [A])
    make_log(tmp_path / "other", [B])
    shutil.copy(segments_in(tmp_path / "other")[0], tmp_path)
    shutil.rmtree(tmp_path / "other")
    damaged(tmp_path)


# Segments that the table holds already


def test_a_released_segment_that_came_back_torn_stands_in_nobodys_way(tmp_path: Path) -> None:
    """Its removal was lost with the power, and its bytes too: the table holds them."""
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


def test_a_released_segment_that_came_back_does_not_displace_a_newer_one(tmp_path: Path) -> None:
    """Whatever number it has: only sequences decide what the table holds."""
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


# Crashes and faults while recovering


def torn_logs(folder: Path) -> Iterator[tuple[str, Path, list[bytes]]]:
    """(name, log folder, what a recovery must find)."""
    (path,) = make_log(folder / "tail", [A, B])
    path.write_bytes(path.read_bytes()[:-3])
    yield "tail", folder / "tail", [A]
    first, _, _ = make_log(folder / "three", [A, B], [C], [D], sync=False)
    hurt(first, START[B] + 3)
    yield "three", folder / "three", [A]
    first, _ = make_log(folder / "header", [A], [B], sync=False)
    first.write_bytes(b"")
    yield "header", folder / "header", []
    make_log(folder / "whole", [A], [B])
    yield "whole", folder / "whole", [A, B]


def test_a_recovery_that_fails_at_any_call_is_done_by_the_next(tmp_path: Path) -> None:
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


def test_recovering_twice_finds_the_same(tmp_path: Path) -> None:
    for name, folder, expected in torn_logs(tmp_path):
        first = recover(folder)
        after = content(folder)
        second = recover(folder)
        assert first[0] == second[0] == expected, name
        assert content(folder) == after, name
        assert first[1].last_sequence == second[1].last_sequence


def test_a_segment_that_cannot_be_read_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    make_log(tmp_path, [A], [B])
    before = content(tmp_path)
    fs = FailingFileSystem()
    fs.fail_on("read")
    with pytest.raises((OSError, WALError)):
        recover(tmp_path, fs=fs)
    assert content(tmp_path) == before


def test_a_tail_whose_copy_cannot_be_kept_is_not_cut(tmp_path: Path) -> None:
    (path,) = make_log(tmp_path, [A])
    path.write_bytes(path.read_bytes() + b"tail")
    before = path.read_bytes()
    fs = FailingFileSystem()
    fs.fail_on("create")
    with pytest.raises((OSError, WALError)):
        recover(tmp_path, fs=fs)
    assert path.read_bytes() == before


def test_the_log_of_a_killed_writer_is_whole(tmp_path: Path) -> None:
    """Unclosed, unsynced, in the page cache: everything appended is found."""
    log = new_log(tmp_path, FileSystem())
    write(log, *[b"%03d" % i for i in range(50)], sync=False)
    log.seal()
    write(log, b"last", sync=False)
    assert recover(tmp_path)[0] == [*[b"%03d" % i for i in range(50)], b"last"]
    log.close()
