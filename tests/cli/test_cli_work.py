"""``work`` and ``groups`` on the command line, with work groups that are open or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_contracts import decoded
from support.cli_runner import Answer

from persisting.queue import read_queue, write_queue

LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0}


async def prepared(folder: Path) -> None:
    """Leave a topic of six records: 0 to 2 are dead letters, 3 is leased, 4 waits, 5 is new."""
    where = {"storage_path": str(folder)}
    async with (
        await write_queue(
            "tasks", **where, num_buckets=1, backend="persisting", backend_options=LOGGED
        ) as writer,
        await read_queue("tasks", **where, group="solvers", mode="work", lease=600.0) as jobs,
    ):
        await writer.put([{"id": n, "kind": "odd" if n % 2 else "even"} for n in range(6)])
        deliveries = await jobs.fetch(5, wait=True, timeout=30)
        for delivery in deliveries[:3]:
            await delivery.reject(f"reason {delivery.offset}")
        await deliveries[4].release(delay=600.0)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    asyncio.run(prepared(tmp_path))
    return tmp_path


def test_groups_shows_what_is_in_flight_retried_and_dead(
    storage: Path, call: Callable[..., Answer]
) -> None:
    (group,) = decoded("groups", call("groups", "tasks", "--json", "-s", storage).out)
    assert (group.group, group.members, group.lag) == ("solvers", 0, 3)
    work = group.work
    assert (work.in_flight, work.retrying, work.dead, work.kept) == (1, 1, 3, False)
    assert (work.unacknowledged, work.delivered) == (3, 5)
    assert work.oldest_available is not None
    shown = call("groups", "tasks", "-s", storage).out
    for word in ("in flight", "retries", "oldest", "dead", "nobody reads it"):
        assert word in shown


def test_dead_letters_are_listed_and_shown(storage: Path, call: Callable[..., Answer]) -> None:
    letters = decoded(
        "work dead", call("work", "dead", "tasks", "solvers", "--json", "-s", storage).out
    )
    assert [(d.number, d.offset, d.reason) for d in letters] == [
        (n + 1, n, f"reason {n}") for n in range(3)
    ]
    some = ("--where", "kind = 'odd'")
    listed = call("work", "dead", "tasks", "solvers", *some, "-s", storage)
    assert "reason 1" in listed.out
    assert "reason 0" not in listed.out
    letter = decoded(
        "work show", call("work", "show", "tasks", "solvers", "2", "--json", "-s", storage).out
    )
    assert (letter.record, letter.attempts) == ({"id": 1, "kind": "odd"}, 1)
    assert "reason 1" in call("work", "show", "tasks", "solvers", "2", "-s", storage).out
    missing = call("work", "show", "tasks", "solvers", "9", "-s", storage)
    assert missing.code != 0
    assert "no dead letter 9" in missing.err


def test_redrive_tries_first_asks_and_drives_each_letter_once(
    storage: Path, call: Callable[..., Answer]
) -> None:
    def redrive(*more: str) -> int:
        answer = call("work", "redrive", "tasks", "solvers", *more, "--json", "-s", storage)
        assert answer.code == 0, answer.err
        return decoded("work redrive", answer.out).redriven

    assert redrive("--dry-run") == 3
    assert redrive("--dry-run", "--where", "kind = 'odd'") == 1
    assert redrive("--number", "1", "--yes") == 1
    assert redrive("--offset", "1", "--yes") == 1
    assert redrive("--yes") == 1
    assert redrive("--yes") == 0
    assert "no dead letters" in call("work", "dead", "tasks", "solvers", "-s", storage).err
    refused = call("work", "redrive", "tasks", "solvers", "-s", storage)
    assert refused.code == 2  # not a terminal


def test_release_returns_the_leases_of_lost_members(
    storage: Path, call: Callable[..., Answer]
) -> None:
    def release(*more: str) -> int:
        answer = call("work", "release", "tasks", "solvers", *more, "--json", "-s", storage)
        assert answer.code == 0, answer.err
        return decoded("work release", answer.out).released

    assert release("--dry-run") == 1
    assert release("--yes") == 1
    assert release("--yes") == 0


@pytest.mark.parametrize(
    "words", [["dead"], ["release", "--yes"], ["redrive", "--yes"], ["show", "1"]]
)
def test_a_group_that_is_not_a_work_group_is_refused_and_not_created(
    storage: Path, call: Callable[..., Answer], words: list[str]
) -> None:
    command, *rest = words
    answer = call("work", command, "tasks", "solver", *rest, "-s", storage)
    assert answer.code != 0
    assert "there is no work group 'solver'" in answer.err
    assert "solvers" in answer.err
    assert not (storage / "tasks" / "groups" / "solver").exists()


async def test_commands_work_while_members_are_active(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    await prepared(tmp_path)
    member = await read_queue("tasks", storage_path=str(tmp_path), group="solvers", mode="work")
    answer = await asyncio.to_thread(
        call, "work", "redrive", "tasks", "solvers", "--yes", "--json", "-s", tmp_path
    )
    assert decoded("work redrive", answer.out).redriven == 3
    assert len(await member.fetch(10, wait=True, timeout=30)) == 4  # and the one that was new
    deleted = await asyncio.to_thread(
        call, "groups", "tasks", "solvers", "--delete", "--yes", "-s", tmp_path
    )
    assert deleted.code != 0
    assert "is being read" in deleted.err
    await member.close()


async def test_the_exporter_shows_work_groups(tmp_path: Path) -> None:
    from persisting.cli.metrics_exporter import TopicsCollector

    await prepared(tmp_path)
    samples = {
        sample.name: sample.value
        for family in TopicsCollector(str(tmp_path)).collect()
        for sample in family.samples
        if sample.labels.get("group") == "solvers" and "bucket" not in sample.labels
    }
    assert samples["persisting_work_in_flight_records"] == 1
    assert samples["persisting_work_retrying_records"] == 1
    assert samples["persisting_work_dead_records_total"] == 3
    assert samples["persisting_work_deliveries_total"] == 5
    assert samples["persisting_work_unacknowledged_records"] == 3
    assert samples["persisting_work_oldest_unacknowledged_seconds"] > 0
    assert samples["persisting_work_members"] == 0
