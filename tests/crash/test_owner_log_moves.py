"""Buckets move between owners that each have a log, while the logs are in use and owners die."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.crash.checks import PromiseBroken
from support.crash.moving_buckets import Owners, move_buckets
from support.crash.topics import (
    BUCKETS,
    CrashableTopic,
    ExpectedTopic,
    Parts,
    RecordedTopic,
    Unrecorded,
    check_topic,
)

from persisting.bucket import log_note
from persisting.errors import StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.mark.parametrize("seed", range(6))
async def test_buckets_that_move_between_owners_keep_every_record(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 400)
    await move_buckets(tmp_path, seed, 40, wal_sync_interval=60.0 * (seed % 2))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_buckets_that_move_a_lot_between_owners_keep_every_record(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting.wal.log.SEGMENT_BYTES", 400)
    await move_buckets(tmp_path, seed, 1500, wal_sync_interval=60.0 * (seed % 2))


async def test_sequences_rise_when_a_bucket_comes_back(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    for bucket in range(BUCKETS):
        await owners.move(bucket, 0)
    seen = []
    for turn in range(4):
        for _ in range(3):
            await owners.put(0)
            await owners.put(1)
        backend = await owners.owners[turn % 2].backend(1)
        await owners.flush(1)
        seen.append(backend.bucket.table.sequence)
        del backend
        await owners.move(1, 1 - turn % 2)
    assert seen == sorted(set(seen))
    await owners.kill(0)
    await owners.kill(1)
    await check_topic(tmp_path, owners.expected, owners.expected.puts)


async def test_bucket_that_is_taken_over_again_and_again_keeps_its_records(tmp_path: Path) -> None:
    """Every owner dies right after the next put; each new owner takes over only some buckets."""
    expected, rng = ExpectedTopic(), random.Random(5)
    for turn in range(12):
        owner = CrashableTopic(tmp_path)
        buckets = rng.sample(range(BUCKETS), k=rng.randint(1, 3))
        parts = {b: [{"id": f"{turn}.{b}", "n": turn}] for b in buckets}
        expected.add(f"put-{turn}", parts)
        await owner.put(parts)
        await owner.drop()
        logs = list((tmp_path / "queues" / "topic" / log_note.LOGS_FOLDER).iterdir())
        assert len(logs) <= BUCKETS, "logs that no bucket needs were not removed"
    await check_topic(tmp_path, expected, expected.puts)


async def test_log_is_read_once_for_all_buckets_that_a_process_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from persisting.bucket import log_index

    topic = RecordedTopic(tmp_path, recorder=Unrecorded())
    await topic.put()
    await topic.topic.drop()
    made = []
    index = log_index.LogIndex
    monkeypatch.setattr(log_index, "LogIndex", lambda *args: made.append(args) or index(*args))
    again = CrashableTopic(tmp_path)
    topic.expected.check(await again.read(), topic.expected.puts)
    assert len(made) == 1
    await again.close()


# Processes


OWNER = """
import asyncio, json, sys
import lance
from persisting.errors import StorageError
from persisting.queue import PersistingBackend
from persisting.topic.address import TopicAddress
from persisting.topic.local import LocalTopic
from persisting.topic.local_handle import agreed_config
from persisting.topic.open_local import topic_spec

async def main():
    options = json.loads(sys.argv[2])
    spec, _ = topic_spec("topic", num_buckets=4, backend="persisting", backend_options=options)
    folder, config, _ = agreed_config(spec, sys.argv[1])
    topic = LocalTopic(TopicAddress.in_folder(folder), config, PersistingBackend)
    print("ready", flush=True)
    number = 0
    for line in iter(sys.stdin.readline, ""):
        what, *words = json.loads(line)
        try:
            if what == "open":
                for bucket in words:
                    await topic.backend(bucket)
            elif what == "close":
                for bucket in words:
                    await topic.close_bucket(bucket)
            elif what == "put":
                # Until the parent kills this process: each put is reported before and after.
                name, buckets, count = words
                while count:
                    parts = [(b, [{"id": f"{name}.{number}.{b}", "n": number}]) for b in buckets]
                    print(json.dumps(["begin", number]), flush=True)
                    await topic.put_parts(parts)
                    print(json.dumps(["done", number]), flush=True)
                    number, count = number + 1, count - 1
            print(json.dumps(["ok"]), flush=True)
        except StorageError as exc:
            print(json.dumps(["error", str(exc)]), flush=True)

asyncio.run(main())
"""


class OwnerProcess:
    """An owner in a process of its own."""

    def __init__(self, root: Path, name: str, **options: Any) -> None:
        self.name = name
        given = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None, **options}
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", OWNER, str(root / "queues"), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def send(self, *words: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(words) + "\n")
        self._child.stdin.flush()

    def answers(self) -> list[Any]:
        """Return what it says until the end of a command."""
        said: list[Any] = []
        while True:
            said.append(json.loads(self._line()))
            if said[-1][0] == "error":
                raise PromiseBroken(f"{self.name}: {said[-1]}")
            if said[-1] == ["ok"]:
                return said

    def do(self, *words: Any) -> list[Any]:
        self.send(*words)
        return self.answers()

    def kill(self) -> list[Any]:
        """Kill it; return what it had said."""
        self._child.send_signal(signal.SIGKILL)
        assert self._child.stdout is not None
        rest = self._child.stdout.read()
        self._child.wait()
        self._child.stdout.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        return [json.loads(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]


async def kill_owners(root: Path, rounds: int, seed: int) -> None:
    """Two processes with two buckets each put at full speed; kill one or both of them."""
    rng, expected = random.Random(seed), ExpectedTopic()
    required: list[str] = []
    for turn in range(rounds):
        pairs = rng.sample(range(BUCKETS), k=BUCKETS)
        owners = [OwnerProcess(root, f"{turn}.{n}") for n in range(2)]
        held = [sorted(pairs[:2]), sorted(pairs[2:])]
        try:
            for owner, buckets in zip(owners, held, strict=True):
                owner.do("open", *buckets)
            # A bucket moves while both logs are in use.
            said = [
                owner.do("put", owner.name, b, 3) for owner, b in zip(owners, held, strict=True)
            ]
            owners[0].do("close", held[0][0])
            owners[1].do("open", held[0][0])
            moved = [held[0][1:], [*held[1], held[0][0]]]
            for owner, buckets in zip(owners, moved, strict=True):
                owner.send("put", owner.name, buckets, 10_000)
            for owner in owners:
                for _ in range(rng.randint(1, 40)):
                    said[owners.index(owner)].append(json.loads(owner._line()))
        finally:
            rest = [owner.kill() for owner in owners]
        for owner, first, before, after in zip(owners, held, said, moved, strict=True):
            words = before + rest[owners.index(owner)]
            begun = [word[1] for word in words if word[0] == "begin"]
            for number in begun:
                buckets = first if number < 3 else after
                name = f"{owner.name}.{number}"
                expected.add(name, {b: [{"id": f"{name}.{b}", "n": number}] for b in buckets})
            required += [f"{owner.name}.{word[1]}" for word in words if word[0] == "done"]
        expected = await _recovered(root, expected, required)


async def _recovered(root: Path, expected: ExpectedTopic, required: list[str]) -> ExpectedTopic:
    """Open the buckets with two owners, of which one dies while it recovers; check everything."""
    first, second = CrashableTopic(root), CrashableTopic(root)
    found: Parts = {}
    await first.backend(0)
    await second.backend(1)
    await first.drop()
    for bucket in range(BUCKETS):
        found[bucket] = await (await second.backend(bucket)).get(0, None)
    await second.drop()
    _check_moved(expected, found, required)
    kept = ExpectedTopic(rows=found)
    return kept


def _check_moved(expected: ExpectedTopic, found: Parts, required: list[str]) -> None:
    """The order of two owners in one bucket is that of the move; a put that was not acknowledged
    may be there."""
    stored = {row["id"] for rows in found.values() for row in rows}
    for bucket, rows in found.items():
        before = [row["id"] for row in expected.rows.get(bucket, [])]
        ids = [row["id"] for row in rows]
        if len(set(ids)) != len(ids) or not set(ids) <= set(before):
            raise PromiseBroken(f"bucket {bucket}: {ids} of {before}")
        by_owner: dict[str, list[int]] = {}
        for name in ids:
            owner, number, _ = name.rsplit(".", 2)
            by_owner.setdefault(owner, []).append(int(number))
        for owner, numbers in by_owner.items():
            if numbers != sorted(numbers):
                raise PromiseBroken(f"bucket {bucket}: {numbers} of {owner} are reordered")
    for name, parts in expected.puts.items():
        ids = [row["id"] for rows in parts.values() for row in rows]
        missing = [i for i in ids if i not in stored]
        if missing and (name in required or len(missing) < len(ids)):
            raise PromiseBroken(f"put {name} lacks {missing}")


async def test_killed_processes_with_moving_buckets_lose_and_tear_no_put(tmp_path: Path) -> None:
    await kill_owners(tmp_path, 2, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
async def test_many_killed_processes_with_moving_buckets_lose_and_tear_no_put(
    tmp_path: Path, seed: int
) -> None:
    await kill_owners(tmp_path, 25, seed=100 + seed)


async def test_bucket_of_a_living_owner_cannot_be_taken(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    await owners.move(0, 0)
    with pytest.raises(StorageError, match="open for writing"):
        await owners.owners[1].backend(0)
    await owners.move(1, 1)
    await owners.put(0)
    await owners.put(1)
    await owners.kill(0)
    await owners.kill(1)
    await check_topic(tmp_path, owners.expected, owners.expected.puts)
