"""kill -9 at random moments of puts, flushes, compaction, retention, tags, restores and indexes.

What is found is what was acknowledged, and perhaps what the step that was interrupted leads to.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.crash.checking import (
    Content,
    Handle,
    Record,
    State,
    check_health,
    check_state,
    read_state,
    same,
)

from persisting.queue import PersistingBackend

CHILD = TESTS / "support" / "crash" / "child.py"
LOG: dict[str, Any] = {"enable_wal": True, "flush_interval": None}
Line = dict[str, Any]

ROUNDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("upkeep", {**LOG, "wal_sync_interval": 0.0, "keep_versions": 0.05}),
    ("upkeep-beside", {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 9}),
    ("evolving-upkeep", {**LOG, "wal_sync_interval": 1.0, "keep_versions": 0.3}),
    ("upkeep", {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 5, "compression": "zstd"}),
    ("upkeep-beside", {**LOG, "wal_sync_interval": 0.0, "keep_versions": 0.05}),
)


def run_and_kill(folder: Path, number: int, rng: random.Random) -> list[Line]:
    """What a child said before it was killed."""
    mode, options = ROUNDS[number % len(ROUNDS)]
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), str(number), mode, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    lines: list[bytes] = []
    enough = threading.Event()
    wanted = 3 + rng.choice((0, rng.randrange(40), rng.randrange(200)))

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if len(lines) >= wanted:
                enough.set()
        enough.set()

    reader = threading.Thread(target=read)
    reader.start()
    enough.wait(10)
    time.sleep(rng.uniform(0, 0.05))
    child.send_signal(signal.SIGKILL)
    assert child.stderr is not None
    errors = child.stderr.read().decode()
    child.wait()
    reader.join()
    child.stdout.close()  # type: ignore[union-attr]
    child.stderr.close()
    assert child.returncode == -signal.SIGKILL, errors
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


class Annals:
    """The records that were ever put, and the state that follows from what a child said."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.state = State()

    def content(self, start: int, ids: list[str]) -> Content:
        return Content(start, tuple(self.records[name] for name in ids))

    def tell_all(self, lines: list[Line]) -> list[State]:
        """Follow steps that came one after the other; what may be found."""
        for line in lines:
            if "begin" in line:
                if line["begin"] == "put":
                    self.records |= {record["id"]: record for record in line["records"]}
                begun = line
            elif "done" in line:
                (self.state,) = self.after(begun, line["result"])
        interrupted = lines and "begin" in lines[-1]
        return [self.state, *(self.after(begun, None) if interrupted else ())]

    def after(self, step: Line, result: Any) -> Iterator[State]:
        """What a step makes of the state; retention tells by its result how far it went."""
        state = self.state
        what = step["begin"]
        if what == "put":
            yield replace(state, now=state.now.with_more(*step["records"]))
        elif what == "tag":
            yield replace(state, tags={**state.tags, step["name"]: state.now})
        elif what == "delete_tag":
            rest = {k: v for k, v in state.tags.items() if k != step["name"]}
            yield replace(state, tags=rest)
        elif what == "restore":
            now = self.content(step["start"], step["ids"])
            yield replace(state, now=now, epoch=state.epoch + 1)
        elif what == "retain":
            most = max(state.now.start, state.now.end - step["rows"])
            starts = (
                range(state.now.start, most + 1) if result is None else [result["start_offset"]]
            )
            for start in starts:
                assert start <= most, f"{result}: fewer than {step['rows']} rows are left"
                yield replace(state, now=state.now.from_offset(start))
        else:
            yield state


def check_beside(found: State, annals: Annals, lines: list[Line]) -> None:
    """Puts of several tasks beside compaction, retention and tags."""
    before, now = annals.state.now, found.now
    ids = [row["id"] for row in now.rows]
    assert len(set(ids)) == len(ids), "doubled"
    for line in lines:
        if line.get("begin") == "put":
            annals.records |= {record["id"]: record for record in line["records"]}
        if line.get("done") == "retain":
            assert now.start >= line["result"]["start_offset"], "retention was undone"
    assert now.start >= before.start
    kept = before.rows[now.start - before.start :]
    assert ids[: len(kept)] == [row["id"] for row in kept], "earlier records moved"
    for row in now.rows:
        assert same(annals.records[row["id"]], row), f"{row} was put otherwise"
    check_producers(ids[len(kept) :], lines, whole=now.start <= before.end)
    check_tags(found, annals.state, lines)


def check_producers(ids: list[str], lines: list[Line], *, whole: bool) -> None:
    """Each task's puts in order, without a hole, to the last that was acknowledged."""
    got: dict[int, list[str]] = defaultdict(list)
    for name in ids:
        got[int(name.split(".")[1])].append(name)
    put: dict[int, list[str]] = defaultdict(list)
    acknowledged: dict[int, int] = defaultdict(int)
    for line in lines:
        task = line["task"]
        if line.get("begin") == "put":
            put[task] += [record["id"] for record in line["records"]]
        elif line.get("done") == "put":
            acknowledged[task] = len(put[task])
    for task, names in put.items():
        known = got.pop(task, [])
        if not whole and not known:
            continue  # all dropped by retention
        first = names.index(known[0]) if known else 0
        assert first == 0 or not whole, f"lost: {names[:first]}"
        assert names[first : first + len(known)] == known, f"a hole or another order: {known}"
        end = first + len(known)
        assert end in (acknowledged[task], len(names)), f"lost or torn: {known} of {names}"
    assert not got, f"never put: {got}"


def check_tags(found: State, before: State, lines: list[Line]) -> None:
    """A tag holds what was seen in it, and its rows are those of the bucket at their offsets."""
    seen: dict[str, list[str]] = {k: [r["id"] for r in v.rows] for k, v in before.tags.items()}
    sure: dict[str, tuple[int, int]] = {}
    begun = ""
    for line in lines:
        if line.get("begin") == "tag":
            begun = line["name"]
            seen.pop(begun, None)  # replaced, from now on or not at all
            sure.pop(begun, None)
        elif line.get("done") == "tag":
            result, begun = line["result"], ""
            sure[result["name"]] = (result["start_offset"], result["end_offset"])
        elif line.get("seen") == "tag":
            seen[line["name"]] = line["ids"]
    assert set(found.tags) - {begun} == {*before.tags, *sure, *seen} - {begun}
    for name, content in found.tags.items():
        if name in sure:
            assert (content.start, content.end) == sure[name]
        if name in seen and name != begun:
            assert [row["id"] for row in content.rows] == seen[name]
        if name in sure:  # of this round, in which nothing is restored
            now = {found.now.start + i: row["id"] for i, row in enumerate(found.now.rows)}
            for offset, row in enumerate(content.rows, content.start):
                assert now.get(offset, row["id"]) == row["id"], f"offset {offset} has moved"


async def rounds_of_killing(folder: Path, count: int, seed: int) -> int:
    """Kill ``count`` owners of one bucket, one after the other; how many steps they had done."""
    rng, annals, steps = random.Random(seed), Annals(), 0
    for number in range(count):
        lines = run_and_kill(folder, number, rng)
        handle = Handle(folder, lambda path: PersistingBackend(0, str(path), **LOG))
        found = await read_state(handle.backend)
        if ROUNDS[number % len(ROUNDS)][0] == "upkeep-beside":
            check_beside(found, annals, lines)
            annals.state = found
        else:
            annals.state = check_state(found, annals.tell_all(lines))
        await check_health(handle.backend, found.now.rows)
        steps += sum("done" in line for line in lines)
        await (handle.drop() if rng.random() < 0.5 else handle.backend.close())
    return steps


async def test_three_owners_killed_in_their_upkeep_lose_double_and_move_nothing(
    tmp_path: Path,
) -> None:
    assert await rounds_of_killing(tmp_path / "bucket", 3, seed=1) > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
async def test_two_hundred_owners_killed_in_their_upkeep_lose_double_and_move_nothing(
    tmp_path: Path, seed: int
) -> None:
    """Ten buckets, twenty owners each."""
    assert await rounds_of_killing(tmp_path / "bucket", 20, seed=100 + seed) > 100
