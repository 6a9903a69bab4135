"""Segments begin with a START frame: gaps in the sequences, missing segments, rotation, release."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.log_builder import (
    PREAMBLE_END,
    FailingFileSystem,
    QuickFileSystem,
    UnsyncedLog,
    append,
    content,
    entry,
    make_log,
    new_log,
    recover,
    rows_of,
    segments_in,
    size_of,
    start_of,
    trimmed,
    write,
)

from persisting.errors import WALError
from persisting.wal import Recovery
from persisting.wal.frame import (
    ROWS,
    SEGMENT_HEADER_SIZE,
    START,
    Broken,
    Frame,
    SegmentHeader,
    SegmentStart,
    decode_segment_header,
    decode_start,
    encode_frame,
    encode_segment_header,
    encode_start,
    first_frame_start,
)
from persisting.wal.segment import SegmentName

A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
SALT = 0x1234


def start_in(path: Path) -> SegmentStart | None:
    data = memoryview(path.read_bytes())
    return first_frame_start(data, decode_segment_header(data))


# The frame


@given(st.integers(0, 2**63), st.dictionaries(st.integers(0, 10**6), st.integers(0, 2**63)))
def test_start_payload_decodes_to_what_was_encoded(previous: int, buckets: dict[int, int]) -> None:
    start = SegmentStart(previous, buckets)
    assert decode_start(encode_start(start), 0) == start


@given(st.binary(max_size=40))
def test_arbitrary_bytes_decode_as_a_start_payload_or_raise_broken(data: bytes) -> None:
    with suppress(Broken):
        start = decode_start(data, 7)
        assert isinstance(start.previous, int)
        assert isinstance(start.buckets, dict)


def test_segment_without_a_start_frame_has_no_start() -> None:
    body = b"".join(encode_frame(Frame(ROWS, 0, 0, 1, 1, 0, 7, b"x"), SALT))
    data = memoryview(encode_segment_header(SegmentHeader(1, SALT)) + body)
    assert first_frame_start(data, decode_segment_header(data)) is None
    assert first_frame_start(data[: SEGMENT_HEADER_SIZE + 5], SegmentHeader(1, SALT)) is None


# Gaps


def test_skip_to_begins_a_new_segment_at_that_sequence(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, A)
    log.skip_to(50)
    assert log.last_sequence == 49
    assert write(log, B) == [51]
    log.close()
    first, second = segments_in(tmp_path)
    assert start_in(first) == SegmentStart(0, {0: 0})
    assert start_in(second) == SegmentStart(2, {0: 2})
    assert second.name.startswith(f"{50:020d}-")


def test_entries_on_both_sides_of_a_gap_are_recovered(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, A)
    log.skip_to(50)
    write(log, B)
    log.skip_to(100)
    write(log, C, sync=False)
    log.close()
    found, recovery = recover(tmp_path)
    assert found == [A, B, C]
    assert recovery.last_sequence == 101
    assert recover(tmp_path, after=2)[0] == [B, C]
    assert recover(tmp_path, after=51)[0] == [C]
    assert recover(tmp_path, after=101)[0] == []


def test_skip_to_a_lower_sequence_changes_nothing(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, A)
    log.skip_to(3)
    log.skip_to(1)
    assert write(log, B) == [3]
    assert len(segments_in(tmp_path)) == 1
    log.close()


def test_skipped_sequences_never_count_as_synced(tmp_path: Path) -> None:
    """Frames after a gap would report their own torn segment as damage."""
    log = new_log(tmp_path)
    log.skip_to(10)
    log.sync()
    assert log.synced_sequence == 0
    write(log, A)
    written = log.last_sequence
    assert log.synced_sequence == written
    log.skip_to(50)
    log.sync()
    assert log.synced_sequence == log.last_written == written
    log.close()


def test_torn_unsynced_entry_before_a_gap_ends_the_log_there(tmp_path: Path) -> None:
    log = new_log(tmp_path, kind=UnsyncedLog)
    write(log, A)
    write(log, B, sync=False)
    log.skip_to(50)
    write(log, C, sync=False)
    log.close()
    first, second = segments_in(tmp_path)
    later = second.read_bytes()
    first.write_bytes(first.read_bytes()[:-1])
    assert recover(tmp_path)[0] == [A]
    assert later in trimmed(tmp_path)


def test_torn_synced_entry_before_a_gap_is_damage(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, A, B)
    log.skip_to(50)
    write(log, C)
    log.close()
    first = segments_in(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-1])
    before = content(tmp_path)
    with pytest.raises(WALError, match=first.name):
        recover(tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_segment_before_or_after_a_gap_is_damage(tmp_path: Path, missing: int) -> None:
    log = new_log(tmp_path)
    write(log, A)
    log.skip_to(50)
    write(log, B)
    log.skip_to(100)
    write(log, C)
    log.close()
    segments_in(tmp_path)[missing].unlink()
    before = content(tmp_path)
    with pytest.raises(WALError, match="missing"):
        recover(tmp_path)
    assert content(tmp_path) == before


# The first segment


def shared_log(folder: Path) -> list[Path]:
    """Write three segments: records of bucket 0, of bucket 1, of both."""
    log = new_log(folder)
    for payload, buckets in ((A, {}), (B, {0: 2}), (C, {0: 2, 1: 4})):
        log.append([entry(payload)], lambda b=buckets: [start_of(log.last_written, b)], 7)  # type: ignore[misc]
        log.sync()
        log.seal()
    log.close()
    return segments_in(folder)


def recovered_for(folder: Path, bucket: int | None, after: int) -> list[bytes]:
    recovery = Recovery(folder, QuickFileSystem(), after, bucket)
    return rows_of(recovery.frames(), after)


def test_missing_first_segment_is_damage_for_a_bucket_with_records_in_it(tmp_path: Path) -> None:
    first, second, _ = shared_log(tmp_path)
    first.unlink()
    for bucket in (0, None):
        with pytest.raises(WALError, match=second.name):
            recovered_for(tmp_path, bucket, 0)
    assert recovered_for(tmp_path, 0, 2) == [B, C], "its table holds the records"
    assert recovered_for(tmp_path, 1, 0) == [B, C], "it had no records there"


def test_two_missing_first_segments_are_damage_for_both_buckets(tmp_path: Path) -> None:
    first, second, _ = shared_log(tmp_path)
    first.unlink()
    second.unlink()
    for bucket, after in ((0, 0), (1, 0), (1, 3), (None, 2)):
        with pytest.raises(WALError, match="missing"):
            recovered_for(tmp_path, bucket, after)
    assert recovered_for(tmp_path, 0, 2) == recovered_for(tmp_path, 1, 4) == [C]


def test_segment_of_format_1_after_a_gap_is_damage(tmp_path: Path) -> None:
    """Its sequences have no gaps, and its first frame says nothing of those before it."""
    frame = b"".join(encode_frame(Frame(ROWS, 0, 0, 1, 5, 4, 7, b"x"), SALT))
    header = encode_segment_header(SegmentHeader(5, SALT, version=1))
    (tmp_path / str(SegmentName(5, SALT))).write_bytes(header + frame)
    assert recover(tmp_path, after=4)[0] == [b"x"]
    with pytest.raises(WALError, match="missing"):
        recover(tmp_path, after=3)


# Rotation


def test_full_segment_is_sealed_and_the_next_append_begins_another(tmp_path: Path) -> None:
    log = new_log(tmp_path, segment_bytes=PREAMBLE_END + 2 * size_of(A))
    payloads = [b"%04d" % number for number in range(7)]
    write(log, *payloads, sync=False)
    paths = segments_in(tmp_path)
    assert [path.stat().st_size for path in paths] == [
        *[PREAMBLE_END + 2 * size_of(A)] * 3,
        PREAMBLE_END + size_of(A),
    ]
    assert [start_in(path) for path in paths] == [
        SegmentStart(last, {0: last}) for last in (0, 3, 6, 9)
    ]
    log.sync()
    log.close()
    assert recover(tmp_path)[0] == payloads


def test_entries_of_one_append_are_never_divided_between_segments(tmp_path: Path) -> None:
    log = new_log(tmp_path, segment_bytes=200)
    append(log, *[entry(b"x" * 150, b"y" * 150) for _ in range(5)])
    assert len(segments_in(tmp_path)) == 1
    append(log, entry(A))
    assert len(segments_in(tmp_path)) == 2
    log.close()
    assert len(recover(tmp_path)[0]) == 11


def test_oldest_end_is_the_last_sequence_of_the_oldest_segment(tmp_path: Path) -> None:
    log = new_log(tmp_path, segment_bytes=1)
    write(log, A, B, C)
    assert log.oldest_end == 2
    log.release(2)
    assert log.oldest_end == 4
    log.release(6)
    assert log.oldest_end == log.last_sequence == 6
    log.close()


# Release and reset


class Removals(FailingFileSystem):
    """Notes removals of segments and syncs of their folder, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def before(self, name: str, *args: object) -> None:
        super().before(name, *args)
        if name == "remove":
            self.done.append(Path(str(args[0])).name)
        elif name == "sync_folder":
            self.done.append("sync")


def segments_of(log: object, fs: Removals, folder: Path) -> list[str]:
    """Write three segments; return their names."""
    write(log, A, B, C)  # type: ignore[arg-type]
    fs.done.clear()
    return [path.name for path in segments_in(folder)]


def test_folder_is_synced_between_two_removals(tmp_path: Path) -> None:
    """Otherwise power loss could undo an earlier removal and keep a later one: a gap."""
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    first, second, third = segments_of(log, fs, tmp_path)
    log.release(6)
    assert fs.done == [first, "sync", second, "sync", third]
    log.close()


def test_removals_of_two_releases_have_a_sync_between_them(tmp_path: Path) -> None:
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    first, second, _ = segments_of(log, fs, tmp_path)
    log.release(2)
    assert fs.done == [first], "the last removal needs no sync"
    log.release(4)
    assert fs.done == [first, "sync", second]
    log.close()


def test_removal_synced_by_a_new_segment_is_not_synced_again(tmp_path: Path) -> None:
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    first, second, _ = segments_of(log, fs, tmp_path)
    log.release(2)
    write(log, D)
    assert fs.done == [first, "sync"], "of the new segment's name"
    log.release(4)
    assert fs.done == [first, "sync", second]
    log.close()


def test_second_segment_stays_if_the_first_removal_cannot_be_synced(tmp_path: Path) -> None:
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    _, second, third = segments_of(log, fs, tmp_path)
    fs.fail_on("sync_folder")
    with pytest.raises(WALError, match="remove"):
        log.release(6)
    assert [path.name for path in segments_in(tmp_path)] == [second, third]
    fs.heal()
    log.release(6)
    assert segments_in(tmp_path) == []
    log.close()


def test_reset_removes_the_newest_segment_first(tmp_path: Path) -> None:
    """A crash in between leaves the oldest segments, without a gap."""
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    first, second, third = segments_of(log, fs, tmp_path)
    log.reset()
    assert fs.done == [third, "sync", second, "sync", first, "sync"]
    assert log.size == 0
    write(log, D)
    log.close()
    assert recover(tmp_path, after=6)[0] == [D]


def test_reset_that_fails_halfway_leaves_a_log_without_a_gap(tmp_path: Path) -> None:
    fs = Removals()
    log = new_log(tmp_path, fs, segment_bytes=1)
    first, second, _ = segments_of(log, fs, tmp_path)
    fs.fail_on("sync_folder")
    with pytest.raises(WALError):
        log.reset()
    assert [path.name for path in segments_in(tmp_path)] == [first, second]
    assert recover(tmp_path)[0] == [A, B]
    fs.heal()
    log.reset()
    assert segments_in(tmp_path) == []
    log.close()


def test_preamble_is_not_built_for_an_append_to_an_open_segment(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, A)

    def fail() -> list[object]:
        raise AssertionError("no segment begins here")

    log.append([entry(B)], fail, 7)  # type: ignore[arg-type]
    log.close()
    assert recover(tmp_path)[0] == [A, B]


def test_failed_preamble_stores_nothing(tmp_path: Path) -> None:
    log = new_log(tmp_path)

    def fail() -> list[object]:
        raise MemoryError

    with pytest.raises(WALError, match="nothing of this put was stored"):
        log.append([entry(A)], fail, 7)  # type: ignore[arg-type]
    assert segments_in(tmp_path) == []
    log.reset()
    write(log, B)
    log.close()
    assert recover(tmp_path)[0] == [B]


def test_every_segment_of_a_made_log_begins_with_a_start_frame(tmp_path: Path) -> None:
    for path in make_log(tmp_path, [A], [B]):
        assert start_in(path) is not None
    _, recovery = recover(tmp_path)
    assert [f.kind for f in recovery.frames()] == [START, ROWS, START, ROWS]
