"""Inspection changes nothing and judges like opening; repair keeps the entries before damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.damage import flip_bit
from support.log_builder import (
    PREAMBLE_END,
    QuickFileSystem,
    content,
    make_log,
    recover,
    segments_in,
    size_of,
    trimmed,
    write,
)

from persisting.errors import WALError
from persisting.wal import Recovery
from persisting.wal.frame import SEGMENT_HEADER_SIZE
from persisting.wal.inspection import RepairReport, inspect, repair

A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
FRAME = size_of(A)


def rehearsed(folder: Path, after: int = 0) -> RepairReport:
    """Run a repair without changes; return its report."""
    before = content(folder)
    report = repair(folder, after, None)
    assert content(folder) == before
    assert report.copies == []
    return report


def test_inspecting_a_missing_folder_reports_an_empty_log_and_creates_nothing(
    tmp_path: Path,
) -> None:
    report = inspect(tmp_path / "wal", 0)
    assert (report.state, report.segments, report.size) == ("empty", [], 0)
    assert rehearsed(tmp_path / "wal").problem is None
    assert not (tmp_path / "wal").exists()


def test_inspecting_a_whole_log_reports_its_segments_and_pending_frames(tmp_path: Path) -> None:
    paths = make_log(tmp_path, [A, (B, C)], [D])
    before = content(tmp_path)
    report = inspect(tmp_path, 0)
    assert (report.state, report.problem, report.torn_bytes) == ("whole", None, 0)
    assert [one.file for one in report.segments] == [path.name for path in paths]
    assert [(one.first_sequence, one.last_sequence) for one in report.segments] == [(1, 4), (5, 6)]
    assert [one.frames for one in report.segments] == [4, 2]
    assert report.segments[1].synced >= 4
    assert report.segments[0].last_arrival == 7
    assert report.size == sum(path.stat().st_size for path in paths)
    assert [inspect(tmp_path, after).pending_frames for after in (0, 2, 6)] == [6, 4, 0]
    assert content(tmp_path) == before


def test_inspecting_a_log_lists_segments_that_the_table_holds(tmp_path: Path) -> None:
    paths = make_log(tmp_path, [A], [B])
    report = inspect(tmp_path, 4)
    assert (report.state, report.pending_frames) == ("whole", 0)
    assert [one.file for one in report.segments] == [path.name for path in paths]


@pytest.mark.parametrize("kept", range(PREAMBLE_END + 1, PREAMBLE_END + 2 * FRAME + 1, 5))
def test_inspecting_a_truncated_tail_reports_torn_and_not_damaged(
    tmp_path: Path, kept: int
) -> None:
    (path,) = make_log(tmp_path, [A, B])
    path.write_bytes(path.read_bytes()[:kept])
    before = content(tmp_path)
    report = inspect(tmp_path, 0)
    whole = PREAMBLE_END + (kept - PREAMBLE_END) // FRAME * FRAME
    assert report.torn_bytes == (kept - whole if whole > PREAMBLE_END else kept - PREAMBLE_END)
    assert report.state == ("torn" if kept > whole else "whole")
    assert report.problem is None
    assert rehearsed(tmp_path).problem is None
    assert content(tmp_path) == before


@pytest.mark.parametrize("segments", [([A, B, C, D],), ([A, B], [C, D]), ([A, (B, C), D], [A])])
@pytest.mark.parametrize("after", [0, 3])
def test_repair_keeps_exactly_the_entries_before_a_flipped_bit(
    tmp_path: Path, segments: tuple[list[bytes], ...], after: int
) -> None:
    paths = make_log(tmp_path / "good", *segments)
    expected = recover(tmp_path / "good", after=after)[0]
    damages = 0
    for path in paths:
        for position in range(0, path.stat().st_size, 3):
            folder = tmp_path / "wal"
            shutil.copytree(tmp_path / "good", folder)
            flip_bit(folder / path.name, position)
            damages += _checked(folder, path.name, position, after, expected)
            shutil.rmtree(folder)
    assert damages


def _checked(folder: Path, name: str, position: int, after: int, expected: list[bytes]) -> bool:
    """Inspect a log with a flipped bit, repair it if it is damaged; return whether it was."""
    before = content(folder)
    report = inspect(folder, after)
    assert content(folder) == before
    try:
        plan = rehearsed(folder, after)
    except WALError:
        assert report.state == "damaged", "a log with a wrong name or format is not cut"
        return False
    assert (report.state == "damaged") == (plan.problem is not None)
    if plan.problem is None:
        recover(folder, after=after)
        return False
    with pytest.raises(WALError):
        recover(folder, after=after)
    assert content(folder) == before
    done = repair(folder, after, QuickFileSystem())
    assert (done.problem, done.kept_frames, done.cut_bytes, done.lost_sequences) == (
        plan.problem,
        plan.kept_frames,
        plan.cut_bytes,
        plan.lost_sequences,
    )
    assert done.lost_sequences is not None
    assert done.lost_sequences[0] > after, "what the table holds is not lost"
    assert [Path(copy).read_bytes() for copy in done.copies] != []
    assert sum(map(len, trimmed(folder))) == done.cut_bytes
    left = sum(path.stat().st_size for path in segments_in(folder))
    gone = sum(map(len, before.values())) - left - done.cut_bytes
    assert gone in (0, SEGMENT_HEADER_SIZE), "a segment without an entry goes"
    for path in segments_in(folder):
        assert before[path.name].startswith(path.read_bytes())
        if path.name == name:
            assert path.stat().st_size <= position
    found, recovery = recover(folder, after=after)
    assert found == expected[: len(found)]
    assert len(found) < len(expected)
    _goes_on(folder, recovery, found, after)
    return True


def _goes_on(folder: Path, recovery: Recovery, found: list[bytes], after: int) -> None:
    log = recovery.open_log()
    write(log, b"more")
    log.close()
    assert recover(folder, after=after)[0] == [*found, b"more"]


def test_repair_of_a_log_with_a_missing_segment_keeps_the_segments_before_it(
    tmp_path: Path,
) -> None:
    _, second, third = make_log(tmp_path, [A], [B], [C])
    rest = third.read_bytes()
    second.unlink()
    assert inspect(tmp_path, 0).state == "damaged"
    assert rehearsed(tmp_path).cut_bytes == len(rest)
    done = repair(tmp_path, 0, QuickFileSystem())
    assert done.problem is not None
    assert trimmed(tmp_path) == [rest]
    assert recover(tmp_path)[0] == [A]


def test_repair_of_an_undamaged_log_changes_nothing(tmp_path: Path) -> None:
    make_log(tmp_path, [A, B], [C])
    before = content(tmp_path)
    report = repair(tmp_path, 0, QuickFileSystem())
    assert (report.problem, report.kept_frames, report.cut_bytes) == (None, 5, 0)
    assert content(tmp_path) == before
