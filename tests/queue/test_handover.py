"""Files that another process hands over to a live queue."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from lance.file import LanceFileWriter
from support.faults import FaultyFileSystem
from support.filesystems import HookedFileSystem
from support.handover import (
    OWNER,
    files_of_handovers,
    hand_over,
    held_process,
    leave_notes,
    send_and_die,
    texts,
    written_notes,
)
from support.spark.topics import content, ids, is_sound, put, reader, stored, unreferenced, writer
from support.threads import in_background
from support.waiting import until_true

from persisting import fs as filesystem
from persisting.bucket import bulk_import, handover_inbox, handover_notes, handover_watch
from persisting.bucket.buffer_bypass import BufferBypass
from persisting.bucket.handover_notes import Note
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.errors import BucketLocked, SchemaError, StorageError
from persisting.lock import BucketLock
from persisting.queue import PersistingBackend
from persisting.table import bulk_write
from persisting.topic import handover
from persisting.topic.live_topics import live_topic
from persisting.topic.routing import bucket_of
from persisting.topic.topic_files import TopicFolder


@pytest.fixture
def patient_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers wait for the check of their files as long as it takes, and give up only after
    the decision; a pause of the whole process counts little."""
    wait_until_ready = handover._HandOver._wait_until_ready

    def patiently(self: Any, notes: Any) -> None:
        seconds, self._seconds = self._seconds, handover.OWNER_SECONDS
        wait_until_ready(self, notes)
        self._seconds = seconds

    monkeypatch.setattr(handover._HandOver, "_wait_until_ready", patiently)
    monkeypatch.setattr(handover, "_LONGEST_STEP", 0.1)


class TestAdoption:
    @pytest.mark.parametrize(("backend", "local_socket"), [("persisting", True), ("lance", False)])
    def test_rows_get_the_offsets_after_those_of_buffered_records(
        self, tmp_path: Path, backend: str, local_socket: bool
    ) -> None:
        with writer(tmp_path, buckets=1, backend=backend, local_socket=local_socket) as queue:
            queue.put_batch(texts(0, 10))
            assert hand_over(tmp_path / "t", texts(10, 5)) == 5
            queue.put_batch(texts(15, 5))
            assert [r["id"] for r in stored(tmp_path)] == list(range(20))
        assert [r["id"] for r in stored(tmp_path)] == list(range(20))
        assert files_of_handovers(tmp_path / "t") == []

    def test_records_in_the_log_are_recovered_after_adopted_rows(self, tmp_path: Path) -> None:
        put(tmp_path, [], buckets=1, enable_wal=True)
        with held_process(tmp_path, OWNER, 100) as owner:
            owner.until(lambda: owner.acknowledged > 100)
            hand_over(tmp_path / "t", texts(0, 10))
            after = owner.acknowledged
            owner.until(lambda: owner.acknowledged > after + 20)
        found = [r["id"] for r in stored(tmp_path)]
        own = [n for n in found if n >= 100]
        assert own == list(range(100, 100 + len(own)))
        assert own[-1] >= after + 20
        start = found.index(0)
        assert found[start : start + 10] == list(range(10))

    def test_waiting_readers_and_groups_wake(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 3))
            for given in ({}, {"group": "g"}, {"local_socket": False}):
                with reader(tmp_path, **given) as waiting:
                    waiting.get(None)
                    first = int(queue.stats()["total_count"])
                    call = in_background(lambda waiting=waiting: waiting.get(5, True, 100))
                    hand_over(tmp_path / "t", texts(first, 2), f"w{first}")
                    call[0].join()
                    assert [r["id"] for r in call[1][0]] == [first, first + 1]

    def test_reader_in_another_process_than_the_owner_follows_logged_and_adopted_rows(
        self, tmp_path: Path
    ) -> None:
        put(tmp_path, [], buckets=1, enable_wal=True)
        with held_process(tmp_path, OWNER, 100), reader(tmp_path) as waiting:
            got = [r["id"] for r in waiting.get(5, True, 100)]
            thread, results = in_background(lambda: hand_over(tmp_path / "t", texts(0, 10)))
            while 9 not in got or got[-1] < 100:
                got += [r["id"] for r in waiting.get(5, True, 100)]
            thread.join()
            assert results == [10]
            found = [r["id"] for r in stored(tmp_path)]
        assert found[: len(got)] == got
        own = [n for n in got if n >= 100]
        assert own == list(range(100, 100 + len(own)))

    def test_owner_finds_notes_without_inotify(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every second, as it does for notes from other machines."""
        monkeypatch.setattr(handover_watch._TopicWatch, "watch", lambda self: None)
        with writer(tmp_path) as queue:
            queue.put_batch(texts(0, 10))
            assert hand_over(tmp_path / "t", texts(10, 10)) == 10

    def test_repeated_write_is_stored_once_and_leaves_no_files(self, tmp_path: Path) -> None:
        with writer(tmp_path) as queue:
            queue.put_batch(texts(0, 10))
            assert [hand_over(tmp_path / "t", texts(10, 10)) for _ in range(3)] == [10, 0, 0]
            assert unreferenced(tmp_path) == []
            queue.put_batch(texts(20, 1))
        assert hand_over(tmp_path / "t", texts(10, 10)) == 0  # the number is in the table
        assert ids(tmp_path) == list(range(21))

    def test_two_concurrent_drivers_store_both_writes(self, tmp_path: Path) -> None:
        with writer(tmp_path) as queue:
            queue.put_batch(texts(0, 10))
            calls = [
                in_background(lambda n=n: hand_over(tmp_path / "t", texts(100 * n, 50), f"w{n}", n))
                for n in range(1, 5)
            ]
            for thread, _ in calls:
                thread.join()
        assert [results for _, results in calls] == [[50]] * 4
        assert ids(tmp_path) == [*range(10), *(100 * n + i for n in range(1, 5) for i in range(50))]
        assert is_sound(tmp_path)
        assert files_of_handovers(tmp_path / "t") == []

    def test_overwrite_replaces_the_rows_of_a_live_queue(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 10))
            assert hand_over(tmp_path / "t", texts(100, 5), overwrite=True) == 5
            queue.put_batch(texts(200, 5))
            assert [r["id"] for r in stored(tmp_path)] == [*range(100, 105), *range(200, 205)]
        assert [r["id"] for r in stored(tmp_path)] == [*range(100, 105), *range(200, 205)]

    def test_overwrite_removes_the_delays_of_the_records_that_it_replaces(
        self, tmp_path: Path
    ) -> None:
        def delayed(queue: Any) -> int:
            return sum(bucket["delayed_count"] for bucket in queue.stats()["buckets"])

        with writer(tmp_path, buckets=1, enable_wal=True) as queue:
            queue.put(texts(0, 3), delay=3600)
            queue.flush()
            assert delayed(queue) == 3
            hand_over(tmp_path / "t", texts(100, 5), overwrite=True)
            assert delayed(queue) == 0
        with writer(tmp_path) as queue:
            queue.put_batch(texts(200, 1))
            assert delayed(queue) == 0

    def test_overwrite_shows_its_rows_and_drops_the_delays_in_one_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a work group that looks in between takes the old records for ones without delay."""
        imported = BufferBypass.imported
        seen: list[tuple[int, int]] = []

        def look_after(bypass: BufferBypass, *args: Any, **kwargs: Any) -> None:
            imported(bypass, *args, **kwargs)
            topic = live_topic(tmp_path / "t")
            backend: Any = topic and topic.open_backend(0)
            seen.append((backend.bucket.counts[0], len(backend.bucket.delays.all())))

        monkeypatch.setattr(BufferBypass, "imported", look_after)
        with writer(tmp_path, buckets=1, enable_wal=True) as queue:
            queue.put(texts(0, 3), delay=3600)
            hand_over(tmp_path / "t", texts(100, 5), overwrite=True)
        assert seen == [(5, 0)]

    def test_puts_and_maintenance_continue_beside_hand_overs(self, tmp_path: Path) -> None:
        topic = tmp_path / "t"
        with writer(tmp_path, buckets=2, enable_wal=True, flush_threshold=20) as queue:
            queue.put_batch(texts(0, 10))
            calls = [
                in_background(lambda: [hand_over(topic, texts(1000 + 20 * n, 20), f"w{n}")
                                       for n in range(3)]),
                in_background(lambda: [queue.put_batch(texts(10 + 5 * n, 5)) for n in range(30)]),
                in_background(lambda: [queue.compact() for _ in range(3)]),
            ]  # fmt: skip
            for thread, results in calls:
                thread.join()
                assert not isinstance(results[0], Exception)
            queue.retain(rows=100)
            queue.tag("kept")
            hand_over(topic, texts(2000, 20), "last")
        numbers = ids(tmp_path)
        assert numbers == sorted(set(numbers))
        assert set(range(2000, 2020)) <= set(numbers)
        assert is_sound(tmp_path)


class TestSchema:
    def test_field_that_was_widened_since_the_files_were_written_loses_no_value(
        self, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put({"id": 0, "n": 1, "new": None})

            def widen() -> None:
                queue.put({"id": 1, "n": 0.5, "new": "text"})
                queue.flush()

            records = [{"id": i, "n": i} for i in range(2, 10)]
            assert hand_over(tmp_path / "t", records, meanwhile=widen) == 8
            found = {r["id"]: (r["n"], r["new"]) for r in stored(tmp_path)}
            assert found == {0: (1.0, None), 1: (0.5, "text")} | {
                i: (float(i), None) for i in range(2, 10)
            }
            assert unreferenced(tmp_path) == []
        assert is_sound(tmp_path)

    def test_topic_restored_since_the_files_were_written_gets_the_rows(
        self, tmp_path: Path
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put({"id": 0})
            queue.flush()
            queue.tag("first")
            queue.put({"id": 1, "n": 1})
            hand_over(
                tmp_path / "t",
                [{"id": 2, "n": 5}],
                meanwhile=lambda: queue.restore("first"),
            )
            assert [(r["id"], r["n"]) for r in stored(tmp_path)] == [(0, None), (2, 5)]

    def test_field_that_does_not_fit_is_refused_and_named(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put({"id": 0, "n": "text"})
            config = TopicFolder.open(tmp_path / "t").config
            schema = pa.schema({"id": pa.int64(), "n": pa.list_(pa.int64())})
            with pytest.raises(SchemaError, match="'n'"):
                handover.prepare(tmp_path / "t", config, schema)
            queue.put({"id": 1, "n": "more"})
        assert [r["n"] for r in stored(tmp_path)] == ["text", "more"]


class TestFailures:
    def test_missing_file_is_refused_and_no_bucket_gets_rows(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=2) as queue:
            queue.put_batch(texts(0, 10))

            def remove() -> None:
                next((tmp_path / "t" / "bucket_1").glob("data.lance/data/handed-*")).unlink()

            with pytest.raises(StorageError, match="was removed before it was committed"):
                hand_over(tmp_path / "t", texts(10, 10), meanwhile=remove)
            assert ids(tmp_path) == list(range(10))
            queue.put_batch(texts(10, 1))
        assert files_of_handovers(tmp_path / "t") == []

    def test_stopped_owner_is_named_after_the_timeout_and_stores_nothing_later(
        self, tmp_path: Path
    ) -> None:
        put(tmp_path, [], buckets=1, enable_wal=True)
        topic = tmp_path / "t"
        with held_process(tmp_path, OWNER, 100) as owner:
            owner.until(lambda: owner.acknowledged > 100)
            with pytest.raises(BucketLocked, match=r"process \d+ .*did not check the files within"):
                hand_over(topic, texts(0, 10), seconds=0.5, meanwhile=owner.stop)
            owner.process.send_signal(18)  # SIGCONT
            before = owner.acknowledged
            owner.until(lambda: owner.acknowledged > before + 50)
            owner.until(lambda: files_of_handovers(topic) == [])
            assert hand_over(topic, texts(0, 10)) == 10
        assert [i for i in ids(tmp_path) if i < 100] == list(range(10))

    def test_driver_that_waits_names_the_owner_and_what_it_waits_for(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(handover, "_REPORT_SECONDS", 0.1)
        put(tmp_path, [], buckets=1, enable_wal=True)
        with held_process(tmp_path, OWNER, 100) as owner:
            owner.until(lambda: owner.acknowledged > 100)
            thread, results = in_background(
                lambda: hand_over(tmp_path / "t", texts(0, 10), meanwhile=owner.stop)
            )
            until_true(lambda: "to check the files" in caplog.text or results)
            owner.process.send_signal(18)  # SIGCONT
            thread.join()
        assert results == [10]
        said = next(message for message in caplog.messages if "to check the files" in message)
        assert said.startswith(f"waiting for process {owner.process.pid} ")
        assert said.endswith("(bucket 0 of topic 't'; 0 of 1 buckets have answered)")

    def test_owner_of_an_older_version_is_named_and_nothing_is_stored(self, tmp_path: Path) -> None:
        """It holds the lock, and knows nothing of hand-overs."""
        topic = put(tmp_path, texts(0, 10), buckets=1)
        config, notes = written_notes(topic, texts(10, 5))
        lock = BucketLock(topic / "bucket_0")
        try:
            with pytest.raises(BucketLocked, match=r"did not check .*an older version of persist"):
                handover.adopt(topic, config, notes, 0.5)
            assert files_of_handovers(topic) == []
        finally:
            lock.release(clean=True)
        assert ids(tmp_path) == list(range(10))
        assert handover.adopt(topic, config, notes) == {0: 5}

    @pytest.mark.usefixtures("patient_driver")
    def test_owner_that_hangs_after_the_decision_stores_the_rows_when_it_continues(
        self, tmp_path: Path
    ) -> None:
        put(tmp_path, [], buckets=1, enable_wal=True)
        topic = tmp_path / "t"
        with held_process(tmp_path, OWNER, 100, hold="owner-commits") as owner:
            owner.until(lambda: owner.acknowledged > 100)
            with pytest.raises(StorageError, match="do not write the rows again, except with the"):
                hand_over(topic, texts(0, 10), seconds=2)
            assert [i for i in ids(tmp_path) if i < 100] == []
            owner.let_go("owner-commits")
            owner.until(lambda: files_of_handovers(topic) == [])
            assert [i for i in ids(tmp_path) if i < 100] == list(range(10))
            assert hand_over(topic, texts(0, 10)) == 0

    def test_failed_commit_of_the_owner_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failures = iter([OSError("the disk is full"), OSError("the disk is full")])
        commit = bulk_write.commit_files

        def fail(*args: Any, **kwargs: Any) -> None:
            for failure in failures:
                raise failure
            commit(*args, **kwargs)

        monkeypatch.setattr(bulk_import.bulk_write, "commit_files", fail)
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 3))
            call = in_background(lambda: hand_over(tmp_path / "t", texts(3, 3)))
            call[0].join()
            assert call[1] == [3]
            queue.put_batch(texts(6, 3))
        assert ids(tmp_path) == list(range(9))

    @pytest.mark.usefixtures("patient_driver")
    def test_failed_commit_is_not_remembered_as_stored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a later flush would store the number of a write without its rows."""
        topic = put(tmp_path, texts(0, 3), buckets=1)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch, writer(tmp_path) as queue:
            queue.put_batch(texts(3, 1))
            patch.setattr(bulk_import.bulk_write, "commit_files", fail)
            with pytest.raises(StorageError, match="the disk is full"):
                hand_over(topic, texts(10, 3), seconds=1.5)
            queue.put_batch(texts(4, 1))
            queue.flush()
        assert hand_over(topic, texts(10, 3), "w") == 0  # the owner's successor has adopted it
        assert ids(tmp_path) == [*range(5), *range(10, 13)]

    def test_damaged_note_is_refused_and_harms_nothing(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 3))
            folder = tmp_path / "t" / "bucket_0" / "handover"
            fs = filesystem.current()
            name, lock = handover_notes.hold_lock(tmp_path / "t", fs)
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.note").write_text("{}\n00000000")
            handover_notes.announce(tmp_path / "t", name, fs)
            place = folder.parent
            until_true(lambda: handover_notes.read_answer(place, name, fs) is not None)
            answer = handover_notes.read_answer(place, name, fs)
            assert answer is not None
            assert (answer.state, "damaged" in answer.message) == ("refused", True)
            lock.free()
            (folder / f"{name}.note").unlink()
            until_true(lambda: files_of_handovers(tmp_path / "t") == [])
            queue.put_batch(texts(3, 3))
        assert ids(tmp_path) == list(range(6))

    def test_deleted_topic_ends_the_wait(self, tmp_path: Path) -> None:
        from shutil import rmtree

        put(tmp_path, texts(0, 3), buckets=1)
        with pytest.raises(StorageError):
            hand_over(tmp_path / "t", texts(3, 3), meanwhile=lambda: rmtree(tmp_path / "t"))


def with_fragment(note: Note, **changes: Any) -> Note:
    """Return a note that says something else of its fragment."""
    (fragment,) = note.fragments
    return msgspec.structs.replace(note, fragments=[{**fragment, **changes}])


def with_file(note: Note, **changes: Any) -> Note:
    """Return a note that says something else of its file."""
    (fragment,) = note.fragments
    (file,) = fragment["files"]
    return with_fragment(note, files=[{**file, **changes}])


UNFIT: dict[str, tuple[Callable[[Note], Note], str]] = {
    "more rows than the files have": (
        lambda note: msgspec.structs.replace(with_fragment(note, physical_rows=9), rows=9),
        "has 5 rows, not 9",
    ),
    "another sum of rows": (
        lambda note: msgspec.structs.replace(note, rows=4),
        "do not have the 4 rows",
    ),
    "columns of each other": (
        lambda note: with_file(note, fields=note.fragments[0]["files"][0]["fields"][::-1]),
        "other columns than it has",
    ),
    "a column twice": (
        lambda note: with_file(note, column_indices=[0, 0]),
        "other columns than it has",
    ),
    "a file outside of the table": (
        lambda note: with_file(note, path=f"../data/{note.fragments[0]['files'][0]['path']}"),
        "not the name of a data file",
    ),
    "another length of the file": (lambda note: with_file(note, file_size_bytes=7), "incomplete"),
    "deleted rows": (
        lambda note: with_fragment(note, deletion_file={"read_version": 1, "id": 1}),
        "not one plain data file",
    ),
    "no file": (lambda note: with_fragment(note, files=[]), "not one plain data file"),
}
"""By what a note says wrongly: how, and words of the error."""


class TestNotesThatDoNotFitTheirFiles:
    """Lance commits what it is given, and the table would be damaged."""

    @pytest.mark.parametrize(("change", "words"), UNFIT.values(), ids=UNFIT)
    def test_note_is_refused_and_the_queue_continues(
        self, tmp_path: Path, change: Callable[[Note], Note], words: str
    ) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 10))
            config, notes = written_notes(tmp_path / "t", texts(10, 5))
            with pytest.raises(StorageError, match=rf"{words}.*nothing was (stored|committed)"):
                handover.adopt(tmp_path / "t", config, {0: change(notes[0])})
            queue.put_batch(texts(10, 1))
            assert files_of_handovers(tmp_path / "t") == []
            assert handover.adopt(tmp_path / "t", config, {0: notes[0]}) == {0: 5}
        assert [r["id"] for r in stored(tmp_path)] == [*range(11), *range(10, 15)]
        assert is_sound(tmp_path)

    def test_file_with_a_column_of_another_type_is_refused(self, tmp_path: Path) -> None:
        with writer(tmp_path, buckets=1) as queue:
            queue.put_batch(texts(0, 10))
            config, notes = written_notes(tmp_path / "t", texts(10, 5))
            path = tmp_path / "t" / "bucket_0" / "data.lance" / "data" / "handed-other.lance"
            rows = pa.record_batch({"id": range(5), "text": range(5)})
            with LanceFileWriter(str(path), rows.schema, version="2.2") as file:
                file.write_batch(rows)
            note = with_file(notes[0], path=path.name, file_size_bytes=path.stat().st_size)
            with pytest.raises(StorageError, match="column 'text' of type int64, for which"):
                handover.adopt(tmp_path / "t", config, {0: note})
            queue.put_batch(texts(10, 1))
        assert ids(tmp_path) == list(range(11))
        assert is_sound(tmp_path)

    def test_decided_note_that_cannot_be_stored_does_not_block_the_bucket(
        self, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        _, notes = written_notes(topic, texts(10, 5))
        send_and_die(topic, {0: with_file(notes[0], path="../elsewhere")})
        put(tmp_path, texts(10, 1))
        assert ids(tmp_path) == list(range(11))
        assert files_of_handovers(topic) == []


def fail_commits(monkeypatch: pytest.MonkeyPatch, failing: Callable[[Any], bool]) -> list[Path]:
    """Have commits of files fail for the tables that ``failing`` names; return their list."""
    failed: list[Path] = []
    commit = bulk_write.commit_files

    def fail(table: Any, *args: Any, **kwargs: Any) -> None:
        if failing(table):
            failed.append(table.root)
            raise OSError("the disk is full")
        commit(table, *args, **kwargs)

    monkeypatch.setattr(bulk_import.bulk_write, "commit_files", fail)
    return failed


class UnreadableFolders(HookedFileSystem):
    """Fails to list the folders of hand-overs while ``failing``."""

    failing = False

    def before(self, name: str, *args: Any) -> None:
        if self.failing and name == "list" and args[0].name == handover_notes.FOLDER:
            raise OSError(5, "Input/output error")


class TestNotesOfADeadDriver:
    """Notes that the next owner of a bucket finds."""

    def test_decided_overwrite_is_stored_before_a_new_owner_takes_puts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        leave_notes(topic, texts(100, 5), overwrite=True)
        adopt = bulk_import.adopt

        def slowly(*args: Any, **kwargs: Any) -> int:
            time.sleep(0.3)
            return adopt(*args, **kwargs)

        monkeypatch.setattr(bulk_import, "adopt", slowly)
        with writer(tmp_path) as queue:
            queue.put_batch(texts(200, 5))
            until_true(lambda: files_of_handovers(topic) == [])
        assert ids(tmp_path) == [*range(100, 105), *range(200, 205)]

    def test_overwrite_that_fails_blocks_the_newer_one_and_the_opening(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        notes = [
            written_notes(topic, texts(first, 5), (f"w{first}", 0), overwrite=True)[1]
            for first in (100, 200)
        ]
        older, newer = [send_and_die(topic, some) for some in notes]
        with monkeypatch.context() as patch:
            failures = iter([True])
            fail_commits(patch, lambda table: next(failures, False))
            with pytest.raises(
                StorageError, match=rf"bucket_0 cannot be opened .*{older}\.note.*the disk is full"
            ):
                put(tmp_path, texts(300, 5))
            assert handover_notes.has_note(topic / "bucket_0", newer)
        put(tmp_path, texts(300, 5))
        assert ids(tmp_path) == [*range(200, 205), *range(300, 305)]
        assert files_of_handovers(topic) == []

    def test_live_owner_tries_a_failing_note_at_growing_intervals(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        with writer(tmp_path) as queue:
            queue.put_batch(texts(10, 1))
            queue.flush()
            monkeypatch.setattr(handover_inbox, "_FIRST_PAUSE", 600)
            monkeypatch.setattr(handover, "_LONGEST_STEP", 0.1)
            failed = fail_commits(monkeypatch, lambda table: True)
            leave_notes(topic, texts(100, 5), "older", overwrite=True)
            until_true(lambda: failed)
            with pytest.raises(BucketLocked, match=r"earlier write .*the disk is full\); no"):
                hand_over(topic, texts(150, 5), "refused", seconds=2)
            leave_notes(topic, texts(200, 5), "newer", overwrite=True)
            handover.flush(topic, TopicFolder.open(topic).config)  # is answered, with no new try
            assert len(failed) == 1
            assert ids(tmp_path) == list(range(11))
        monkeypatch.undo()
        put(tmp_path, texts(300, 1))
        assert ids(tmp_path) == [*range(200, 205), 300]
        blocked = handover_inbox._Blocked.after(None, "note", "full")
        pauses = []
        for _ in range(8):
            pauses.append(blocked.pause)
            blocked = handover_inbox._Blocked.after(blocked, "note", "full")
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]

    def test_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
        self, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        with filesystem.use(UnreadableFolders()) as fs:
            assert isinstance(fs, UnreadableFolders)
            leave_notes(topic, texts(10, 5))
            fs.failing = True
            with pytest.raises(StorageError, match=r"cannot list .*: Input/output error"):
                put(tmp_path, texts(15, 5))
            fs.failing = False
            put(tmp_path, texts(15, 5))
        assert [record["id"] for record in stored(tmp_path)] == list(range(20))

    def test_sweep_keeps_handed_files_if_the_notes_cannot_be_listed(self, tmp_path: Path) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        with filesystem.use(UnreadableFolders()) as fs, writer(tmp_path) as queue:
            assert isinstance(fs, UnreadableFolders)
            queue.put_batch(texts(10, 1))
            _, notes = written_notes(topic, texts(11, 5))
            for file in notes[0].files:
                long_ago = time.time() - handover_notes.LEFT_SECONDS - 60
                os.utime(topic / "bucket_0" / "data.lance" / "data" / file, (long_ago,) * 2)
            fs.failing = True
            name = send_and_die(topic, notes)
            with pytest.raises(StorageError, match="cannot list"):
                queue.compact()
            fs.failing = False
            until_true(lambda: not handover_notes.has_note(topic / "bucket_0", name))
        assert ids(tmp_path) == list(range(16))

    def test_damaged_note_of_a_dead_driver_is_removed_unless_it_is_decided(
        self, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        for decided in (False, True):
            name = leave_notes(topic, texts(10, 5), decided=decided)
            note = handover_notes.note_path(topic / "bucket_0", name)
            complete = note.read_bytes()
            note.write_bytes(complete[:-1] + b"x")
            if not decided:
                put(tmp_path, [])
                with writer(tmp_path) as queue:
                    queue.put_batch([])
                    queue.compact()
                assert files_of_handovers(topic) == []
        with pytest.raises(StorageError, match=r"damaged.*to give up these rows instead, delete"):
            put(tmp_path, texts(15, 1))
        note.write_bytes(complete)
        put(tmp_path, texts(15, 1))
        assert ids(tmp_path) == list(range(16))

    def test_deleting_a_decided_note_gives_up_the_rows_of_its_bucket_only(
        self, tmp_path: Path
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=2)
        _, notes = written_notes(topic, texts(10, 20))
        name = send_and_die(topic, notes)
        path = handover_notes.note_path(topic / "bucket_0", name)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StorageError, match=rf"{name}.*to give up these rows instead, delete"):
            put(tmp_path, texts(100, 10))
        path.unlink()
        put(tmp_path, texts(100, 10))
        others = [n for n in range(10, 30) if bucket_of(n, 2) == 1]
        assert ids(tmp_path) == [*range(10), *others, *range(100, 110)]
        assert files_of_handovers(topic) == []
        assert hand_over(topic, texts(10, 20)) == 20 - len(others)  # a repeated write completes it
        assert ids(tmp_path) == [*range(30), *range(100, 110)]

    def test_deleting_a_note_that_fails_lets_a_live_owner_store_later_writes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        monkeypatch.setattr(handover_inbox, "_FIRST_PAUSE", 600)
        with writer(tmp_path) as queue:
            queue.put_batch(texts(10, 1))
            queue.flush()
            with monkeypatch.context() as patch:
                failed = fail_commits(patch, lambda table: True)
                name = leave_notes(topic, texts(100, 5), "older", overwrite=True)
                until_true(lambda: failed)
                handover_notes.note_path(topic / "bucket_0", name).unlink()
            assert hand_over(topic, texts(200, 5), "newer") == 5
        assert ids(tmp_path) == [*range(11), *range(200, 205)]
        assert files_of_handovers(topic) == []


class TestSeveralBuckets:
    """Bucket 0 has an owner, bucket 1 has none."""

    @pytest.fixture
    def topic(self, tmp_path: Path) -> Iterator[Path]:
        topic = put(tmp_path, texts(0, 10), buckets=2)
        path = topic / "bucket_0"
        owner = PersistingBackend(0, str(path), schema_path=topic / SCHEMA_FILE)
        yield topic
        owner.close_now()

    def test_missing_file_of_a_bucket_without_an_owner_stores_nothing_anywhere(
        self, topic: Path
    ) -> None:
        def remove() -> None:
            next((topic / "bucket_1").glob("data.lance/data/handed-*")).unlink()

        with pytest.raises(StorageError, match="before it was committed; nothing was stored"):
            hand_over(topic, texts(10, 10), meanwhile=remove)
        assert ids(topic.parent) == list(range(10))

    @pytest.mark.usefixtures("patient_driver")
    def test_bucket_that_cannot_be_owned_after_the_decision_gets_its_rows_later(
        self, topic: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            fail_commits(patch, lambda table: table.root.parent.name == "bucket_1")
            with pytest.raises(
                StorageError, match=r"bucket 1 .*the disk is full.*; 1 buckets have theirs"
            ):
                hand_over(topic, texts(10, 10), seconds=2)
        assert hand_over(topic, texts(10, 10)) == 0
        assert ids(topic.parent) == list(range(20))

    def test_file_lost_after_the_decision_is_reported_with_what_was_stored(
        self, topic: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide = handover.decide

        def remove_and_decide(folder: Path, name: str) -> None:
            next((topic / "bucket_1").glob("data.lance/data/handed-*")).unlink()
            decide(folder, name)

        with monkeypatch.context() as patch:
            patch.setattr(handover, "decide", remove_and_decide)
            with pytest.raises(
                StorageError, match=r"bucket 1 .*cannot store .* 1 of 2 .*the same writeId"
            ):
                hand_over(topic, texts(10, 10))
        assert 0 < hand_over(topic, texts(10, 10)) < 10
        assert ids(topic.parent) == list(range(20))


class TestFiles:
    @pytest.mark.usefixtures("patient_driver")
    def test_failed_commit_leaves_no_files_of_arrival_times(self, tmp_path: Path) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        with filesystem.use(FaultyFileSystem()) as fs, writer(tmp_path) as queue:
            assert isinstance(fs, FaultyFileSystem)
            queue.put_batch(texts(10, 1))
            queue.flush()
            config, notes = written_notes(topic, texts(11, 5))
            fs.fail_always("sync_file")
            with pytest.raises(StorageError, match="do not write the rows again"):
                handover.adopt(topic, config, notes, 1)
            # Each further attempt writes such a file and removes it again.
            until_true(lambda: set(unreferenced(tmp_path)) == notes[0].files)
            fs.heal()
            until_true(lambda: files_of_handovers(topic) == [])
        assert ids(tmp_path) == list(range(16))
        assert unreferenced(tmp_path) == []

    def test_check_of_files_waits_for_a_running_change_of_the_table(self, tmp_path: Path) -> None:
        """Maintenance that removes old files must not do so between the check and its answer."""
        topic = put(tmp_path, texts(0, 10), buckets=1)
        owner = PersistingBackend(0, str(topic / "bucket_0"), schema_path=topic / SCHEMA_FILE)
        with owner.bucket.table_writer.exclusive():
            thread, results = in_background(lambda: bulk_import.check(owner.bucket, [], []))
            thread.join(0.2)
            assert results == []
        thread.join()
        assert results == [None]
        owner.close_now()

    def test_puts_continue_while_an_import_waits_for_a_running_change(self, tmp_path: Path) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        owner = PersistingBackend(0, str(topic / "bucket_0"), schema_path=topic / SCHEMA_FILE)

        def quiesce() -> None:
            with owner.bucket.bypass.quiesced():
                pass

        with owner.bucket.table_writer.exclusive():
            thread, _ = in_background(quiesce)
            thread.join(0.2)
            assert thread.is_alive()
            assert not owner.bucket.puts.is_full
        thread.join()
        owner.close_now()

    def test_old_drafts_are_removed_from_the_folders_of_hand_overs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = put(tmp_path, texts(0, 10), buckets=1)
        monkeypatch.setattr(handover_notes, "LEFT_SECONDS", 0.0)
        for folder in (topic / "handover", topic / "bucket_0" / "handover"):
            folder.mkdir(exist_ok=True)
            (folder / "1.note.0123456789abcdef.tmp").touch()
        put(tmp_path, texts(10, 1))
        assert list(topic.rglob("handover/*")) == []


class TestFlush:
    @pytest.mark.parametrize("local_socket", [True, False])
    def test_flush_writes_everything_acknowledged_to_the_tables(
        self, tmp_path: Path, local_socket: bool
    ) -> None:
        with writer(tmp_path, local_socket=local_socket) as queue:
            queue.put_batch(texts(0, 10))
            topic = TopicFolder.open(tmp_path / "t")
            assert sum(topic.view(b).rows for b in topic.buckets) == 0
            handover.flush(topic.folder, topic.config)
            assert sum(topic.view(b).rows for b in topic.buckets) == 10
            assert files_of_handovers(topic.folder) == []

    def test_flush_of_a_topic_without_an_owner_does_nothing(self, tmp_path: Path) -> None:
        put(tmp_path, texts(0, 10))
        before = content(tmp_path)
        topic = TopicFolder.open(tmp_path / "t")
        handover.flush(topic.folder, topic.config)
        assert content(tmp_path) == before


async def test_repeated_overwrite_without_rows_does_not_remove_later_puts(tmp_path: Path) -> None:
    """An owner that was killed before it answered adopts the note of an anonymous writer again."""
    async with PersistingBackend(0, tmp_path / "bucket_0") as backend:
        await backend.put({"n": -1})
        await backend.flush()
        backend.bucket.bypass.keep_producer("~spark:2")
        for writer_id, left in (("~spark:1", 0), ("~spark:2", 0), ("~spark:2", 1)):
            adopted = bulk_import.adopt, backend.bucket, [], [], writer_id, 1
            await asyncio.to_thread(*adopted, replace=True)
            assert backend.total_count() == left
            if writer_id == "~spark:2":
                await backend.put({"n": 1})
                await backend.flush()
