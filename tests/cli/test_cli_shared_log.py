"""Commands show, check and repair the log that the buckets of an owner share."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli_contracts import decoded
from support.cli_runner import Answer
from support.damage import flip_bit
from support.dead_logs import LOGGED, dead_topic, logs_of, numbers_in, segments_of

from persisting.queue import PersistingBackend, write_queue
from persisting.topic.inspect import describe, find, topics_in
from persisting.wal.frame import SEGMENT_HEADER_SIZE

Call = Callable[..., Answer]


def records(first: int, count: int = 10) -> list[dict[str, Any]]:
    return [{"id": str(n), "n": n} for n in range(first, first + count)]


def dead(tmp_path: Path, *puts: Any, **options: Any) -> Path:
    return asyncio.run(dead_topic(tmp_path / "queues", *puts, **options))


def numbers(topic: Path) -> list[int]:
    return asyncio.run(numbers_in(topic))


def asked(call: Call, code: int, command: str, *words: object, storage: Path) -> Any:
    answer = call(*command.split(), "t", *words, "--json", "-s", storage)
    assert (answer.code, "error" in answer.err) == (code, False), answer
    return decoded(command, answer.out)


def test_inspect_shows_what_each_bucket_has_in_the_log_of_a_dead_owner(
    tmp_path: Path, call: Call
) -> None:
    topic = dead(tmp_path, records(0), records(10), flush_after=1, flush_buckets=[1])
    (log,) = asked(call, 0, "wal inspect", storage=topic.parent)
    assert (log.bucket, log.state, log.owned) == (None, "whole", False)
    assert log.owner["pid"] == os.getpid()
    assert log.path == str(logs_of(topic)[0])
    assert [segment.file for segment in log.segments] == [s.name for s in segments_of(topic)]
    first, second = log.buckets
    assert (first.bucket, first.noted, second.bucket, second.noted) == (0, True, 1, True)
    assert first.pending_records == first.end_offset - first.first_offset > 0
    assert (second.pending_records, second.first_offset) == (0, None)
    assert log.pending_frames == first.pending_frames == 1
    assert log.table_sequence == first.table_sequence < second.table_sequence
    assert asked(call, 0, "wal inspect", "--bucket", 0, storage=topic.parent) == [log]
    shown = call("wal", "inspect", "t", "-s", topic.parent).out
    assert f"no (pid {os.getpid()} ended)" in shown
    assert numbers(topic) == list(range(20))
    after = asked(call, 0, "wal inspect", storage=topic.parent)
    assert [(entry.bucket, entry.state) for entry in after] == [(0, "empty"), (1, "empty")]


def test_inspect_names_the_living_owner_of_a_log(tmp_path: Path, call: Call) -> None:
    async def hold() -> None:
        async with await write_queue(
            topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=LOGGED
        ) as writer:
            await writer.put(records(0, 50))
            (log,) = asked(call, 0, "wal inspect", storage=tmp_path)
            assert (log.owned, log.owner["pid"]) == (True, os.getpid())
            assert sum(bucket.pending_records for bucket in log.buckets) == 50
            assert f"pid {os.getpid()}" in call("wal", "inspect", "t", "-s", tmp_path).out

    asyncio.run(hold())


def test_log_bytes_of_the_buckets_add_up_to_the_bytes_on_disk(tmp_path: Path) -> None:
    topic = dead(tmp_path, records(0), records(10), records(20), flush_after=1, buckets=3)
    files = [path for path in topic.rglob("*") if path.is_file()]
    on_disk = sum(path.stat().st_size for path in files if "log" in path.parts)
    (facts,) = topics_in(topic.parent)
    described = describe(find("t", topic.parent))
    assert facts.log_bytes == on_disk > 0
    assert sum(bucket.log_bytes for bucket in described.buckets) == on_disk
    buckets = [p for p in files if any(part.startswith("bucket_") for part in p.parts)]
    assert facts.bytes == described.bytes == on_disk + sum(p.stat().st_size for p in buckets)
    assert [log.state for log in described.logs] == ["whole"] * 3
    assert {log.path for log in described.logs} == {str(logs_of(topic)[0])}


def test_repair_of_a_damaged_log_reports_what_each_bucket_loses(tmp_path: Path, call: Call) -> None:
    topic = dead(tmp_path, records(0), records(10), records(20))
    second = segments_of(topic)[1]
    flip_bit(second, second.stat().st_size - 3)
    (log,) = asked(call, 5, "wal inspect", storage=topic.parent)
    assert (log.state, second.name in log.problem) == ("damaged", True)
    assert sum(bucket.pending_records for bucket in log.buckets) == 10
    report = asked(call, 5, "verify", storage=topic.parent)
    assert [(found.bucket, found.state) for found in report.logs] == [(None, "damaged")]
    (plan,) = asked(call, 0, "wal repair", "--dry-run", storage=topic.parent)
    assert call("head", "t", "-s", topic.parent).code == 5
    (done,) = asked(call, 0, "wal repair", "--yes", storage=topic.parent)
    assert (done.cut_bytes, done.lost) == (plan.cut_bytes, plan.lost)
    assert done.cut_bytes == sum(Path(copy).stat().st_size for copy in done.copies) > 0
    lost = {part.bucket: (part.first_offset, part.last_offset) for part in done.lost}
    kept = numbers(topic)
    assert kept == list(range(10))
    for bucket in describe(find("t", topic.parent)).buckets:
        first, last = lost[bucket.bucket]
        assert first == bucket.end_offset
        assert last is not None
        assert last > first
    assert all(Path(copy).exists() for copy in done.copies)
    assert [path.name for path in (topic / "log").iterdir()] == ["trimmed"]
    assert asked(call, 0, "verify", storage=topic.parent).ok


def test_repair_loses_nothing_if_the_tables_hold_what_is_damaged(
    tmp_path: Path, call: Call
) -> None:
    puts = (records(0), records(10), records(20))
    topic = dead(tmp_path, *puts, flush_after=1, keep_released=True)
    first, second, _ = segments_of(topic)
    flip_bit(first, first.stat().st_size - 3)
    (log,) = asked(call, 5, "wal inspect", storage=topic.parent)
    assert first.name in log.problem
    (done,) = asked(call, 0, "wal repair", "--yes", storage=topic.parent)
    assert (done.lost, done.lost_sequences) == ([], None)
    assert [Path(copy).name.split(".")[0] for copy in done.copies] == [first.stem]
    assert segments_of(topic)[0] == second
    assert numbers(topic) == list(range(30))


def test_missing_log_is_reported_and_given_up_only_with_yes(tmp_path: Path, call: Call) -> None:
    topic = dead(tmp_path, records(0), records(10), flush_after=1)
    shutil.rmtree(logs_of(topic)[0])
    (log,) = asked(call, 5, "wal inspect", storage=topic.parent)
    assert (log.state, log.segments) == ("missing", [])
    assert "buckets 0, 1" in log.problem
    report = asked(call, 5, "verify", storage=topic.parent)
    assert [(found.state, found.buckets) for found in report.logs] == [("missing", [0, 1])]
    assert call("head", "t", "-s", topic.parent).code == 5
    assert call("wal", "repair", "t", "-s", topic.parent).code == 2
    (done,) = asked(call, 0, "wal repair", "--yes", storage=topic.parent)
    assert [part.bucket for part in done.lost] == [0, 1]
    assert [part.last_offset for part in done.lost] == [None, None]
    assert numbers(topic) == list(range(10))
    assert asked(call, 0, "verify", storage=topic.parent).ok


def test_missing_first_segments_cost_only_the_buckets_that_need_them(
    tmp_path: Path, call: Call
) -> None:
    topic = dead(tmp_path, records(0), records(10), records(20), flush_buckets=[1])
    segments_of(topic)[0].unlink()
    (log,) = asked(call, 5, "wal inspect", storage=topic.parent)
    assert "first segments" in log.problem
    (done,) = asked(call, 0, "wal repair", "--yes", storage=topic.parent)
    assert [(part.bucket, part.first_offset) for part in done.lost] == [(0, 0)]
    buckets = describe(find("t", topic.parent)).buckets
    assert next(bucket.rows for bucket in buckets if bucket.bucket == 1) > 0
    assert 0 < len(numbers(topic)) < 30


def test_log_that_was_copied_or_renamed_is_reported_and_not_repaired(
    tmp_path: Path, call: Call
) -> None:
    topic = dead(tmp_path, records(0))
    (segment,) = segments_of(topic)
    shutil.copy(segment, segment.with_name("copy.wal"))
    (log,) = asked(call, 5, "wal inspect", storage=topic.parent)
    assert "copied or renamed" in log.problem
    answer = call("wal", "repair", "t", "--yes", "-s", topic.parent)
    assert (answer.code, "cannot help here" in answer.err) == (5, True)
    segment.with_name("copy.wal").unlink()
    assert numbers(topic) == list(range(10))


def test_repair_is_refused_while_the_owner_of_the_log_is_alive(tmp_path: Path, call: Call) -> None:
    async def hold() -> None:
        async with await write_queue(
            topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=LOGGED
        ) as writer:
            for n in range(5):
                await writer.put({"id": "a", "n": n})
            (segment,) = segments_of(tmp_path / "t")
            flip_bit(segment, segment.stat().st_size * 9 // 10)
            answer = call("wal", "repair", "t", "--yes", "-s", tmp_path)
            assert (answer.code, f"process {os.getpid()}" in answer.err) == (4, True)

    asyncio.run(hold())
    assert numbers(tmp_path / "t") == list(range(5))


def test_verify_lists_a_dead_log_that_no_bucket_needs_and_finds_no_damage(
    tmp_path: Path, call: Call
) -> None:
    topic = dead(tmp_path, records(0))
    kept = logs_of(topic)[0]
    shutil.copytree(kept, tmp_path / "aside")
    assert numbers(topic) == list(range(10))
    assert not kept.exists()
    shutil.copytree(tmp_path / "aside", kept)
    report = asked(call, 0, "verify", storage=topic.parent)
    assert (report.ok, report.logs[0].state, report.logs[0].buckets) == (True, "unused", [])
    assert "no longer needed" in call("verify", "t", "-s", topic.parent).out


@pytest.mark.parametrize("cut", [SEGMENT_HEADER_SIZE - 4, -3])
def test_torn_tail_of_a_shared_log_is_reported_as_torn(
    tmp_path: Path, call: Call, cut: int
) -> None:
    topic = dead(tmp_path, records(0), records(10))
    last = segments_of(topic)[-1]
    last.write_bytes(last.read_bytes()[:cut])
    (log,) = asked(call, 0, "wal inspect", storage=topic.parent)
    assert (log.state, log.problem, log.torn_bytes > 0) == ("torn", None, True)
    assert asked(call, 0, "wal repair", "--yes", storage=topic.parent)[0].problem is None
    assert numbers(topic) == list(range(10))


async def _left_in_its_folder(topic: Path) -> None:
    """Leave 5 records in a log in the folder of bucket 0, as topics of 0.4.0 did."""
    live = topic.parent.parent / "live"
    async with PersistingBackend(bucket_id=0, storage_path=str(live), **LOGGED) as backend:
        for n in range(5):
            await backend.put({"id": "a", "n": n})
        shutil.copytree(live, topic / "bucket_0")


def test_log_in_the_folder_of_a_bucket_is_still_inspected_and_repaired(
    tmp_path: Path, call: Call
) -> None:
    async def made() -> None:
        place = str(tmp_path / "queues")
        await (
            await write_queue("t", storage_path=place, num_buckets=1, backend="persisting")
        ).close()

    topic = tmp_path / "queues" / "t"
    asyncio.run(made())
    shutil.rmtree(topic / "bucket_0", ignore_errors=True)
    asyncio.run(_left_in_its_folder(topic))
    (log,) = asked(call, 0, "wal inspect", storage=topic.parent)
    assert (log.bucket, log.state, log.buckets) == (0, "whole", [])
    assert log.path == str(topic / "bucket_0" / "wal")
    (segment,) = (topic / "bucket_0" / "wal").glob("*.wal")
    flip_bit(segment, segment.stat().st_size * 4 // 5)
    assert asked(call, 5, "wal inspect", storage=topic.parent)[0].state == "damaged"
    assert asked(call, 5, "verify", storage=topic.parent).logs[0].bucket == 0
    (done,) = asked(call, 0, "wal repair", "--yes", storage=topic.parent)
    assert (done.bucket, done.cut_bytes > 0, len(done.copies)) == (0, True, 1)
    found = numbers(topic)
    assert 0 < len(found) < 5
    assert found == list(range(len(found)))
