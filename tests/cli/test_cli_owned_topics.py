"""Commands on a topic that another process owns: they do not disturb it, and change it through its
socket; without a socket, changes are refused."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.children import python, wait_for_line
from support.cli_contracts import decoded
from support.cli_runner import (
    DURABLE,
    Answer,
    files_in,
    line_of,
    owner,
    piped,
    released,
    started,
    stopped,
)
from support.owner_process import OwnerProcess

from persisting.cli.exit_codes import USAGE

READING = [
    ["topics"],
    ["describe", "live"],
    ["head", "live"],
    ["tail", "live"],
    ["get", "live"],
    ["query", "live", "n < 3"],
    ["export", "live", "-"],
    ["versions", "live"],
    ["tag", "live"],
    ["groups", "live"],
    ["verify", "live"],
    ["wal", "inspect", "live"],
    ["wal", "repair", "live", "--dry-run"],
    ["retain", "live", "--rows", "1", "--dry-run"],
    ["restore", "live", "--at", "1s", "--dry-run"],
]
"""Commands that work while another process owns the topic."""

WRITING = [
    ["put", "live", "/dev/null"],
    ["compact", "live"],
    ["retain", "live", "--rows", "1", "--yes"],
    ["restore", "live", "--at", "1s", "--yes"],
    ["tag", "live", "v1"],
]


def test_commands_change_a_topic_through_the_socket_of_its_owner(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path, "live") as child:
        _until_flushed(tmp_path, call)
        line = json.dumps({"id": "mine", "n": -1}).encode() + b"\n"
        assert piped("put", "live", "-s", tmp_path, given=line).code == 0
        assert call("tag", "live", "v1", "-s", tmp_path).code == 0
        assert call("compact", "live", "-s", tmp_path).code == 0
        found = call("query", "live", "n = -1", "-s", tmp_path)
        assert (found.code, found.out.count("mine")) == (0, 1)
        released(child)
    exported = call("export", "live", "-", "-s", tmp_path).out.splitlines()
    assert sum(json.loads(line)["n"] == -1 for line in exported) == 1


def test_export_with_flush_holds_what_an_owner_has_acknowledged(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    service = OwnerProcess()
    try:
        where = {"topic": "live", "storage_path": str(tmp_path), "backend": "persisting"}
        service.tell("own", "live", {**where, "backend_options": DURABLE})
        service.tell("put", "live", [[{"id": n} for n in range(5)]])
        before = call("export", "live", "-", "-s", tmp_path)
        assert before.out == ""
        assert re.search(r"does not include .* of its log; with --flush it does", before.err)
        answer = call("export", "live", "-", "--flush", "-s", tmp_path)
        assert (len(answer.out.splitlines()), answer.err) == (5, "")
        tagged = call("export", "live", "-", "--flush", "--tag", "v1", "-s", tmp_path)
        assert tagged.code == USAGE
        assert "--flush" in tagged.err
    finally:
        service.close()


def test_tail_follows_what_a_service_and_other_commands_put(tmp_path: Path) -> None:
    service = OwnerProcess()
    words = {
        "topic": "live",
        "storage_path": str(tmp_path),
        "backend": "persisting",
        "num_buckets": 2,
        "backend_options": DURABLE,
    }
    try:
        service.tell("own", "live", words)
        service.tell("put", "live", [{"id": "first"}])
        with started("tail", "live", "-f", "--json", "-c", "id", "-s", tmp_path) as child:
            assert json.loads(line_of(child.stdout))["record"] == {"id": "first"}
            service.tell("put", "live", [{"id": "service"}])
            assert json.loads(line_of(child.stdout))["record"] == {"id": "service"}
            assert piped("put", "live", "-s", tmp_path, given=b'{"id": "command"}\n').code == 0
            assert json.loads(line_of(child.stdout))["record"] == {"id": "command"}
            stopped(child)
        stats = service.tell("stats", "live")
        assert stats["total_count"] == 3
        assert sum(bucket["persisted_count"] for bucket in stats["buckets"]) < 3
    finally:
        service.close()


def test_reading_does_not_disturb_an_owner_and_writing_names_it(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path, "live", local_socket=False) as child:
        _until_flushed(tmp_path, call)
        for _ in range(2):
            for words in READING:
                answer = call(*words, "-s", tmp_path)
                assert (answer.code, "error" in answer.err) == (0, False), (words, answer)
        for words in WRITING:
            code, out, err = call(*words, "-s", tmp_path)
            assert (code, out) == (4, ""), (words, err)
            assert f"process {child.pid} " in err
            assert err.count("\n") == 1
        (facts,) = decoded("topics", call("topics", "--json", "-s", tmp_path).out)
        assert facts.owners[0]["pid"] == child.pid
        assert f"pid {child.pid}@" in call("topics", "-s", tmp_path).out
        count = released(child)
    exported = call("export", "live", "-", "-s", tmp_path).out.splitlines()
    assert sorted(json.loads(line)["n"] for line in exported) == list(range(count))
    (facts,) = decoded("topics", call("topics", "--json", "-s", tmp_path).out)
    assert facts.owners == []


def _until_flushed(storage: Path, call: Callable[..., Answer]) -> None:
    for _ in range(1000):
        if call("head", "live", "-n", 1, "-s", storage).out:
            return
        time.sleep(0.02)
    raise AssertionError("the owner flushed nothing")


def test_log_is_not_reported_as_damaged_while_its_owner_flushes(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path, "live") as child:
        _until_flushed(tmp_path, call)
        for _ in range(15):
            code, out, _ = call("wal", "inspect", "live", "--json", "-s", tmp_path)
            states = {one.state: one.problem for one in decoded("wal inspect", out)}
            assert (code, states.get("damaged")) == (0, None)
            assert call("verify", "live", "-s", tmp_path).code == 0
        released(child)


def test_topic_can_be_opened_for_writing_while_it_is_inspected(
    storage: Path, call: Callable[..., Answer]
) -> None:
    ended = threading.Event()
    codes = []

    def inspect() -> None:
        from persisting.topic.inspect import describe, find, topics_in

        while not ended.is_set():
            codes.append(len(topics_in(storage)))
            describe(find("events", storage))

    inspectors = [threading.Thread(target=inspect) for _ in range(2)]
    for one in inspectors:
        one.start()
    try:
        for number in range(3):
            line = json.dumps({"id": f"new{number}"}).encode() + b"\n"
            answer = piped("put", "events", "-s", storage, given=line)
            assert (answer.code, answer.err) == (0, "")
    finally:
        ended.set()
        for one in inspectors:
            one.join()
    assert codes
    assert call("query", "events", "id LIKE 'new%'", "-s", storage).out.count("\n") == 3


def test_log_is_not_repaired_while_its_owner_runs(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path, "live") as child:
        _until_flushed(tmp_path, call)
        assert call("wal", "repair", "live", "--yes", "-s", tmp_path).code in (0, 4)
        released(child)
    assert not list(tmp_path.rglob("trimmed"))


def _scraped(url: str) -> dict[str, float]:
    with urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        name: float(value)
        for name, value in re.findall(r"^(persisting_\S+?\{.*\}) (\S+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_metrics_serve_exports_topics_owners_and_lag_without_writing(
    end: signal.Signals, storage: Path, call: Callable[..., Answer]
) -> None:
    (storage / "broken").mkdir()
    (storage / "broken" / "topic.json").write_text("{")
    before = files_in(storage)
    with started("metrics", "serve", "--port", 0, "-s", storage) as child:
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", line_of(child.stderr))
        assert found
        seen = _scraped(found[0])
        rows = [seen[f'persisting_topic_records{{bucket="{b}",topic="events"}}'] for b in (0, 1)]
        assert sum(rows) == 20
        assert seen['persisting_topic_up{topic="events"}'] == 1
        assert seen['persisting_topic_up{topic="broken"}'] == 0
        assert seen['persisting_topic_owned{bucket="0",topic="events"}'] == 0
        lag = 'persisting_group_lag_records{bucket="%d",group="trainers",topic="events"}'
        assert sum(seen[lag % bucket] for bucket in (0, 1)) == 15
        assert files_in(storage) == before
        if end == signal.SIGINT:
            with owner(storage, "live") as other:
                assert _scraped(found[0])['persisting_topic_owned{bucket="0",topic="live"}'] == 1
                released(other)
        code, out, err = stopped(child, end)
    assert (code, out) == (130 if end == signal.SIGINT else 0, "")
    assert "Traceback" not in err


HOLDING = """
import asyncio, json, sys
from persisting.queue import write_queue

async def main():
    words = json.loads(sys.argv[2])
    async with await write_queue("held", storage_path=sys.argv[1], **words) as writer:
        for _ in range(2):
            await writer.put([{"id": str(n), "n": n, "text": "red"} for n in range(20)])
            print("put", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await writer.flush()
            print("flushed", flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""
READING_LOGS = [
    ["head", "held"],
    ["tail", "held"],
    ["get", "held"],
    ["query", "held", "n < 3"],
    ["search", "held", "--text", "red", "-f", "text"],
]
READING_TABLES = [
    ["export", "held", "-"],
    ["verify", "held"],
]


LOGGED = {"backend": "persisting", "backend_options": {"enable_wal": True, "flush_interval": None}}


@pytest.mark.parametrize("words", [LOGGED, {"backend": "lance"}], ids=["logged", "unlogged"])
def test_note_says_that_an_owner_has_unflushed_records(
    tmp_path: Path, call: Callable[..., Answer], words: dict[str, object]
) -> None:
    def notes() -> set[str]:
        commands = READING_TABLES if words is LOGGED else [*READING_LOGS, *READING_TABLES]
        answers = [call(*command, "-s", tmp_path) for command in commands]
        assert all(answer.code == 0 for answer in answers), answers
        # Only export can have the owner flush.
        return {answer.err.replace("; with --flush it does", "") for answer in answers}

    with python(HOLDING, tmp_path, json.dumps(words)) as child:
        assert child.stdin is not None
        assert wait_for_line(child) == "put"
        child.stdin.write("\n")
        child.stdin.flush()
        assert wait_for_line(child) == "flushed"
        flushed = notes()
        child.stdin.write("\n")
        child.stdin.flush()
        assert wait_for_line(child) == "put"
        (note,) = notes()
        assert note.startswith(f"note: process {child.pid} on ")
        assert note.count("\n") == 1
        assert ("of its log" in note) == (words is LOGGED)
        assert flushed == ({""} if words is LOGGED else {note})
        if words is LOGGED:
            answers = [call(*command, "-s", tmp_path) for command in READING_LOGS]
            assert {answer.err for answer in answers} == {""}
