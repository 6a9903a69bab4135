"""The command line on topics in an object store."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli_runner import line_of, started, stopped
from support.object_stores import SeaweedFS, url
from support.owner_process import OwnerProcess
from support.waiting import until_true

from persisting.cli.app import run
from persisting.cli.exit_codes import DAMAGED, NO_TOPIC, OWNED, USAGE
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import store_group_admin


class Shell:
    """Runs commands on the topics below one prefix."""

    def __init__(self, prefix: str, capture: pytest.CaptureFixture[str]) -> None:
        self.root, self._capture = url(prefix), capture

    def __call__(self, *words: str) -> str:
        """Run a command and return what it printed."""
        assert run([*words, "-s", self.root]) == 0
        printed: str = self._capture.readouterr().out
        return printed

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def lines(self, *words: str) -> list[Any]:
        return [json.loads(line) for line in self(*words, "--json").splitlines()]


@pytest.fixture
async def shell(
    server: SeaweedFS,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    """A topic of 20 records in 2 buckets, with a tag; credentials are in the environment."""
    for name, value in server.options().items():
        environment = name.upper() if name.startswith("aws_") else f"AWS_{name.upper()}"
        monkeypatch.setenv(environment, value)
    where = {"storage_path": url(prefix), "durable": True, "num_buckets": 2}
    async with await write_queue(topic="orders", **where) as writer:
        await writer.put([{"id": n, "kind": "even" if n % 2 == 0 else "odd"} for n in range(20)])
        await writer.tag("first")
        await writer.put({"id": 20, "kind": "even"})
    return Shell(prefix, capsys)


def test_commands_read_a_topic_in_an_object_store(shell: Shell) -> None:
    (topic,) = shell.json("topics")
    assert (topic["topic"], topic["rows"], topic["num_buckets"]) == ("orders", 21, 2)
    described = shell.json("describe", "orders")
    assert described["path"] == f"{shell.root}/orders"
    assert [field["name"] for field in described["fields"]] == ["id", "kind"]
    assert [tag["name"] for tag in described["tags"]] == ["first"]
    assert all(bucket["owner"] is None and bucket["bytes"] > 0 for bucket in described["buckets"])
    found = shell.lines("get", "orders", "-n", "100")
    assert sorted(line["record"]["id"] for line in found) == list(range(21))
    assert len(shell.lines("get", "orders", "-n", "100", "--tag", "first")) == 20
    assert len(shell.lines("head", "orders", "-n", "3")) == 3
    even = shell.lines("query", "orders", "kind = 'even'", "-n", "100")
    assert len(even) == 11
    counted = shell.json("count", "orders")
    assert counted["count"] == 21
    verified = shell.json("verify", "orders")
    assert (verified["ok"], verified["rows"], verified["damaged"]) == (True, 21, [])
    assert len(shell.lines("tail", "orders", "-n", "3")) == 3


def test_commands_maintain_a_topic_in_an_object_store(shell: Shell) -> None:
    assert [tag["name"] for tag in shell.json("tag", "orders")] == ["first"]
    shell("tag", "orders", "second")
    assert [tag["name"] for tag in shell.json("tag", "orders")] == ["first", "second"]
    assert shell.json("versions", "orders")
    shell("index", "create", "orders", "kind", "--kind", "scalar")
    assert [index["column"] for index in shell.json("index", "list", "orders")] == ["kind"]
    assert shell.json("compact", "orders")["fragments_after"] == 2
    shell("restore", "orders", "--tag", "first", "--yes")
    assert shell.json("count", "orders")["count"] == 20
    assert shell.json("retain", "orders", "--rows", "1", "--yes")["dropped"] == 0


def test_records_are_searched_and_an_index_is_dropped(shell: Shell) -> None:
    words = ("search", "orders", "--text", "even", "-f", "kind", "-k", "50")
    hits = shell.lines(*words)
    assert sorted(hit["record"]["id"] for hit in hits) == list(range(0, 21, 2))
    shell("index", "create", "orders", "kind", "--kind", "text")
    assert [index["kind"] for index in shell.json("index", "list", "orders")] == ["text"]
    assert sorted(hit["record"]["id"] for hit in shell.lines(*words)) == list(range(0, 21, 2))
    assert shell.json("index", "drop", "orders", "kind")["dropped"] == 1
    assert shell.json("index", "list", "orders") == []
    assert shell.json("index", "drop", "orders", "kind")["dropped"] == 0


async def test_leases_of_a_lost_member_are_released_by_the_command_line(shell: Shell) -> None:
    where = {"topic": "orders", "storage_path": shell.root, "group": "solvers", "mode": "work"}
    async with await read_queue(**where) as member:
        taken = await member.fetch(5)
        await member.ack(taken[:2])
    words = ("work", "release", "orders", "solvers")
    assert (await asyncio.to_thread(shell.json, *words, "--dry-run"))["released"] == 3
    assert (await asyncio.to_thread(shell.json, *words, "--yes"))["released"] == 3
    assert (await asyncio.to_thread(shell.json, *words, "--yes"))["released"] == 0
    async with await read_queue(**where) as member:
        again = {(delivery.bucket, delivery.offset) for delivery in await member.fetch(50)}
    assert len(again) == 19
    assert {(delivery.bucket, delivery.offset) for delivery in taken[2:]} <= again


def test_missing_topic_is_named(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "nothing", "-s", shell.root]) == NO_TOPIC
    assert f"there is no topic 'nothing' at {shell.root}" in capsys.readouterr().err


def test_records_are_put_imported_and_exported(shell: Shell, tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(f'{{"id": {n}, "kind": "put"}}\n' for n in range(100, 110)))
    made = shell.json("put", "orders", str(lines), "--write-id", "load-1")
    assert (made["acknowledged"], made["made"], made["path"]) == (10, False, f"{shell.root}/orders")
    assert shell.json("put", "orders", str(lines), "--write-id", "load-1")["repeated"] == 10
    out = tmp_path / "all.parquet"
    assert shell.json("export", "orders", str(out))["rows"] == 31
    assert shell.json("import", "other", str(out), "--buckets", "2")["acknowledged"] == 31
    assert shell.json("count", "other")["count"] == 31
    text = shell("export", "orders", "-", "--tag", "first", "--where", "kind = 'even'")
    assert len(text.splitlines()) == 10


def test_export_with_flush_holds_what_owners_have_acknowledged(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner answers first; then it is killed, and its log is replayed."""
    owner = OwnerProcess()
    options = {"lease": 1.5, "flush_interval": None}
    where = {"topic": "busy", "storage_path": shell.root, "durable": True, "num_buckets": 2}
    try:
        owner.tell("own", "busy", {**where, "backend_options": options})
        owner.tell("put", "busy", [[{"id": n} for n in range(5)]])
        assert run(["export", "busy", "-", "-s", shell.root]) == 0
        answer = capsys.readouterr()
        assert answer.out == ""
        assert "with --flush it does" in answer.err
        assert len(shell("export", "busy", "-", "--flush").splitlines()) == 5
        owner.tell("put", "busy", [[{"id": n} for n in range(5, 12)]])
    finally:
        owner.close()
    assert len(shell("export", "busy", "-").splitlines()) == 5
    assert len(shell("export", "busy", "-", "--flush").splitlines()) == 12


def test_commands_reach_the_owner_that_has_the_topic_open(
    shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"id": 5}\n')
    owner = OwnerProcess()
    where = {"topic": "busy", "storage_path": shell.root, "durable": True, "num_buckets": 2}
    try:
        owner.tell("own", "busy", {**where, "backend_options": {"flush_interval": None}})
        owner.tell("put", "busy", [[{"id": n} for n in range(5)]])
        shell("put", "busy", str(lines))
        tagged = shell.json("tag", "busy", "six")
        assert run(["delete", "busy", "--yes", "-s", shell.root]) == OWNED
        assert f"process {owner.pid}" in capsys.readouterr().err
        owner.tell("put", "busy", [[{"id": 6}]])
        assert int(shell("count", "busy")) == 7
        assert tagged == shell.json("tag", "busy")
    finally:
        owner.close()


def test_topic_is_created_and_deleted_and_its_name_can_be_used_again(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shell.json("create", "new", "--buckets", "1", "--set", "lease=1")
    assert (made["path"], made["num_buckets"]) == (f"{shell.root}/new", 1)
    assert run(["create", "new", "-s", shell.root]) == USAGE
    assert "already exists" in capsys.readouterr().err
    assert shell.json("delete", "orders", "--dry-run")["rows"] == 21
    assert shell.json("delete", "orders", "--yes")["rows"] == 21
    assert [topic["topic"] for topic in shell.json("topics")] == ["new"]
    assert run(["count", "orders", "-s", shell.root]) == NO_TOPIC
    assert run(["delete", "orders", "--yes", "-s", shell.root]) == NO_TOPIC
    shell("create", "orders", "--buckets", "2")
    described = shell.json("describe", "orders")
    assert (described["rows"], described["fields"], described["tags"]) == (0, [], [])


def test_groups_are_shown_reset_and_deleted(shell: Shell) -> None:
    assert shell.json("groups", "orders") == []
    shell("groups", "orders", "billing", "--reset-to", "latest", "--yes")
    (group,) = shell.json("groups", "orders", "billing")
    assert (group["group"], group["members"], group["lag"]) == ("billing", 0, 0)
    (planned,) = shell.json("groups", "orders", "billing", "--reset-to", "earliest", "--dry-run")
    assert planned["lag"] == 21
    shell("groups", "orders", "billing", "--reset-to", "5", "--yes", "--bucket", "0")
    (group,) = shell.json("groups", "orders", "billing")
    assert group["buckets"][0]["committed"] == 5
    shell("groups", "orders", "billing", "--delete", "--yes")
    assert shell.json("groups", "orders") == []


async def test_group_with_a_living_reader_is_not_changed_and_its_topic_not_deleted(
    shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = open_store(parse(f"{shell.root}/busy"), StorageOptions())

    def wait_for_a_beat(seconds: float) -> None:  # however late it is on a busy machine
        before = busy.entries("groups")
        until_true(lambda: busy.entries("groups") != before)

    monkeypatch.setattr(store_group_admin, "time", SimpleNamespace(sleep=wait_for_a_beat))
    where: dict[str, Any] = {"topic": "busy", "storage_path": shell.root}
    options: dict[str, Any] = {"backend_options": {"lease": 0.6}, "num_buckets": 1}
    async with await write_queue(**where, **options, durable=True) as writer:
        await writer.put([{"id": n} for n in range(4)])
    async with await read_queue(**where, group="g") as reader:
        assert len(await reader.get(limit=2)) == 2
        for words in (
            ["groups", "busy", "g", "--reset-to", "latest", "--yes"],
            ["delete", "busy", "--yes"],
        ):
            code = await asyncio.to_thread(run, [*words, "-s", shell.root])
            printed = capsys.readouterr().err
            assert code == OWNED, printed
            assert "being read" in printed
        await reader.commit()
    (group,) = await asyncio.to_thread(shell.json, "groups", "busy", "g")
    assert group["lag"] == 2


async def test_log_of_an_owner_is_inspected_and_described(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    where: dict[str, Any] = {"topic": "busy", "storage_path": shell.root, "num_buckets": 2}
    options = {"flush_interval": None}
    async with await write_queue(**where, durable=True, backend_options=options) as writer:
        await writer.put([{"id": n} for n in range(5)])
        await writer.put({"id": 5})
        (log,) = await asyncio.to_thread(shell.json, "wal", "inspect", "busy")
        assert (log["state"], log["bucket"], len(log["segments"])) == ("whole", None, 2)
        assert log["path"].startswith(f"{shell.root}/busy/log/")
        assert sum(bucket["pending_records"] for bucket in log["buckets"]) == 6
        assert log["owner"]["pid"] == os.getpid()
        described = await asyncio.to_thread(shell.json, "describe", "busy")
        assert [one["state"] for one in described["logs"]] == ["whole", "whole"]
        assert sum(one["pending_frames"] for one in described["logs"]) >= 2
        assert sum(bucket["log_bytes"] for bucket in described["buckets"]) > 100
        store = open_store(parse(f"{shell.root}/busy"), StorageOptions())
        slot = next(key for key in store.list("log") if "/slots/" in key)
        found = store.get(slot)
        assert found is not None
        damaged = store.swap(slot, found.data[:-20] + b"x" * 20, found.version)
        words = ["wal", "inspect", "busy", "-s", shell.root, "--json"]
        code = await asyncio.to_thread(run, words)
        (log,) = json.loads(capsys.readouterr().out)
        assert (code, log["state"]) == (DAMAGED, "damaged")
        store.swap(slot, found.data, damaged)


@pytest.mark.parametrize("damaged", [0, 1], ids=["first object", "end of the last object"])
async def test_verify_checks_the_log_of_a_topic_in_an_object_store(
    shell: Shell, capsys: pytest.CaptureFixture[str], damaged: int
) -> None:
    where: dict[str, Any] = {"topic": "busy", "storage_path": shell.root}
    options = {"flush_interval": None}
    words = ["verify", "busy", "-s", shell.root]
    async with await write_queue(
        **where, num_buckets=2, durable=True, backend_options=options
    ) as writer:
        await writer.put([{"id": n} for n in range(5)])
        await writer.put([{"id": n} for n in range(5, 10)])
        async with await read_queue(**where, group="g", mode="work") as member:
            assert len(await member.fetch(1)) == 1
            verified = await asyncio.to_thread(shell.json, "verify", "busy")
        (log,) = verified["logs"]  # not the journal of the work group
        assert (verified["ok"], log["state"], log["problem"]) == (True, "whole", None)
        assert (log["bucket"], log["buckets"]) == (None, [0, 1])
        assert log["path"].startswith(f"{shell.root}/busy/log/")
        store = open_store(parse(f"{shell.root}/busy"), StorageOptions())
        keys = store.list(log["path"].removeprefix(f"{shell.root}/busy/"))
        slot = sorted(key for key in keys if "/slots/" in key)[damaged]
        found = store.get(slot)
        assert found is not None
        version = store.swap(slot, found.data[:-20] + b"x" * 20, found.version)
        assert await asyncio.to_thread(run, [*words, "--json"]) == DAMAGED
        verified = json.loads(capsys.readouterr().out)
        (log,) = verified["logs"]
        assert (verified["ok"], log["state"], log["buckets"]) == (False, "damaged", [0, 1])
        assert await asyncio.to_thread(run, words) == DAMAGED
        printed = capsys.readouterr().out
        assert f"damaged: shared log: the log object {shell.root}/busy/{slot} is damaged" in printed
        assert "wal repair" not in printed
        store.swap(slot, found.data, version)
    assert (await asyncio.to_thread(shell.json, "verify", "busy"))["logs"] == []


def test_backup_is_made_checked_and_restored_by_the_command_line(
    shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prefix = str(tmp_path / "copy"), f"{shell.root}/backups/monday"
    assert shell.json("backup", "create", "orders", folder)["rows"] == 21
    made = shell.json("backup", "create", "orders", prefix)
    assert (made["rows"], made["path"]) == (21, prefix)
    assert run(["backup", "verify", prefix]) == 0
    capsys.readouterr()
    restored = shell.json("backup", "restore", folder, "again")
    assert (restored["topic"], restored["path"]) == ("again", f"{shell.root}/again")
    assert shell.json("count", "again")["count"] == 21
    home = str(tmp_path / "queues")
    assert run(["backup", "restore", prefix, "here", "-s", home]) == 0
    assert run(["verify", "here", "-s", home]) == 0
    assert run(["backup", "restore", prefix, "again", "-s", shell.root]) == USAGE


async def test_tail_follows_what_another_process_writes(shell: Shell) -> None:
    command = [sys.executable, "-m", "persisting.cli", "tail", "orders", "-f", "-n", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    async with await write_queue(topic="orders", storage_path=shell.root) as writer:
        child = await asyncio.create_subprocess_exec(
            *command, "-s", shell.root, stdout=asyncio.subprocess.PIPE, env=environment
        )
        try:
            assert child.stdout is not None
            line = asyncio.ensure_future(child.stdout.readline())
            number = 1000
            while not line.done():  # until it has begun to follow
                await writer.put({"id": number, "kind": "new"})
                number += 1
                await asyncio.wait([line], timeout=0.2)
            assert json.loads(await line)["record"]["kind"] == "new"
        finally:
            child.kill()
            await child.wait()


def test_metrics_of_topics_in_a_store_are_scraped(shell: Shell) -> None:
    with started("metrics", "serve", "--port", 0, "-s", shell.root) as child:
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", line_of(child.stderr))
        assert found
        with urllib.request.urlopen(found[0]) as answer:
            text = answer.read().decode()
        stopped(child, signal.SIGTERM)
    assert 'persisting_topic_up{topic="orders"} 1.0' in text
    rows = re.findall(r'^persisting_topic_records\{bucket="\d",topic="orders"\} (\S+)$', text, re.M)
    assert [sum(map(float, rows)), len(rows)] == [21, 2]
    assert 'persisting_topic_owned{bucket="0",topic="orders"} 0.0' in text


async def test_dead_letters_are_listed_and_redriven_by_the_command_line(shell: Shell) -> None:
    async with await read_queue(
        topic="orders", storage_path=shell.root, group="solvers", mode="work"
    ) as member:
        for delivery in await member.fetch(3):
            await delivery.reject("no way")
    (group,) = await asyncio.to_thread(shell.json, "groups", "orders", "solvers")
    assert (group["lag"], group["members"], group["work"]["dead"]) == (18, 0, 3)
    letters = await asyncio.to_thread(shell.json, "work", "dead", "orders", "solvers")
    assert [letter["reason"] for letter in letters] == ["no way"] * 3
    done = await asyncio.to_thread(shell.json, "work", "redrive", "orders", "solvers", "--yes")
    assert done["redriven"] == 3
    assert await asyncio.to_thread(shell.json, "work", "dead", "orders", "solvers") == []


async def test_neither_a_work_group_with_a_keeper_nor_its_topic_is_deleted(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"topic": "orders", "storage_path": shell.root, "group": "solvers", "mode": "work"}
    words = {
        "group": ["groups", "orders", "solvers", "--delete", "--yes", "-s", shell.root],
        "topic": ["delete", "orders", "--yes", "-s", shell.root],
    }
    async with await read_queue(**where) as member:
        (first,) = await member.fetch(1)
        await first.ack()
        for command in words.values():
            assert await asyncio.to_thread(run, command) == OWNED
            printed = capsys.readouterr().err
            assert "work group 'solvers' is being read" in printed
            assert "close its readers first" in printed
        assert (await member.stats())["acknowledged"] == 1
        assert len(await member.fetch(50)) == 20
    assert await asyncio.to_thread(run, words["group"]) == 0
    async with await read_queue(**where) as member:  # a new group begins at the beginning
        assert len(await member.fetch(50)) == 21
    assert await asyncio.to_thread(run, words["topic"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["wal", "repair", "orders"],
    ],
    ids=lambda words: words[0],
)
def test_command_without_support_for_object_stores_says_so(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*words, "-s", "s3://bucket/prefix"])
    printed = capsys.readouterr().err
    assert code == USAGE, printed
    assert "object store" in printed
    assert "s3://bucket/prefix" in printed
    assert "Traceback" not in printed
