"""Delays of records are stored beside them: through flushes, kills, restores and files."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack

import pytest
from support.handover import files_of_handovers, hand_over
from support.waiting import until
from support.work_places import LOGGED, WorkPlace

from persisting.bucket import delays
from persisting.bucket.delayed_puts import MOST_REMEMBERED, DelayedPutNames
from persisting.bucket.delays import Delays
from persisting.bucket.producer_sequences import ProducerSequences
from persisting.errors import InvalidArgument, TableError
from persisting.queue import read_queue, write_queue
from persisting.work.state import GroupState


async def kill_after(place: WorkPlace, statements: str) -> None:
    """Run statements with a writer in a process that is killed afterwards."""
    program = f"""
    import asyncio, os
    from persisting.queue import write_queue

    async def main():
        writer = await write_queue(
            "{place.topic}", storage_path={str(place.folder)!r}, num_buckets=1,
            backend="persisting", backend_options={LOGGED!r},
        )
    """
    program = textwrap.dedent(program) + textwrap.indent(textwrap.dedent(statements), "    ")
    program += "\n    os.kill(os.getpid(), 9)\n\nasyncio.run(main())\n"
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True
    )
    assert killed.returncode == -9, killed.stderr.decode()


async def visible(place: WorkPlace, group: str = "solvers") -> list[int]:
    member = await place.member(group)
    deliveries = await member.fetch(10, wait=True, timeout=30)
    deliveries += await member.fetch(10)
    ids = [delivery.record["id"] for delivery in deliveries]
    await member.close()
    return sorted(ids)


DELAYED = """
await writer.put({"id": 0})
await writer.put({"id": 1}, delay=600.0)
await writer.put([{"id": 2}, {"id": 3}], delay=600.0)
await writer.put({"id": 4})
"""


@pytest.mark.parametrize("flushed", ["", "await writer.flush()"])
async def test_a_delay_survives_a_kill_the_recovery_and_later_flushes(
    place: WorkPlace, flushed: str
) -> None:
    await kill_after(place, DELAYED + flushed)
    assert await visible(place, "files") == [0, 4]  # no process owns the buckets
    writer = await place.writer(num_buckets=1)
    await writer.put({"id": 5})
    await writer.flush()
    await writer.put({"id": 6})
    assert (await writer.stats())["buckets"][0]["delayed_count"] == 3
    await writer.flush()
    await writer.compact()
    await writer.close()
    assert await visible(place) == [0, 4, 5, 6]


async def test_a_keeper_that_starts_again_knows_the_delays_it_has_passed(place: WorkPlace) -> None:
    writer = await place.writer(num_buckets=1)
    await writer.put({"id": 0}, delay=600.0)
    await writer.put({"id": 1})
    assert await visible(place) == [1]
    await writer.put({"id": 2})
    assert await visible(place) == [2]


async def test_a_restore_brings_delays_back_with_their_records(place: WorkPlace) -> None:
    writer = await place.writer(num_buckets=1)
    await writer.put({"id": 0}, delay=600.0)
    await writer.flush()
    await writer.tag("before")
    await writer.put([{"id": n} for n in range(1, 4)])
    await writer.put({"id": 4}, delay=600.0)
    await writer.restore("before")
    await writer.put([{"id": n} for n in range(10, 14)])
    assert await visible(place) == [10, 11, 12, 13]


async def test_an_overwrite_removes_delays_with_their_records(place: WorkPlace) -> None:
    writer = await place.writer(num_buckets=1)
    await writer.put({"id": 0})
    await writer.put([{"id": 1}, {"id": 2}], delay=600.0)
    rows = [{"id": n} for n in range(10, 13)]
    folder = place.folder / place.topic
    assert await asyncio.to_thread(hand_over, folder, rows, overwrite=True) == 3

    async def is_clean() -> bool:
        return files_of_handovers(folder) == []

    await until(is_clean)  # the owner removes its notes a little later
    copy = WorkPlace(place.folder / "copy")  # what is on disk if the owner is killed now
    copy.topic = place.topic
    shutil.copytree(folder, copy.folder / copy.topic, ignore=shutil.ignore_patterns(".sockets"))
    assert await visible(copy) == await visible(place) == [10, 11, 12]
    await writer.put({"id": 13}, delay=600.0)
    await writer.flush()
    await writer.close()
    assert await visible(place, "files") == [10, 11, 12]


@pytest.mark.parametrize("options", [{"enable_wal": False}])
async def test_a_topic_without_a_log_refuses_delays(place: WorkPlace, options: dict) -> None:
    writer = await place.writer(num_buckets=1, backend_options=options)
    with pytest.raises(InvalidArgument, match="needs a topic with a log"):
        await writer.put({"id": 0}, delay=1.0)
    memory = await write_queue("memory")
    with pytest.raises(InvalidArgument, match="in memory"):
        await memory.put({"id": 0}, delay=1.0)
    await memory.close()


@pytest.mark.parametrize("delay", [-1.0, "1", True, 1e12, float("nan")])
async def test_wrong_delays_are_refused(place: WorkPlace, delay: object) -> None:
    writer = await place.writer(num_buckets=1)
    with pytest.raises(InvalidArgument, match="delay must be"):
        await writer.put({"id": 0}, delay=delay)
    with pytest.raises(InvalidArgument, match="either sequence or delay"):
        await writer.put({"id": 0}, delay=1.0, sequence=1)


async def test_a_bucket_refuses_more_delays_than_it_can_store(
    place: WorkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persisting.bucket.pending_delays.MOST_DELAYS", 2)
    for delay in (600.0, 0.1):
        place.topic = f"delayed-{delay}"
        writer = await place.writer(num_buckets=1)
        for n in range(2):
            await writer.put({"id": n}, delay=delay)
        if delay == 600.0:
            with pytest.raises(InvalidArgument, match="takes no more"):
                await writer.put({"id": 2}, delay=600.0)
    await asyncio.sleep(0.2)  # the delays have passed
    await writer.put({"id": 2}, delay=600.0)


async def test_delayed_puts_of_another_process_and_of_threads_are_delayed(place: WorkPlace) -> None:
    writer = await place.writer(num_buckets=2)
    await asyncio.to_thread(writer.sync().put, {"id": 0}, delay=600.0)
    await asyncio.to_thread(writer.sync().put, [{"id": n} for n in range(1, 9)], delay=600.0)
    program = f"""
    import asyncio
    from persisting.queue import write_queue

    async def main():
        writer = await write_queue("{place.topic}", storage_path={str(place.folder)!r})
        await writer.put([{{"id": n}} for n in range(10, 20)], delay=600.0)
        await writer.put({{"id": 20}}, delay=600.0)
        await writer.put({{"id": 21}})
        await writer.close()

    asyncio.run(main())
    """
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", textwrap.dedent(program)], check=False
    )
    assert done.returncode == 0
    assert await visible(place) == [21]
    reader = await read_queue(place.topic, storage_path=str(place.folder))
    assert len(await reader.get(None)) == 21
    await reader.close()


async def test_delayed_puts_in_flight_are_all_recognized_after_a_kill(place: WorkPlace) -> None:
    """A killed owner may have stored hundreds of puts without answering one."""
    names = DelayedPutNames()
    due = time.time_ns() // 1000 + 600 * 10**6
    with ExitStack() as unanswered:
        puts = [unanswered.enter_context(names.put(due)) for _ in range(300)]
        for flushed in ("", "await writer.flush()"):
            await kill_after(
                place,
                f"""
                for name in {puts!r}:
                    await writer._put_parts([(0, [{{"id": 1}}])], name)
                {flushed}
                """,
            )
    writer = await place.writer(num_buckets=1)
    assert (await writer.stats())["buckets"][0]["delayed_count"] == 300


def test_a_bucket_remembers_the_delayed_puts_that_have_no_answer() -> None:
    names, producers = DelayedPutNames(), ProducerSequences()
    with names.put(5) as slow:
        producers.remember([slow])
        quick = []
        for due in range(200):
            with names.put(due) as put:
                assert not producers.has(put)
                producers.remember([put])
                quick.append(put)
        assert all(producers.has(put) for put in [slow, *quick])
        assert len(producers.all()) == 201  # the first one may be repeated, so all are kept
    with names.put(7) as last:
        producers.remember([last, ("writer", 7)])
    again = ProducerSequences(producers.encode())
    assert sorted(again.all()) == sorted([last, ("writer", 7)])
    assert again.has(last)
    assert all(again.has(put) for put in [slow, *quick])  # late: they were answered
    assert again.has(("writer", 7))


def test_the_delayed_puts_of_dead_writers_are_eventually_forgotten() -> None:
    producers = ProducerSequences()
    writers = [DelayedPutNames() for _ in range(5000)]
    for writer in writers:
        with writer.put(1) as put:
            producers.remember([put])
    with writers[-1].put(2) as put:
        producers.remember([put])
    assert len(producers.all()) == MOST_REMEMBERED
    assert producers.has(put)


@pytest.mark.parametrize(
    "name", ["~delay-", "~delay-a", "~delay-a.b.c", "~delay-a.1", f"~delay-a.{'9' * 5000}.0"]
)
def test_a_delayed_put_of_another_name_is_remembered_too(name: str) -> None:
    producers = ProducerSequences()
    assert not producers.has((name, 1))
    producers.remember([(name, 1)])
    assert ProducerSequences(producers.encode()).has((name, 1))


async def test_passed_delays_are_forgotten_and_others_are_stored() -> None:
    kept = Delays()
    now = time.time_ns() // 1000
    kept.add(0, 2, now - 1)
    kept.add(2, 3, now + 10**9)
    kept.add(5, 1, now + 10**9)
    again = Delays(kept.encode(5, now))
    assert again.pending(now) == [(2, 3, now + 10**9)]  # the table does not have offset 5 yet
    assert len(kept) == 2
    assert Delays().encode(10, now) == ""
    with pytest.raises(TableError, match="delays in the table cannot be read"):
        Delays("AAAA")
    assert not delays.is_delay(("writer", 1))


async def test_claims_skip_delayed_offsets_until_their_time() -> None:
    state = GroupState()
    state.bucket(0).delays = [(1, 3, 50), (4, 5, 20)]
    spans = {0: (0, 6)}
    assert [lease.offset for lease in state.claim(10, 10, 100, "m", spans)] == [0, 3, 5]
    assert state.next_due([0]) == 20
    assert [lease.offset for lease in state.claim(20, 10, 100, "m", spans)] == [4]
    assert [lease.offset for lease in state.claim(49, 10, 100, "m", spans)] == []
    assert [lease.offset for lease in state.claim(50, 1, 100, "m", spans)] == [1]
    replayed = GroupState()
    for operation in state.take_operations():
        replayed.apply(operation)
    assert replayed.dump() == state.dump()
