"""The console on topics in an object store."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.console import HOSTILE, RunningConsole, awaited, running_console, shown, text_with
from support.object_stores import SeaweedFS, environment_of, url

from persisting.cli.app import run
from persisting.cli.exit_codes import NO_TOPIC, USAGE
from persisting.demo.trajectories import trajectories
from persisting.queue import read_queue, write_queue


async def fill(place: str) -> None:
    where: dict[str, Any] = {"storage_path": place, "durable": True}
    async with await write_queue(topic="runs", num_buckets=2, **where) as writer:
        await writer.put([*trajectories("agent-a", 0, 30), *trajectories("agent-b", 0, 30)])
        await writer.flush()
        await writer.tag("v1")
        await writer.put([{**record, "extra": 1} for record in trajectories("agent-c", 0, 20)])
    async with await read_queue(topic="runs", storage_path=place, group="trainers") as reader:
        await reader.get(limit=50)
        await reader.commit()
    async with await write_queue(topic="hostile", num_buckets=1, **where) as writer:
        await writer.put({"id": HOSTILE, "text": HOSTILE})


@pytest.fixture
def place(server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment_of(server.options()).items():
        monkeypatch.setenv(name, value)
    awaited(fill(url(prefix)))
    return url(prefix)


@pytest.fixture
def console(place: str, tmp_path: Path) -> Iterator[RunningConsole]:
    backups = str(tmp_path / "backups")
    with running_console(place, "--allow-changes", "--backups", backups) as running:
        yield running


def page(console: RunningConsole, path: str, /, **parameters: object) -> str:
    reply = console.get(path, **parameters)
    assert reply.status == 200, (path, shown(reply.text))
    return shown(reply.text)


def test_every_screen_shows_a_topic_in_an_object_store(console: RunningConsole, place: str) -> None:
    base = "/topics/runs"
    assert "Records 80" in page(console, base)  # read immediately, before a round has seen it
    listed = text_with(console, "/", "trainers")
    assert place in listed
    assert "hostile" in listed
    assert len(re.findall(r"\b[01]:\d+\b", page(console, f"{base}/records", limit=500))) == 80
    assert "v1" in page(console, f"{base}/records", tag="v1", limit=500)
    assert "agent-" in page(console, f"{base}/records/0/0")
    lines = console.get(f"{base}/download", limit=500, format="jsonl").text.splitlines()
    assert len(lines) == 80
    assert console.get(f"{base}/search", text="lock").status == 200
    found = console.get(f"{base}/search", where="agent = 'agent-c'", k=50)
    assert found.status == 200
    assert found.text.count("agent-c") >= 20
    assert "agent-c 20" in page(console, f"{base}/trajectories", field="agent")
    steps = console.get(f"{base}/trajectories/run", field="agent", value='"agent-c"')
    assert steps.text.count("<li data-row") == 20
    assert "Lag 30" in page(console, f"{base}/groups")
    assert "v1" in page(console, f"{base}/versions")
    assert "Records added 20" in page(console, f"{base}/versions/compare", first="v1")
    assert "verify" in page(console, f"{base}/maintenance").lower()
    hostile = console.get("/topics/hostile/records/0/0").text
    assert HOSTILE not in hostile
    for path in ("/topics/nope", "/topics/nope/records", "/topics/..%2Fx", f"{base}/records/7/0"):
        assert console.ask("GET", path).status in (400, 404), path
    assert console.get(f"{base}/groups/redrive", group="trainers").status == 400


def test_dead_letters_in_an_object_store_are_shown_and_delivered_again(
    console: RunningConsole, place: str
) -> None:
    async def reject(count: int) -> None:
        where = {"storage_path": place, "group": "solvers", "mode": "work"}
        async with await read_queue("runs", **where) as member:
            for delivery in await member.fetch(count):
                await delivery.reject("no way")

    awaited(reject(3))
    text_with(console, "/topics/runs/groups", "Dead letters 3")
    path = "/topics/runs/groups/redrive"
    preview = console.get(path, group="solvers")
    assert "Deliver 3 dead letters to solvers again?" in shown(preview.text)
    fields = dict(re.findall(r'name="(group|identity|numbers)" value="([^"]+)"', preview.text))
    assert console.post(path, **fields).status == 303
    assert "There are no dead letters here." in page(console, path, group="solvers")


@pytest.mark.nightly
def test_group_tag_restore_and_maintenance_change_a_topic_in_an_object_store(
    console: RunningConsole, place: str, tmp_path: Path
) -> None:
    base = "/topics/runs"
    preview = console.get(f"{base}/groups/reset", group="trainers", to="earliest")
    assert "Records to read: 30 now, 80 afterwards." in shown(preview.text)
    offsets = re.search(r'name="offsets" value="([^"]+)"', preview.text)
    assert offsets is not None
    moved = console.post(f"{base}/groups/reset", group="trainers", offsets=offsets[1])
    assert moved.status == 303, shown(moved.text)
    assert "Lag 80" in page(console, f"{base}/groups")
    assert console.post(f"{base}/versions/tags", name="mine").status == 303
    assert "mine" in page(console, f"{base}/versions")
    assert console.post(f"{base}/versions/tags/delete", name="mine").status == 303
    assert "20 records would be removed." in page(console, f"{base}/versions/restore", tag="v1")
    done = console.post(f"{base}/versions/restore", tag="v1", confirm="runs", removed=20)
    assert "20 records were removed." in shown(done.text)
    assert "Records 60" in page(console, base)
    for kind, result in (("verify", "no damage found"), ("backup", "files,")):
        assert console.post(f"{base}/maintenance/{kind}").status == 303
        text_with(console, f"{base}/maintenance", result)
    assert len(list((tmp_path / "backups").iterdir())) == 1

    async def count() -> int:
        async with await read_queue(topic="runs", storage_path=place) as reader:
            return await reader.count()

    assert awaited(count()) == 60


def test_live_tail_follows_a_topic_in_an_object_store(console: RunningConsole, place: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=120)
    connection.request("GET", "/topics/runs/tail/events?rate=100")
    stream = connection.getresponse()
    assert stream.readline() == b"event: start\n"

    async def put() -> set[str]:
        async with await write_queue(topic="runs", storage_path=place) as writer:
            await writer.put([{"id": f"late-{n}", "agent": "late"} for n in range(5)])
            return await asyncio.to_thread(followed)

    def followed() -> set[str]:
        found: set[str] = set()
        while len(found) < 5:  # while the writer has not flushed
            line = stream.readline()
            if line.startswith(b"data: "):
                records = json.loads(line.removeprefix(b"data: ")).get("records", [])
                found |= {json.loads(record["text"])["id"] for record in records}
        return found

    assert awaited(put()) == {f"late-{n}" for n in range(5)}
    connection.close()


def test_console_says_why_it_cannot_show_an_object_store(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["ui", "-s", place, "-p", "0", "--seeds", "127.0.0.1:1"]) == USAGE
    assert "needs no seeds" in capsys.readouterr().err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert run(["ui", "-s", place, "-p", "0"]) not in (0, NO_TOPIC)
    assert "wrong" not in capsys.readouterr().err
