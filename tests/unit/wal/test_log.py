"""The log in append mode: its content, its size, and its state after a failure."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from support.log_builder import (
    PREAMBLE_END,
    FailingFileSystem,
    QuickFileSystem,
    UnsyncedLog,
    append,
    entry,
    new_log,
    recover,
    segments_in,
    size_of,
    write,
)

from persisting.errors import WALError
from persisting.wal import Payload
from persisting.wal.frame import SEGMENT_HEADER_SIZE


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments_in(folder))


def test_a_log_without_records_has_no_file(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.sync()
    log.seal()
    log.release(10)
    log.close()
    assert segments_in(tmp_path) == []
    assert log.size == 0


def test_appended_entries_are_recovered_in_order(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, entry(b"a"), entry(b"b", b"c"), entry(b"d"))
    append(log, entry(b"e"))
    log.close()
    assert recover(tmp_path)[0] == [b"a", b"b", b"c", b"d", b"e"]


def test_every_frame_including_the_preamble_has_the_next_sequence(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    assert append(log, entry(b"a"), entry(b"b", b"c")) == [2, 4]
    assert append(log, entry(b"d")) == [5]
    log.seal()
    assert append(log, entry(b"e")) == [7]
    assert log.last_sequence == 7


def test_every_segment_begins_with_the_preamble_of_its_first_append(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    preambles = iter([b"first", b"second"])

    def preamble() -> list[Payload]:
        return entry(next(preambles), b"schema")

    log.append([entry(b"a")], preamble, 7)
    log.append([entry(b"b")], preamble, 7)
    log.seal()
    log.append([entry(b"c")], preamble, 7)
    log.close()
    assert recover(tmp_path)[0] == [b"first", b"schema", b"a", b"b", b"second", b"schema", b"c"]


def test_appended_entries_are_in_the_file_before_any_sync(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a", sync=False)
    assert recover(tmp_path)[0] == [b"a"]
    assert log.synced_sequence == 0


def test_a_sync_covers_everything_appended_before_it(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a", sync=False)
    write(log, b"b", sync=False)
    fs.calls.clear()
    log.sync()
    assert log.synced_sequence == log.last_sequence == 3
    assert fs.calls == ["sync", "sync_folder"]
    write(log, b"c", sync=False)
    log.seal()
    fs.calls.clear()
    log.sync()
    assert log.synced_sequence == log.last_sequence == 4
    assert fs.calls == ["sync"]


def test_segment_begins_only_after_the_ones_before_it_are_synced(tmp_path: Path) -> None:
    """Power loss must not take a segment and leave the next one."""
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs, segment_bytes=1)
    write(log, b"a", sync=False)
    fs.calls.clear()
    write(log, b"b", sync=False)
    assert fs.calls == ["sync", "sync_folder", "create", "write", "write"]
    assert log.synced_sequence == 2
    log.close()
    assert recover(tmp_path)[0] == [b"a", b"b"]


def test_failed_sync_before_a_new_segment_keeps_acknowledged_entries(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs, segment_bytes=1)
    write(log, b"a", sync=False)
    fs.fail_on("sync")
    with pytest.raises(WALError, match="cannot sync"):
        write(log, b"b", sync=False)
    log.retract()
    log.close()
    assert recover(tmp_path)[0] == [b"a"]


def test_a_sync_without_new_frames_makes_no_calls(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    fs.calls.clear()
    log.sync()
    assert fs.calls == []


def test_the_folder_entry_of_a_segment_is_synced_once(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a", b"b", b"c")
    assert fs.calls.count("sync_folder") == 1


def test_frames_record_the_last_synced_sequence(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a", b"b")
    write(log, b"c", sync=False)
    append(log, entry(b"d"))
    log.close()
    _, recovery = recover(tmp_path)
    assert [(f.sequence, f.synced) for f in recovery.frames()] == [
        (1, 0),
        (2, 0),
        (3, 2),
        (4, 3),
        (5, 3),
    ]


def test_appends_during_a_sync_succeed_and_are_not_counted_as_synced(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(FailingFileSystem):
        def sync(self, fd: int) -> None:
            started.set()
            assert go_on.wait(10)
            super().sync(fd)

    log = new_log(tmp_path, Slow())
    write(log, b"a", sync=False)
    syncing = threading.Thread(target=log.sync)
    syncing.start()
    assert started.wait(10)
    write(log, b"b", sync=False)
    go_on.set()
    syncing.join()
    assert (log.synced_sequence, log.last_sequence) == (2, 3)


def test_frames_appended_after_a_sync_and_before_the_seal_are_synced_later(
    tmp_path: Path,
) -> None:
    class Meanwhile(QuickFileSystem):
        """Tracks the synced bytes of each file; appends and seals right after the first sync."""

        def __init__(self) -> None:
            self.durable: dict[int, int] = {}

        def sync(self, fd: int) -> None:
            first = not self.durable
            status = os.fstat(fd)
            self.durable[status.st_ino] = status.st_size
            if first:
                write(log, b"b", sync=False)
                log.seal()

    fs = Meanwhile()
    log = new_log(tmp_path, fs)
    write(log, b"a", b"c")
    assert log.synced_sequence == log.last_sequence
    log.close()
    for path in segments_in(tmp_path):
        os.truncate(path, fs.durable.get(path.stat().st_ino, 0))
    assert recover(tmp_path)[0] == [b"a", b"b", b"c"]


def test_release_removes_segments_whose_records_are_all_in_the_table(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a")
    log.seal()
    write(log, b"b")
    log.seal()
    write(log, b"c")
    first, second, third = segments_in(tmp_path)
    log.release(2)
    assert segments_in(tmp_path) == [second, third]
    log.release(3)
    assert segments_in(tmp_path) == [second, third]
    log.release(4)
    assert segments_in(tmp_path) == [third]
    assert recover(tmp_path, after=4)[0] == [b"c"]
    log.release(log.last_sequence)
    assert segments_in(tmp_path) == []
    assert first != third


def test_frames_made_durable_only_by_the_table_are_not_evidence_of_damage(tmp_path: Path) -> None:
    """A flush took a and b; c was appended before its seal and d after it; nothing was synced."""
    log = new_log(tmp_path, kind=UnsyncedLog)
    last = write(log, b"a" * 5000, b"b" * 5000, sync=False)[-1]
    write(log, b"c", sync=False)
    log.seal()
    log.release(last)
    assert log.synced_sequence == last
    write(log, b"d", sync=False)
    log.close()
    first, _ = segments_in(tmp_path)
    data = bytearray(first.read_bytes())
    data[4096:8192] = bytes(4096)  # power loss: a page of the first segment was never written
    first.write_bytes(data)
    assert recover(tmp_path, after=last)[0] == []


def test_a_second_release_of_the_same_sequence_changes_nothing(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a")
    log.seal()
    log.release(2)
    log.release(2)
    assert segments_in(tmp_path) == []
    assert log.size == 0


def test_a_segment_that_cannot_be_removed_is_counted_and_retried(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    log.seal()
    fs.fail_on("remove")
    with pytest.raises(WALError, match="remove"):
        log.release(2)
    assert log.size == on_disk(tmp_path) > 0
    fs.heal()
    log.release(2)
    assert log.size == on_disk(tmp_path) == 0


def test_log_size_equals_the_bytes_on_disk_after_every_step(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    assert log.size == 0
    write(log, b"a" * 100)
    assert log.size == on_disk(tmp_path) == PREAMBLE_END + size_of(b"a" * 100)
    write(log, (b"b" * 10, b"c"))
    assert log.size == on_disk(tmp_path)
    log.seal()
    assert log.size == on_disk(tmp_path)
    write(log, b"d")
    assert log.size == on_disk(tmp_path)
    log.release(5)
    assert log.size == on_disk(tmp_path)
    log.seal()
    log.release(log.last_sequence)
    assert log.size == on_disk(tmp_path) == 0


def test_log_size_equals_the_bytes_on_disk_after_recovery(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a")
    log.seal()
    write(log, b"b")
    log.close()
    _, recovery = recover(tmp_path)
    log = recovery.open_log()
    assert log.size == on_disk(tmp_path)
    write(log, b"c")
    assert log.size == on_disk(tmp_path)
    log.close()


def test_a_recovered_log_continues_in_a_new_segment_with_the_next_sequence(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a")
    log.close()
    before = segments_in(tmp_path)[0].read_bytes()
    _, recovery = recover(tmp_path)
    log = recovery.open_log()
    assert write(log, b"b") == [4]
    log.close()
    assert segments_in(tmp_path)[0].read_bytes() == before
    assert recover(tmp_path)[0] == [b"a", b"b"]


def test_recovered_segments_are_synced_before_the_first_append(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a", sync=False)
    log.seal()
    write(log, b"b", sync=False)
    log.close()
    fs = FailingFileSystem()
    synced: list[str] = []
    fs.fail = lambda name, what: synced.append(Path(what).name) if name == "sync_file" else None
    _, recovery = recover(tmp_path, fs=fs)
    log = recovery.open_log()
    assert synced == [path.name for path in segments_in(tmp_path)]
    assert "sync_folder" in fs.calls
    assert log.synced_sequence == 4


def test_opening_a_log_fails_if_recovered_segments_cannot_be_synced(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write(log, b"a", sync=False)
    log.close()
    fs = FailingFileSystem()
    _, recovery = recover(tmp_path, fs=fs)
    fs.fail_on("sync_file")
    with pytest.raises((OSError, WALError)):
        recovery.open_log()


def test_threads_that_append_and_sync_leave_a_log_without_gaps(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    threads = [
        threading.Thread(target=write, args=(log, *[b"%d-%d" % (n, i) for i in range(30)]))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        log.seal()
    for thread in threads:
        thread.join()
    assert log.synced_sequence == log.last_sequence
    log.close()
    found = recover(tmp_path)[0]
    assert sorted(found) == sorted(b"%d-%d" % (n, i) for n in range(4) for i in range(30))
    for n in range(4):
        mine = [f for f in found if f.startswith(b"%d-" % n)]
        assert mine == [b"%d-%d" % (n, i) for i in range(30)]


# After a failure


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), MemoryError(), ValueError("?")])
def test_a_failed_append_stores_nothing_and_keeps_earlier_entries(
    tmp_path: Path, error: BaseException
) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    fs.fail_on("write", error=error)
    with pytest.raises(WALError, match="cannot write"):
        write(log, b"b")
    log.retract()
    fs.heal()
    with pytest.raises(WALError, match="failed earlier"):
        write(log, b"c")
    log.close()
    assert recover(tmp_path)[0] == [b"a"]


def test_a_write_that_fails_halfway_stores_nothing(tmp_path: Path) -> None:
    class Half(FailingFileSystem):
        def write(self, fd: int, data: bytes | memoryview) -> None:
            if b"torn" in bytes(data):
                super().write(fd, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(fd, data)

    log = new_log(tmp_path, Half())
    write(log, b"a")
    with pytest.raises(WALError, match="No space left"):
        write(log, b"torn" * 100)
    assert log.size == on_disk(tmp_path)
    log.close()
    assert recover(tmp_path)[0] == [b"a"]


@pytest.mark.parametrize("call", ["sync", "sync_folder"])
def test_no_sync_succeeds_after_a_failed_sync(tmp_path: Path, call: str) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a", sync=False)
    fs.fail_on(call)
    with pytest.raises(WALError, match="cannot sync"):
        log.sync()
    fs.heal()
    for _ in range(2):
        with pytest.raises(WALError, match="failed earlier"):
            log.sync()
    assert log.synced_sequence == 0
    assert log.failed is not None


def test_a_failed_sync_of_a_sealed_segment_fails_the_log(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a", sync=False)
    log.seal()
    fs.fail_on("sync")
    with pytest.raises(WALError):
        log.sync()
    assert log.synced_sequence == 0
    with pytest.raises(WALError, match="failed earlier"):
        write(log, b"c")


def test_retract_cuts_off_the_append_whose_sync_failed(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    fs.fail_on("sync")
    with pytest.raises(WALError):
        write(log, b"b")
    log.retract()
    log.close()
    assert recover(tmp_path)[0] == [b"a"]


def test_retract_keeps_earlier_appends(tmp_path: Path) -> None:
    """With a sync interval, the append was acknowledged long before its sync failed."""
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a", sync=False)
    fs.fail_on("sync")
    with pytest.raises(WALError):
        log.sync()
    with pytest.raises(WALError, match="failed earlier"):
        write(log, b"b", sync=False)
    log.retract()
    log.close()
    assert recover(tmp_path)[0] == [b"a"]


def test_log_size_equals_the_bytes_on_disk_after_retract_and_reset(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    fs.fail_on("sync")
    with pytest.raises(WALError):
        write(log, b"b" * 50)
    log.retract()
    assert log.size == on_disk(tmp_path) == PREAMBLE_END + size_of(b"a")
    fs.heal()
    log.reset()
    assert log.size == on_disk(tmp_path) == 0
    write(log, b"c")
    assert log.size == on_disk(tmp_path)


def test_reset_drops_the_log_and_allows_appends_again(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    log = new_log(tmp_path, fs)
    write(log, b"a")
    log.seal()
    write(log, b"b")
    fs.fail_on("write")
    with pytest.raises(WALError):
        write(log, b"c")
    fs.heal()
    log.reset()
    assert segments_in(tmp_path) == []
    assert log.failed is None
    last = log.last_sequence
    assert write(log, b"d") == [last + 2]
    log.close()
    assert recover(tmp_path, after=last)[0] == [b"d"]


def test_a_failed_reset_can_be_retried(tmp_path: Path) -> None:
    for call in ("remove", "sync_folder"):
        folder = tmp_path / call
        folder.mkdir()
        fs = FailingFileSystem()
        log = new_log(folder, fs)
        write(log, b"a")
        fs.fail_on("sync")
        with pytest.raises(WALError):
            write(log, b"b")
        fs.fail_on(call)
        with pytest.raises(WALError):
            log.reset()
        with pytest.raises(WALError, match="failed earlier"):
            write(log, b"c")
        fs.heal()
        log.reset()
        write(log, b"d")
        log.close()
        assert recover(folder, after=3)[0] == [b"d"]


def test_a_segment_whose_header_failed_does_not_block_later_appends(tmp_path: Path) -> None:
    """Its file may remain, if the disk that refused the header also refuses the removal."""
    for calls in (("create",), ("write",), ("write", "remove")):
        folder = tmp_path / "-".join(calls)
        folder.mkdir()
        fs = FailingFileSystem()
        log = new_log(folder, fs)
        fs.fail_on(*calls)
        with pytest.raises(WALError):
            write(log, b"a")
        log.retract()
        fs.heal()
        log.reset()
        write(log, b"b")
        log.close()
        after = log.last_sequence - 2
        assert recover(folder, after=after)[0] == [b"b"]


def test_a_segment_with_a_truncated_header_is_removed(tmp_path: Path) -> None:
    class Half(FailingFileSystem):
        def write(self, fd: int, data: bytes | memoryview) -> None:
            super().write(fd, data[: SEGMENT_HEADER_SIZE // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    log = new_log(tmp_path, Half())
    with pytest.raises(WALError):
        write(log, b"a")
    assert segments_in(tmp_path) == []
    assert log.size == 0


def test_a_log_without_appends_can_be_closed_twice(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.close()
    log.close()
    assert segments_in(tmp_path) == []
