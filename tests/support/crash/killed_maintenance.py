"""Kill owners of one bucket in the middle of maintenance; check the state that they leave.

The bucket holds what was acknowledged, and possibly what the interrupted step leads to.
"""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from persisting.queue import PersistingBackend
from support.crash.checks import (
    Content,
    CrashableBucket,
    Record,
    State,
    check_health,
    check_state,
    read_state,
    same_value,
)
from support.crash.kill import LOG, Mode, run_and_kill

Line = dict[str, Any]

ROUNDS = (
    Mode("maintenance", {**LOG, "wal_sync_interval": 0.0, "keep_versions": 0.05}),
    Mode("concurrent-maintenance", {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 9}),
    Mode("evolving-maintenance", {**LOG, "wal_sync_interval": 1.0, "keep_versions": 0.3}),
    Mode(
        "maintenance",
        {**LOG, "wal_sync_interval": 1.0, "flush_threshold": 5, "compression": "zstd"},
    ),
    Mode("concurrent-maintenance", {**LOG, "wal_sync_interval": 0.0, "keep_versions": 0.05}),
)


class ExpectedHistory:
    """All records that were put, and the state that follows from what the owners reported."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.state = State()

    def content(self, start: int, ids: list[str]) -> Content:
        return Content(start, tuple(self.records[name] for name in ids))

    def follow(self, lines: list[Line]) -> list[State]:
        """Follow consecutive steps; return the states that may be found."""
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
        """Yield the states that a step may lead to; ``result`` is None if it was interrupted."""
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


def check_concurrent(found: State, history: ExpectedHistory, lines: list[Line]) -> None:
    """Check puts of several tasks concurrent with compaction, retention and tags."""
    before, now = history.state.now, found.now
    ids = [row["id"] for row in now.rows]
    assert len(set(ids)) == len(ids), "a record is stored twice"
    for line in lines:
        if line.get("begin") == "put":
            history.records |= {record["id"]: record for record in line["records"]}
        if line.get("done") == "retain":
            assert now.start >= line["result"]["start_offset"], "retention was undone"
    assert now.start >= before.start
    kept = before.rows[now.start - before.start :]
    assert ids[: len(kept)] == [row["id"] for row in kept], "earlier records moved"
    for row in now.rows:
        assert same_value(history.records[row["id"]], row), f"{row} differs from what was put"
    check_producers(ids[len(kept) :], lines, whole=now.start <= before.end)
    check_tags(found, history.state, lines)


def check_producers(ids: list[str], lines: list[Line], *, whole: bool) -> None:
    """Each task's puts are in order and complete up to the last acknowledged put."""
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
        stored = got.pop(task, [])
        if not whole and not stored:
            continue  # retention dropped all of them
        first = names.index(stored[0]) if stored else 0
        assert first == 0 or not whole, f"lost: {names[:first]}"
        assert names[first : first + len(stored)] == stored, f"missing or reordered: {stored}"
        end = first + len(stored)
        assert end in (acknowledged[task], len(names)), (
            f"lost, or part of a batch is missing: {stored} of {names}"
        )
    assert not got, f"never put: {got}"


def check_tags(found: State, before: State, lines: list[Line]) -> None:
    """Tags hold the rows that were read from them, at the same offsets as in the bucket."""
    seen: dict[str, list[str]] = {k: [r["id"] for r in v.rows] for k, v in before.tags.items()}
    sure: dict[str, tuple[int, int]] = {}
    begun = ""
    for line in lines:
        if line.get("begin") == "tag":
            begun = line["name"]
            seen.pop(begun, None)  # may be replaced from here on
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
        if name in sure:  # tagged in this round, which restores nothing
            now = {found.now.start + i: row["id"] for i, row in enumerate(found.now.rows)}
            for offset, row in enumerate(content.rows, content.start):
                assert now.get(offset, row["id"]) == row["id"], f"offset {offset} moved"


def kill_owner(folder: Path, number: int, rng: random.Random) -> list[Line]:
    """Return what an owner reported before it was killed."""
    mode = ROUNDS[number % len(ROUNDS)]
    after_lines = 3 + rng.choice((0, rng.randrange(40), rng.randrange(200)))
    killed = run_and_kill(folder, number, mode, rng, after_lines=after_lines, delay=0.05)
    assert killed.status == -signal.SIGKILL, killed.errors
    return [json.loads(line) for line in killed.lines if line.startswith("{")]


async def kill_owners(folder: Path, count: int, seed: int) -> int:
    """Kill ``count`` owners of one bucket, one after another; return how many steps they did."""
    rng, history, steps = random.Random(seed), ExpectedHistory(), 0
    for number in range(count):
        lines = kill_owner(folder, number, rng)
        handle = CrashableBucket(folder, lambda path: PersistingBackend(0, str(path), **LOG))
        found = await read_state(handle.backend)
        if ROUNDS[number % len(ROUNDS)].name == "concurrent-maintenance":
            check_concurrent(found, history, lines)
            history.state = found
        else:
            history.state = check_state(found, history.follow(lines))
        await check_health(handle.backend, found.now.rows)
        steps += sum("done" in line for line in lines)
        await (handle.drop() if rng.random() < 0.5 else handle.backend.close())
    return steps
