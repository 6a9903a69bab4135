"""What only owners know: records that are in no file yet, and how long a flush takes."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.children import python, wait_for_line
from support.cli_runner import COMMAND, environment, line_of
from support.console import RunningConsole, page_when, positions, running_console
from support.waiting import until_true

from persisting.queue import write_queue
from persisting.ui.owners import Owners
from persisting.ui.sampler import Sampler
from persisting.ui.screens.topic import charts
from persisting.ui.storage_view import StorageView
from persisting.ui.texts import Translator
from persisting.ui.topic_rounds import TopicRounds

WRITER = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(
        "held", storage_path=sys.argv[1], backend="lance", num_buckets=2
    )
    for n in range(10):  # one by one, so that the buckets take turns
        await writer.put({"id": n, "text": f"flushed {n}"})
    await writer.flush()
    await writer.put([{"id": n, "text": f"held {n}"} for n in range(10, 16)])
    print("open", flush=True)
    number = 16
    for line in sys.stdin:
        await writer.put({"id": number, "text": line.strip()})
        number += 1
        print("put", flush=True)

asyncio.run(main())
"""
CLUSTER_WRITER = """
import asyncio, sys
import pulsing as pul
from persisting.queue import write_queue

async def main():
    system = await pul.actor_system("127.0.0.1:0", seeds=[sys.argv[2]])
    await asyncio.sleep(1)
    writer = await write_queue(
        system, topic="held", storage_path=sys.argv[1], backend="lance", num_buckets=2
    )
    await writer.put([{"id": n, "text": f"held {n}"} for n in range(8)])
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

CLUSTER_WORKER = """
import asyncio, sys
import pulsing as pul
from persisting.queue import read_queue, write_queue

async def main():
    system = await pul.actor_system("127.0.0.1:0", seeds=[sys.argv[2]])
    await asyncio.sleep(1)
    writer = await write_queue(
        system, topic="tasks", storage_path=sys.argv[1], durable=True, num_buckets=2
    )
    await writer.put([{"id": n} for n in range(3)])
    member = await read_queue(
        system, topic="tasks", storage_path=sys.argv[1], group="solvers", mode="work"
    )
    for delivery in await member.fetch(3):
        await delivery.reject("no")
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def until(console: RunningConsole, path: str, expected: str | int) -> str:
    """Return a page once it contains a text, or this many records.

    An owner that is slow to answer is left out of pages for a while.
    """

    def is_ready(page: str) -> bool:
        return expected in page if isinstance(expected, str) else len(positions(page)) == expected

    return page_when(console, path, is_ready)


def downloaded(console: RunningConsole) -> list[str]:
    return console.get("/topics/held/download", format="jsonl", limit=100).text.splitlines()


@pytest.mark.timeout(600)
def test_records_that_only_their_owner_holds_are_shown(tmp_path: Path) -> None:
    with python(WRITER, tmp_path) as writer:
        wait_for_line(writer)
        with running_console(tmp_path) as console:
            page = until(console, "/topics/held/records", 16)
            assert page.count("not flushed") == 6
            newest = positions(page)[-1]
            until(console, f"/topics/held/records/{newest.replace(':', '/')}", "held ")
            until_true(lambda: len(downloaded(console)) == 16)
            assert console.get("/topics/held/download", format="parquet").status == 200
            for query, direction in (("?limit=3", "prev"), ("?limit=3&from=0:0,1:0", "next")):
                found = walked_to_the_end(console, query, direction)
                assert len(found) == len(set(found)) == 16
            until(console, "/topics/held", "<dd>16</dd>")


def test_search_and_verify_do_not_ask_the_owner(tmp_path: Path) -> None:
    with python(WRITER, tmp_path) as writer:
        wait_for_line(writer)
        with running_console(tmp_path) as console:
            writer.send_signal(signal.SIGSTOP)  # now a call to the owner would not return
            try:
                found = console.get("/topics/held/search", text="flushed", k=100)
                assert found.text.count("<mark>flushed</mark>") == 10
                assert "Records that are not flushed yet are not searched" in found.text
                assert "<mark>" not in console.get("/topics/held/search", text="held").text
                assert console.post("/topics/held/maintenance/verify").status == 303
                until(console, "/topics/held/maintenance", "no damage found")
            finally:
                writer.send_signal(signal.SIGCONT)


@pytest.mark.nightly
def test_stopped_owner_does_not_stop_the_pages(tmp_path: Path) -> None:
    with python(WRITER, tmp_path) as writer:
        wait_for_line(writer)
        with running_console(tmp_path) as console:
            until(console, "/topics/held/records", "held 15")
            writer.send_signal(signal.SIGSTOP)
            try:
                pages = [console.get("/topics/held/records") for _ in range(5)]
                assert [page.status for page in pages] == [200] * 5
                assert [len(positions(page.text)) for page in pages] == [10] * 5
            finally:
                writer.send_signal(signal.SIGCONT)


def walked(console: RunningConsole, query: str, direction: str) -> list[str]:
    """Return the positions on a page and on all pages after or before it."""
    found: list[str] = []
    link: re.Match[str] | None
    path = f"/topics/held/records{query}"
    for _ in range(20):
        page = console.ask("GET", path).text
        found += positions(page)
        link = re.search(f'rel="{direction}" href="([^"]+)"', page)
        if link is None:
            break
        path = link[1].replace("&amp;", "&")
    return found


def walked_to_the_end(console: RunningConsole, query: str, direction: str) -> list[str]:
    """Return the positions that :func:`walked` finds once it finds those of all 16 records."""
    found: list[str] = []

    def has_all() -> bool:
        found[:] = walked(console, query, direction)
        return len(found) >= 16

    until_true(has_all, lambda: found, tries=600)
    return found


def test_live_tail_follows_a_topic_without_a_log(tmp_path: Path) -> None:
    with python(WRITER, tmp_path) as writer:
        wait_for_line(writer)
        assert writer.stdin is not None
        with running_console(tmp_path) as console:
            until(console, "/topics/held/records", "held 15")
            connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=60)
            connection.request("GET", "/topics/held/tail/events")
            stream = connection.getresponse()
            assert stream.readline() == b"event: start\n"
            seen: list[str] = []
            for text in ("one", "two"):
                writer.stdin.write(f"{text}\n")
                writer.stdin.flush()
                wait_for_line(writer)
                while text not in seen:
                    records = next_records(stream)
                    seen += [json.loads(record["text"])["text"] for record in records]
            connection.close()
            assert len(seen) == len(set(seen))
            assert seen[-2:] == ["one", "two"]


def next_records(stream: http.client.HTTPResponse) -> list[dict[str, str]]:
    """Return the records of the next event that has some."""
    while True:
        line = stream.readline()
        if line.startswith(b"data: "):
            records = json.loads(line.removeprefix(b"data: ")).get("records")
            if records:
                return list(records)


async def test_flush_time_is_what_the_owner_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_ANSWER_SECONDS", "_THREAD_SECONDS"):
        monkeypatch.setattr(f"persisting.ui.owners.{limit}", 60.0)
    view = StorageView(tmp_path)
    owners = Owners(view, None)
    owners.start()
    sampler, rounds = Sampler(view, 60.0, owners.buckets_now), TopicRounds(view)

    def sample_all() -> None:
        for message in rounds.sample_all():
            sampler.take(message)

    writer = await write_queue(
        "logged",
        storage_path=str(tmp_path),
        durable=True,
        num_buckets=2,
        backend_options={"flush_interval": None},
    )
    async with writer:
        for number in range(3):
            await writer.put([{"id": n, "text": "x" * 100} for n in range(50)])
            await asyncio.to_thread(sample_all)
            if number:
                await writer.flush()
        await asyncio.to_thread(sample_all)
        stats = await writer.stats()
    sample = sampler.sample("logged")
    assert sample is not None
    assert stats["flush_count"] == 4  # two of each bucket
    points = sample.history.flush_time.points()
    assert points
    assert 0 < points[-1].value < stats["flush_seconds"]
    assert [title for title, _ in charts(Translator("en"), sample)].count("Flush time") == 1


@pytest.mark.timeout(600)
def test_console_shows_and_changes_what_a_cluster_owns(tmp_path: Path) -> None:
    storage = tmp_path / "q"
    with serving(storage) as (node, address), python(CLUSTER_WRITER, storage, address) as writer:
        wait_for_line(writer)
        with running_console(storage, "--seeds", address, "--allow-changes") as console:
            page = until(console, "/topics/held/records", 8)
            assert page.count("not flushed") == 8
            until(console, "/topics/held", node)
            until(console, "/topics/held", "<dd>8</dd>")
            assert "<mark>" not in console.get("/topics/held/search", text="held").text
            tagged = console.post("/topics/held/versions/tags", name="mine")
            assert tagged.status == 303, tagged.text
            assert "mine" in console.get("/topics/held/versions").text
            # A tag holds what is in files, so the owner has flushed.
            found = console.get("/topics/held/search", text="held").text
            assert found.count("<mark>held</mark>") == 8
        with running_console(storage, "--allow-changes") as alone:
            # It is not a member of the cluster, so it cannot ask the owner.
            assert alone.post("/topics/held/versions/tags", name="other").status == 409


@pytest.mark.nightly
def test_dead_letters_of_a_cluster_are_delivered_again_by_their_keeper(tmp_path: Path) -> None:
    storage = tmp_path / "q"
    with serving(storage) as (_, address), python(CLUSTER_WORKER, storage, address) as worker:
        wait_for_line(worker)
        with running_console(storage, "--seeds", address, "--allow-changes") as console:
            path = "/topics/tasks/groups/redrive"
            preview = until(console, f"{path}?group=solvers", 'name="numbers"')
            fields = dict(re.findall(r'name="(group|identity|numbers)" value="([^"]+)"', preview))
            done = console.post(path, **fields)
            assert done.headers["location"] == "/topics/tasks/groups?redriven=3", done.text
            assert "There are no dead letters" in console.get(path, group="solvers").text


@pytest.mark.nightly
def test_console_does_not_become_a_storage_node(tmp_path: Path) -> None:
    storage = tmp_path / "q"
    with serving(storage) as (_, address), python(CLUSTER_WRITER, storage, address) as writer:
        wait_for_line(writer)
        with running_console(storage, "--seeds", address) as console:
            until(console, "/topics/held/records", "held 7")
        writer.kill()
    with running_console(storage) as console:
        page = until(console, "/topics/held", "<h2>")
        assert f"{console.process.pid}@" not in page


@pytest.mark.nightly
def test_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "ui", "-s", str(tmp_path), "-p", "0", "--seeds", "nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )
    assert done.returncode == 2
    assert "a seed must be host:port" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def serving(storage: Path) -> Iterator[tuple[str, str]]:
    """Run a storage node; yield its id and address."""
    child = subprocess.Popen(
        [*COMMAND, "serve", "-s", str(storage)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        words = line_of(child.stdout).split()
        yield words[3], words[1]
    finally:
        child.kill()
        child.communicate()
