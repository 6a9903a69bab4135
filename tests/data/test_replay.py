"""ReplayBuffer: sampling, retention, tasks, checkpoints."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import children
from support.faults import FaultyFileSystem
from support.training_topics import add_rows, make_topic

from persisting import fs as filesystem
from persisting.data import ReplayBuffer, Sample
from persisting.errors import InvalidArgument, StorageError
from persisting.queue import write_queue


def ids(sample: Sample) -> list[int]:
    found: list[int] = sample.rows.column("id").to_pylist()
    return found


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    """A buffer of 200 records, with ids from 0 and a policy version for every 20 of them."""
    options = {"flush_interval": None}  # else files change 5 seconds later
    with ReplayBuffer(
        tmp_path / "replay", num_buckets=3, seed=1, backend_options=options
    ) as buffer:
        buffer.add([record(n) for n in range(200)])
        yield buffer


def record(number: int) -> dict[str, Any]:
    return {"id": number, "policy_version": number // 20, "text": f"row {number}"}


def test_added_records_are_sampled_immediately(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "replay") as buffer:
        assert len(buffer.sample(4)) == 0
        for number in range(5):
            buffer.add(record(number))
            assert len(buffer) == number + 1
            assert set(ids(buffer.sample(200))) == set(range(number + 1))


def test_records_are_durable_and_found_by_the_next_buffer(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "replay") as buffer:
        buffer.add([record(n) for n in range(50)])
    with ReplayBuffer(tmp_path / "replay") as buffer:
        assert sorted(ids(buffer.sample(50, replacement=False))) == list(range(50))


def test_restore_matters_only_if_it_removes_records_that_the_buffer_knows(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 50)
    with ReplayBuffer(folder) as buffer:
        assert sorted(ids(buffer.sample(50, replacement=False))) == list(range(50))
        add_rows(folder, range(50, 80))
        asyncio.run(_restore(folder, "v1"))
        add_rows(folder, range(100, 110))
        expected = [*range(50), *range(100, 110)]
        while len(buffer) < len(expected):  # it looks for records from time to time
            time.sleep(0.01)
        assert sorted(ids(buffer.sample(60, replacement=False))) == expected
        asyncio.run(_restore(folder, "v1"))
        with pytest.raises(StorageError, match="not those that this buffer knows"):
            _sample_until_it_raises(buffer)


def _sample_until_it_raises(buffer: ReplayBuffer) -> None:
    while True:  # it looks for restores from time to time
        buffer.sample(1)


async def _restore(folder: Path, tag: str) -> None:
    async with await write_queue(topic=folder.name, storage_path=str(folder.parent)) as writer:
        await writer.restore(tag)


def test_uniform_sample_has_equal_chances_and_weights(buffer: ReplayBuffer) -> None:
    found: Counter[int] = Counter()
    for _ in range(100):
        sample = buffer.sample(200)
        assert (sample.weights == 1).all()
        found.update(ids(sample))
    counts = np.array([found[n] for n in range(200)])
    # 20,000 draws over 200 records: chi-squared with 199 degrees of freedom.
    assert ((counts - 100) ** 2 / 100).sum() < 300


def test_sampled_rows_belong_to_their_keys(buffer: ReplayBuffer) -> None:
    sample = buffer.sample(100)
    by_key = dict(zip(sample.keys.tolist(), sample.rows.to_pylist(), strict=True))
    again = buffer.sample(300)
    for key, row in zip(again.keys.tolist(), again.rows.to_pylist(), strict=True):
        assert row == record(row["id"])
        assert by_key.get(key, row) == row


@pytest.mark.parametrize("by", ["uniform", "priority"])
@pytest.mark.parametrize("n", [10, 60, 200, 500])
def test_sample_without_replacement_has_no_record_twice(
    buffer: ReplayBuffer, by: str, n: int
) -> None:
    found = ids(buffer.sample(n, by=by, replacement=False))
    assert len(found) == len(set(found)) == min(n, 200)


def test_priorities_decide_chances_and_weights(buffer: ReplayBuffer) -> None:
    everything = buffer.sample(200, replacement=False)
    priorities = np.where(np.array(ids(everything)) < 10, 8.0, 1.0)
    assert buffer.update_priorities(everything.keys, priorities) == 200
    found: Counter[bool] = Counter()
    weights: dict[bool, set[float]] = {True: set(), False: set()}
    for _ in range(50):
        sample = buffer.sample(200, by="priority", beta=1.0)
        for number, weight in zip(ids(sample), sample.weights, strict=True):
            found[number < 10] += 1
            weights[number < 10].add(round(float(weight), 6))
    heavy, light = 10 * 8.0**0.6, 190 * 1.0
    assert found[True] / 10_000 == pytest.approx(heavy / (heavy + light), abs=0.02)
    assert weights[False] == {1.0}
    assert weights[True] == {round(8.0**-0.6, 6)}


def test_one_heavy_record_does_not_stop_a_sample_without_replacement(
    buffer: ReplayBuffer,
) -> None:
    sample = buffer.sample(200, replacement=False)
    buffer.update_priorities(sample.keys, [1e30] + [0.0] * 199)
    found = buffer.sample(20, by="priority", replacement=False)
    assert len(set(found.keys.tolist())) == 20
    assert sample.keys[0] in found.keys


def test_new_records_have_the_largest_priority(buffer: ReplayBuffer) -> None:
    sample = buffer.sample(200, replacement=False)
    buffer.update_priorities(sample.keys, np.full(200, 1e-6))
    buffer.update_priorities(sample.keys[:1], [1000.0])
    buffer.add(record(1000))
    found = Counter(ids(buffer.sample(1000, by="priority")))
    assert found[1000] > 300


def test_recent_records_are_sampled_more_often(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "replay", num_buckets=2) as buffer:
        buffer.add([record(n) for n in range(50)])
        time.sleep(0.3)
        buffer.add([record(n) for n in range(50, 100)])
        recent = sum(n >= 50 for n in ids(buffer.sample(2000, by="recency", half_life=0.1)))
        assert recent > 1600
        even = sum(n >= 50 for n in ids(buffer.sample(2000, by="recency", half_life=1e6)))
        assert 850 < even < 1150


def test_condition_bounds_staleness(buffer: ReplayBuffer) -> None:
    for version in (9, 5, 9):
        sample = buffer.sample(300, where=f"policy_version >= {version - 2}")
        versions = set(sample.rows.column("policy_version").to_pylist())
        assert versions == set(range(version - 2, 10))
    buffer.add([record(n) for n in range(200, 220)])
    found = set(ids(buffer.sample(400, where="policy_version >= 7")))
    assert found == set(range(140, 220)), "records that were added later are matched too"
    assert len(buffer.sample(5, where="policy_version > 99")) == 0


def test_condition_applies_to_flushed_and_buffered_records(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    with ReplayBuffer(folder) as buffer:
        buffer.add({"id": 100, "group": 3})
        found = set(ids(buffer.sample(500, where="`group` = 3")))
        assert found == {n for n in range(100) if n % 7 == 3} | {100}


@pytest.fixture
def grouped(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(tmp_path / "groups", num_buckets=3, bucket_column="prompt") as buffer:
        buffer.add([{"id": n, "prompt": f"p{n % 10}", "v": n // 40} for n in range(75)])
        yield buffer


def test_only_complete_groups_are_sampled(grouped: ReplayBuffer) -> None:
    sample = grouped.sample(100, group_by="prompt", group_size=8)
    prompts = np.array(sample.rows.column("prompt").to_pylist()).reshape(100, 8)
    numbers = np.array(ids(sample)).reshape(100, 8)
    assert (prompts == prompts[:, :1]).all()
    # 75 records of 10 prompts: the first five prompts have 8 records each, the others 7.
    assert set(prompts[:, 0]) == {f"p{n}" for n in range(5)}
    assert all(sorted(row) == sorted(set(row)) for row in numbers.tolist())
    grouped.add([{"id": n, "prompt": f"p{n % 10}", "v": 1} for n in range(75, 80)])
    sample = grouped.sample(200, group_by="prompt", group_size=8)
    assert set(sample.rows.column("prompt").to_pylist()) == {f"p{n}" for n in range(10)}


def test_groups_are_taken_once_and_must_match_as_a_whole(grouped: ReplayBuffer) -> None:
    first = grouped.sample(3, group_by="prompt", group_size=4, task="critic")
    rest = grouped.sample(99, group_by="prompt", group_size=4, task="critic")
    found = ids(first) + ids(rest)
    assert len(found) == len(set(found)) == 60
    matching = grouped.sample(99, group_by="prompt", group_size=4, where="v = 0", replacement=False)
    assert sorted(ids(matching)) == list(range(40))


def test_groups_are_the_same_after_retention_and_restore(tmp_path: Path) -> None:
    """Retention removes the first records of a group: the groups after it must not shift."""
    options = {"flush_interval": None, "compaction": False}  # retention drops whole fragments
    path = tmp_path / "replay"

    async def put(numbers: range, keep: int | None = None) -> None:
        async with await write_queue(topic="replay", storage_path=str(tmp_path)) as writer:
            await writer.put([{"id": n, "prompt": "p"} for n in numbers])
            await writer.flush()
            if keep is not None:
                await writer.retain(rows=keep)

    with ReplayBuffer(path, num_buckets=1, backend_options=options) as buffer:
        assert len(buffer) == 0
    asyncio.run(put(range(2)))
    asyncio.run(put(range(2, 11)))
    grouping = {"group_by": "prompt", "group_size": 4, "task": "critic"}
    with ReplayBuffer(path) as buffer:
        assert len(buffer) == 11
        sample = buffer.sample(1, where="id < 4", **grouping)
        assert sorted(ids(sample)) == [0, 1, 2, 3]
        value = buffer.checkpoint()
    asyncio.run(put(range(11, 13), keep=11))
    for _ in range(2):  # also through a checkpoint of a buffer that has sampled no group
        with ReplayBuffer(path) as buffer:
            buffer.restore(value)
            assert len(buffer) == 11
            value = buffer.checkpoint()
    with ReplayBuffer(path) as buffer:
        buffer.restore(value)
        rest = np.array(ids(buffer.sample(9, **grouping))).reshape(-1, 4).tolist()
        assert sorted(rest) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_group_of_another_field_than_the_bucket_column_is_refused(grouped: ReplayBuffer) -> None:
    with pytest.raises(InvalidArgument, match="create the topic with bucket_column='v'"):
        grouped.sample(1, group_by="v", group_size=2)


def test_group_of_an_unknown_field_is_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "single", num_buckets=1) as buffer:
        assert len(buffer.sample(1, group_by="nope", group_size=2)) == 0
        buffer.add(record(1))
        with pytest.raises(InvalidArgument, match="group_by='nope'; the fields are: 'id'"):
            buffer.sample(1, group_by="nope", group_size=2)


def test_checkpoint_of_another_buffer_is_restored_with_its_records(
    buffer: ReplayBuffer, tmp_path: Path
) -> None:
    with ReplayBuffer(tmp_path / "replay", seed=1) as older:
        time.sleep(0.2)
        buffer.add([record(n) for n in range(200, 400)])
        buffer.sample(1)
        value = buffer.checkpoint()
        older.restore(value)
        found = ids(older.sample(1000, by="recency", half_life=0.02))
        assert found == ids(buffer.sample(1000, by="recency", half_life=0.02))
        assert sum(n >= 200 for n in found) > 900


def test_task_takes_each_record_once(buffer: ReplayBuffer) -> None:
    found: list[int] = []
    while len(sample := buffer.sample(64, task="critic")):
        found += ids(sample)
    assert sorted(found) == list(range(200))
    assert len(buffer.sample(64, task="actor")) == 64, "tasks do not disturb each other"
    buffer.add([record(n) for n in range(200, 205)])
    assert sorted(ids(buffer.sample(64, task="critic"))) == list(range(200, 205))


def test_sample_that_fails_takes_no_records(buffer: ReplayBuffer, tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "replay", columns=["id", "later"]) as other:
        with pytest.raises(InvalidArgument, match="columns names 'later'"):
            other.sample(50, task="critic")
        buffer.add({"id": 200, "later": 1})
        other.add({"id": 201, "later": 1})
        assert sorted(ids(other.sample(500, task="critic"))) == list(range(202))


def test_sample_waits_for_records(buffer: ReplayBuffer) -> None:
    buffer.sample(200, task="critic")
    started = time.monotonic()
    assert len(buffer.sample(1, task="critic", timeout=0.2)) == 0
    assert time.monotonic() - started >= 0.2


def test_retention_limits_the_buffer(tmp_path: Path) -> None:
    options = {
        "retention_rows": 100,
        "flush_threshold": 50,
        "flush_interval": None,
        "compaction": False,  # retention drops whole fragments
    }
    with ReplayBuffer(tmp_path / "replay", num_buckets=2, backend_options=options) as buffer:
        for start in range(0, 5000, 50):
            buffer.add([record(n) for n in range(start, start + 50)])
            sample = buffer.sample(20, by="priority", task="critic")
            buffer.update_priorities(sample.keys, np.ones(len(sample)))
        deadline = time.monotonic() + 60
        while len(buffer) > 4000 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = ids(buffer.sample(5000, replacement=False))
        assert 100 <= len(found) == len(set(found)) <= 4000
        assert max(found) == 4999
        assert min(found) > 0
        assert buffer.update_priorities([0, 1], [1.0, 1.0]) == 0, "those records were removed"


def test_checkpoint_restores_the_next_samples(buffer: ReplayBuffer) -> None:
    sample = buffer.sample(50)
    buffer.update_priorities(sample.keys, np.linspace(0.1, 9, 50))
    buffer.sample(30, task="critic")

    def following() -> list[Any]:
        drawn = [buffer.sample(20, by="priority") for _ in range(3)]
        taken = buffer.sample(500, task="critic")
        return [*(s.keys.tolist() + s.weights.tolist() for s in drawn), taken.keys.tolist()]

    value = json.loads(json.dumps(buffer.checkpoint()))
    assert len(json.dumps(value)) < 400
    expected = following()
    assert len(expected[-1]) == 170
    buffer.restore(value)
    assert following() == expected
    buffer.restore(value)
    assert following() == expected, "a checkpoint can be restored again"


def test_checkpoint_is_restored_in_another_process(buffer: ReplayBuffer, tmp_path: Path) -> None:
    sample = buffer.sample(50)
    buffer.update_priorities(sample.keys, np.linspace(0.1, 9, 50))
    first = set(ids(buffer.sample(30, task="critic")))
    value = buffer.checkpoint()
    lost = set(ids(buffer.sample(40, task="critic")))  # after the checkpoint: drawn again
    buffer.add([record(n) for n in range(200, 250)])
    code = """
import json, sys
from persisting.data import ReplayBuffer
with ReplayBuffer(sys.argv[1], seed=99) as buffer:
    buffer.restore(json.loads(sys.argv[2]))
    print(buffer.sample(1000, task="critic").rows.column("id").to_pylist())
    print(buffer.sample(20, by="priority").keys.tolist())
"""
    taken, drawn = children.run(code, tmp_path / "replay", json.dumps(value)).splitlines()
    rest = set(json.loads(taken))
    assert rest == set(range(250)) - first
    assert lost <= rest
    buffer.restore(value)
    buffer.sample(1000, task="critic")
    assert buffer.sample(20, by="priority").keys.tolist() == json.loads(drawn)


def test_restore_after_retention_leaves_out_what_was_removed(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 1000, buckets=1)
    with ReplayBuffer(folder) as buffer:
        first = ids(buffer.sample(100, task="critic"))
        value = buffer.checkpoint()

    async def retain() -> None:
        async with await write_queue(topic="rows", storage_path=str(tmp_path)) as writer:
            await writer.put([record(n) for n in range(1000, 2000)])
            await writer.flush()
            await writer.retain(rows=1000)

    asyncio.run(retain())
    with ReplayBuffer(folder) as buffer:
        buffer.restore(value)
        found = ids(buffer.sample(5000, task="critic"))
        assert sorted(found) == list(range(1000, 2000))
        assert not set(found) & set(first)


def test_restore_does_not_change_the_topic(buffer: ReplayBuffer, tmp_path: Path) -> None:
    value = buffer.checkpoint()
    folder = tmp_path / "replay"
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    buffer.restore(value)
    buffer.sample(10)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    assert len(buffer) == 200


def test_damaged_missing_and_foreign_checkpoints_are_refused(
    buffer: ReplayBuffer, tmp_path: Path
) -> None:
    value = buffer.checkpoint()
    expected = buffer.sample(10).keys.tolist()
    buffer.restore(value)
    path = tmp_path / "replay" / "replay" / value["file"]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StorageError, match="is damaged; restore the file from a copy"):
        buffer.restore(value)
    path.write_bytes(data)
    for wrong, reason in (
        ({**value, "topic": "other"}, "the checkpoint is of another topic"),
        ({**value, "file": "../../topic.json"}, "not a checkpoint of a replay buffer"),
        ({**value, "format": 9}, "upgrade persisting"),
        ({}, "not a checkpoint of a replay buffer"),
        (None, "not a checkpoint of a replay buffer"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            buffer.restore(wrong)
    assert buffer.sample(10).keys.tolist() == expected, "a refused restore changes nothing"
    assert buffer.remove_checkpoint(value)
    assert not buffer.remove_checkpoint(value)
    with pytest.raises(StorageError, match="does not exist"):
        buffer.restore(value)


def test_checkpoint_of_another_alpha_is_refused(buffer: ReplayBuffer, tmp_path: Path) -> None:
    value = buffer.checkpoint()
    with (
        ReplayBuffer(tmp_path / "replay", alpha=1.0) as other,
        pytest.raises(InvalidArgument, match=r"taken with alpha=0\.6"),
    ):
        other.restore(value)


@pytest.mark.parametrize("call", ["make_folder", "create", "write", "sync", "sync_folder"])
def test_checkpoint_that_could_not_be_synced_raises(
    buffer: ReplayBuffer, tmp_path: Path, call: str
) -> None:
    with filesystem.use(FaultyFileSystem()) as disk:
        assert isinstance(disk, FaultyFileSystem)
        disk.fail_always(call)
        with pytest.raises(StorageError, match="cannot write the checkpoint"):
            buffer.checkpoint()
        disk.heal()
        buffer.restore(buffer.checkpoint())


def test_checkpoint_is_synced_before_it_is_named(buffer: ReplayBuffer) -> None:
    with filesystem.use(FaultyFileSystem()) as disk:
        assert isinstance(disk, FaultyFileSystem)
        buffer.checkpoint()
        assert disk.calls[-5:] == ["create", "write", "sync", "rename", "sync_folder"]


CRASHING = """
import json, os, sys
from persisting.data import ReplayBuffer
buffer = ReplayBuffer(sys.argv[1], num_buckets=2)
buffer.add([{"id": n} for n in range(300)])
used = buffer.sample(100, task="critic").rows.column("id").to_pylist()
print(json.dumps([used, buffer.checkpoint()]), flush=True)
buffer.add([{"id": n} for n in range(300, 400)])
buffer.sample(50, task="critic")
print("done", flush=True)
sys.stdin.read()
"""


def test_killed_trainer_continues_with_nothing_lost_and_nothing_used_twice(
    tmp_path: Path,
) -> None:
    with children.python(CRASHING, tmp_path / "replay") as trainer:
        used, value = json.loads(children.wait_for_line(trainer))
        assert children.wait_for_line(trainer) == "done"
        trainer.kill()
        trainer.wait()
    with ReplayBuffer(tmp_path / "replay") as buffer:
        buffer.restore(value)
        rest = ids(buffer.sample(1000, task="critic"))
    assert sorted(used + rest) == list(range(400))


STEPS = """
import json, os, signal, sys
from persisting.data import ReplayBuffer

folder, saved, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
steps = 0

def step():
    global steps
    steps += 1
    if steps == last_step:
        os.kill(os.getpid(), signal.SIGKILL)

buffer = ReplayBuffer(folder)
used, value = [], None
if os.path.exists(saved):
    used, value = json.load(open(saved))
    buffer.restore(value)
found = [None]
while last_step or len(found):  # the last run only uses what is left
    if last_step:
        buffer.add([{"id": len(buffer)}])
        buffer.add([{"id": len(buffer)}])
        step()
    found = buffer.sample(3 if last_step else 50, task="critic")
    step()
    buffer.update_priorities(found.keys, [2.0] * len(found))
    used += found.rows.column("id").to_pylist() if len(found) else []
    step()
    after = buffer.checkpoint()
    step()
    with open(saved + ".new", "w") as file:
        json.dump([used, after], file)
    step()
    os.replace(saved + ".new", saved)
    step()
    if value is not None:
        buffer.remove_checkpoint(value)
    value = after
    step()
print(json.dumps([sorted(used), len(buffer)]))
"""


def _run_steps(folder: Path, saved: Path, last_step: int) -> str:
    command = [sys.executable, "-c", STEPS, str(folder), str(saved), str(last_step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == (-signal.SIGKILL if last_step else 0), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "kills",
    [
        [9, 3, 8],
        pytest.param(range(1, 31), marks=pytest.mark.nightly),
    ],
    ids=["some steps", "every step"],
)
@pytest.mark.timeout(3600)  # starts an interpreter for each kill
def test_trainer_that_is_killed_at_a_step_uses_each_record_once(
    tmp_path: Path, kills: list[int]
) -> None:
    for last_step in kills:
        _run_steps(tmp_path / "replay", tmp_path / "saved", last_step)
    used, records = json.loads(_run_steps(tmp_path / "replay", tmp_path / "saved", 0))
    assert records >= 2 * len(kills)
    assert used == list(range(records))


def test_topic_of_another_process_is_sampled_and_added_to(tmp_path: Path) -> None:
    with children.python(CRASHING, tmp_path / "replay") as trainer:
        children.wait_for_line(trainer)
        assert children.wait_for_line(trainer) == "done"
        with ReplayBuffer(tmp_path / "replay") as buffer:
            assert len(buffer) == 400
            assert len(set(ids(buffer.sample(400, replacement=False)))) == 400
            buffer.add([{"id": n} for n in range(400, 420)])
            assert sorted(ids(buffer.sample(500, replacement=False))) == list(range(420))
            trainer.kill()
            trainer.wait()
            buffer.add({"id": 420})
            assert sorted(ids(buffer.sample(500, replacement=False))) == list(range(421))


async def test_writer_of_the_caller_is_used_and_left_open(tmp_path: Path) -> None:
    async with await write_queue(
        topic="replay", storage_path=str(tmp_path), backend="persisting"
    ) as writer:

        def work() -> list[int]:
            with ReplayBuffer(tmp_path / "replay", writer=writer.sync()) as buffer:
                buffer.add([record(n) for n in range(10)])
                return ids(buffer.sample(10, replacement=False))

        assert sorted(await asyncio.to_thread(work)) == list(range(10))
        await writer.put(record(10))


def test_formats_and_columns_apply(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 20)
    with ReplayBuffer(folder, format="numpy", columns=["vector", "id"]) as buffer:
        rows = buffer.sample(5).rows
        assert list(rows) == ["vector", "id"]
        assert rows["vector"].shape == (5, 3)
        assert np.array_equal(rows["vector"][:, 0], rows["id"].astype("f4"))
    with (
        ReplayBuffer(folder, columns=["nope"]) as buffer,
        pytest.raises(InvalidArgument, match="columns names 'nope'"),
    ):
        buffer.sample(1)


def test_fields_that_appear_later_are_none_in_earlier_records(buffer: ReplayBuffer) -> None:
    buffer.add({"id": 900, "reward": 0.5})
    rows = {r["id"]: r for r in buffer.sample(201, replacement=False).rows.to_pylist()}
    assert rows[900] == {"id": 900, "policy_version": None, "text": None, "reward": 0.5}
    assert rows[3] == {**record(3), "reward": None}


def test_closed_buffer_raises_and_leaves_no_files(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    buffer = ReplayBuffer(tmp_path / "replay", cache_path=cache)
    buffer.add({"id": 1})
    assert len(list(cache.iterdir())) == 1
    buffer.close()
    buffer.close()
    assert list(cache.iterdir()) == []
    for call in (
        lambda: buffer.sample(1),
        lambda: buffer.add({"id": 2}),
        lambda: len(buffer),
        buffer.checkpoint,
    ):
        with pytest.raises(StorageError, match="the replay buffer is closed"):
            call()


FORK = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from persisting.data import ReplayBuffer
from persisting.errors import StorageError
buffer = ReplayBuffer(sys.argv[1])
buffer.add([{"id": n} for n in range(10)])
held, release = threading.Event(), threading.Event()
def hold():
    with buffer._lock:
        held.set()
        release.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(120)
    refused = 0
    for call in (lambda: buffer.sample(1), lambda: len(buffer), buffer.checkpoint):
        try:
            call()
        except StorageError as exc:
            refused += "forked from" in str(exc)
    buffer.close()
    os._exit(refused)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
release.set()
print(status, len(buffer.sample(5)))
buffer.close()
"""


def test_fork_while_a_thread_samples_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path / "replay")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.split() == ["3", "5"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be a whole number from 1"),
        ({"by": "newest"}, "by must be one of"),
        ({"by": "recency"}, "by='recency' and half_life go together"),
        ({"half_life": 3.0}, "by='recency' and half_life go together"),
        ({"by": "recency", "half_life": 0}, "half_life must be a number of seconds"),
        ({"beta": 2}, "beta must be a number from 0 to 1"),
        ({"group_by": "id"}, "group_by and group_size go together"),
        ({"group_by": "id", "group_size": 0}, "group_size must be a whole number from 1"),
        ({"task": ""}, "task must be a name"),
        ({"task": "a", "replacement": True}, "a task takes each record once"),
        ({"where": "nope > 1"}, "where='nope > 1' names 'nope'"),
        ({"where": "random() < 0.5"}, "uses random, which may select other rows"),
        ({"timeout": "soon"}, "timeout must be a number of seconds"),
    ],
)
def test_wrong_argument_of_a_sample_raises(
    buffer: ReplayBuffer, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        buffer.sample(**{"n": 5, **arguments})


def test_wrong_priorities_raise_and_change_nothing(buffer: ReplayBuffer) -> None:
    keys = buffer.sample(2).keys
    for wrong, reason in (
        ([1.0], "one value for each key"),
        ([1.0, float("nan")], "a priority is a finite number from 0, got nan"),
        ([1.0, -1.0], "a priority is a finite number from 0, got -1.0"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            buffer.update_priorities(keys, wrong)
    with pytest.raises(InvalidArgument, match="a finite number from 0, got inf"):
        buffer.update_priorities(keys, [1.0, float("inf")])
    with pytest.raises(InvalidArgument, match="belongs to no record"):
        buffer.update_priorities([10**9], [1.0])
    assert (buffer.sample(100, by="priority").weights == 1).all()


def test_priority_whose_power_overflows_raises(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "replay", alpha=10) as buffer:
        buffer.add([record(n) for n in range(10)])
        keys = buffer.sample(10, replacement=False).keys
        with pytest.raises(
            InvalidArgument, match=r"to the power of alpha=10\.0 is at most 1e\+250"
        ):
            buffer.update_priorities(keys, np.full(10, 1e100))
        buffer.update_priorities(keys, np.full(10, 1e24))
        assert len(set(buffer.sample(10, by="priority", replacement=False).keys.tolist())) == 10


def test_wrong_arguments_of_a_buffer_raise(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 1)
    for arguments, reason in (
        ({"alpha": -1}, "alpha must be a number from 0 to 10"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"num_buckets": 3}, "num_buckets is for a new topic"),
        ({"format": "pandas"}, "format must be one of"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            ReplayBuffer(folder, **arguments)  # type: ignore[arg-type]
