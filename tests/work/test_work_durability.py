"""Records of a work group are not lost: failed dead letters, retention, restores, cancellation."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import suppress

import pytest
from support import children
from support.waiting import until
from support.work_places import LOGGED, WorkPlace

from persisting import fs as filesystem
from persisting.errors import LeaseLost, StorageError
from persisting.queue import QueueWriter, read_queue, write_queue
from persisting.topic import backup, deletion, group_admin
from persisting.topic.topic_files import TopicFolder

pytestmark = pytest.mark.asyncio


OWNER_WITHOUT_A_LOG = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    queue = await write_queue(sys.argv[2], storage_path=sys.argv[1], backend="persisting")
    await queue.put({"id": -1})
    await queue.flush()
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def letters_of(place: WorkPlace) -> list[dict]:
    dead = await read_queue(f"{place.topic}.dead", storage_path=str(place.folder))
    letters = await dead.get(None)
    await dead.close()
    return letters


class TestDeadLettersThatCannotBeWritten:
    async def test_reject_raises_and_the_record_stays_if_its_dead_letter_cannot_be_stored(
        self, place: WorkPlace
    ) -> None:
        await place.writer(2, num_buckets=1)
        member = await place.member()
        first, second = await member.fetch(2)
        obstacle = place.folder / f"{place.topic}.dead"
        obstacle.write_text("not a topic")
        with pytest.raises(StorageError, match="stays unacknowledged in the group"):
            await first.reject("broken")
        stats = await member.stats()
        assert stats["dead_letter_error"]
        assert (stats["dying"], stats["dead"], stats["unacknowledged"]) == (1, 0, 2)
        assert await member.fetch(1) == []  # it is not delivered again either
        await second.ack()
        obstacle.unlink()
        await until(lambda: _dead(member, 1))
        (letter,) = await letters_of(place)
        assert (letter["id"], letter["dead_letter"]["reason"]) == (0, "broken")
        stats = await member.stats()
        assert (stats["dead_letter_error"], stats["unacknowledged"]) == (None, 0)

    async def test_a_record_that_was_delivered_too_often_stays(self, place: WorkPlace) -> None:
        await place.writer(1, num_buckets=1)
        member = await place.member(max_deliveries=1, lease=0.05)
        assert len(await member.fetch(1)) == 1
        obstacle = place.folder / f"{place.topic}.dead"
        obstacle.write_text("not a topic")
        await until(lambda: _dying(member, 1))
        await until(lambda: _has_error(member))
        await member.close()
        member = await place.member()  # another keeper, which replays the journal
        assert (await member.stats())["dying"] == 1
        obstacle.unlink()
        await until(lambda: _dead(member, 1))
        assert [letter["id"] for letter in await letters_of(place)] == [0]

    async def test_a_record_whose_dead_letter_is_pending_is_kept_by_retention(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(num_buckets=1)
        for n in range(4):
            await writer.put({"id": n})
            await writer.flush()
        member = await place.member()
        first, *rest = await member.fetch(4)
        (place.folder / f"{place.topic}.dead").write_text("not a topic")
        with pytest.raises(StorageError):
            await first.reject("broken")
        await member.ack(rest)
        await member.close()
        retained = await writer.retain(rows=0)
        assert (retained["dropped"], retained["held_by"]) == (0, {0: "work group 'solvers'"})

    async def test_reject_raises_in_all_batches_whose_dead_letters_cannot_be_stored(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("persisting.work.dead_letters.BATCH", 2)
        await place.writer(7, num_buckets=1)
        member = await place.member()
        dead = await write_queue(
            f"{place.topic}.dead", storage_path=str(place.folder), backend="persisting"
        )
        await dead.put({"id": "a text, so that numbers are refused"})
        await dead.close()
        deliveries = await member.fetch(7)
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(d.reject("broken") for d in deliveries), return_exceptions=True), 60
        )
        assert all("stays unacknowledged" in str(outcome) for outcome in outcomes), outcomes
        stats = await member.stats()
        assert (stats["dying"], stats["unacknowledged"]) == (7, 7)

    async def test_dead_letters_of_large_records_are_put_a_few_at_a_time(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("persisting.work.dead_letters.MOST_BYTES", 80_000, raising=False)
        put_batch, sizes = QueueWriter.put_batch, []

        async def counted(writer: QueueWriter, records: list[dict], **options: object) -> None:
            sizes.append(len(records))
            await put_batch(writer, records, **options)

        writer = await place.writer(num_buckets=1)
        await writer.put([{"id": n, "text": "x" * 16_000} for n in range(20)])
        member = await place.member(breaker=False)
        deliveries = await member.fetch(20)
        obstacle = place.folder / f"{place.topic}.dead"
        obstacle.write_text("not a topic")
        monkeypatch.setattr(QueueWriter, "put_batch", counted)
        rejects = (delivery.reject("broken") for delivery in deliveries)
        outcomes = await asyncio.gather(*rejects, return_exceptions=True)
        assert all("stays unacknowledged" in str(outcome) for outcome in outcomes), outcomes
        obstacle.unlink()
        await until(lambda: _dead(member, 20))
        assert sizes == [8, 4, 4, 4]  # the first shows how large they are
        letters = await member.dead_letters()
        assert sorted(letter["id"] for letter in letters) == list(range(20))

    async def test_many_pending_dead_letters_make_reject_refuse(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("persisting.work.keeper.MOST_DYING", 2)
        await place.writer(3, num_buckets=1)
        member = await place.member(lease=0.5)
        (place.folder / f"{place.topic}.dead").write_text("not a topic")
        first, second, third = await member.fetch(3)
        for delivery in (first, second):
            with pytest.raises(StorageError, match="stays unacknowledged"):
                await delivery.reject("broken")
        with pytest.raises(StorageError, match="not rejected and is delivered again"):
            await third.reject("broken")
        (again,) = await member.fetch(3, wait=True, timeout=20)
        assert (again.offset, again.attempt) == (third.offset, 2)


class TestDeadLetters:
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, marks=pytest.mark.nightly),
            {"enable_wal": True, "wal_sync_interval": 60.0},
        ],
    )
    async def test_a_dead_letter_in_a_topic_without_synced_puts_survives_a_kill(
        self, place: WorkPlace, options: dict
    ) -> None:
        await place.writer(1, num_buckets=1)
        await place.close()
        place._open.clear()
        program = f"""
        import asyncio, os
        from persisting.queue import read_queue, write_queue

        async def main():
            where = {{"storage_path": {str(place.folder)!r}}}
            dead = await write_queue(
                "{place.topic}.dead", **where, backend="persisting", backend_options={options!r}
            )
            await dead.put({{"id": -1}})
            await dead.flush()
            reader = await read_queue("{place.topic}", **where, group="solvers", mode="work")
            (delivery,) = await reader.fetch(1)
            await delivery.reject("broken")
            os.kill(os.getpid(), 9)

        asyncio.run(main())
        """
        killed = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", textwrap.dedent(program)], check=False
        )
        assert killed.returncode == -9
        assert sorted(letter["id"] for letter in await letters_of(place)) == [-1, 0]
        member = await place.member()
        assert (await member.stats())["unacknowledged"] == 0

    async def test_a_dead_letter_is_put_again_if_its_owner_dies_before_it_is_flushed(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await place.writer(1, num_buckets=1)
        member = await place.member()
        (delivery,) = await member.fetch(1)
        put_batch = QueueWriter.put_batch
        with children.python(OWNER_WITHOUT_A_LOG, place.folder, f"{place.topic}.dead") as owner:
            assert await asyncio.to_thread(children.wait_for_line, owner) == "ready"

            async def put_and_kill(writer: QueueWriter, *given: object, **options: object) -> None:
                await put_batch(writer, *given, **options)
                owner.kill()
                await asyncio.to_thread(owner.wait)

            monkeypatch.setattr(QueueWriter, "put_batch", put_and_kill)
            with suppress(StorageError):  # it is told, or it waits for the next attempt
                await delivery.reject("broken")
        await until(lambda: _dead(member, 1))
        assert sorted(letter["id"] for letter in await letters_of(place)) == [-1, 0]

    async def test_letters_of_a_deleted_group_are_not_those_of_its_successor(
        self, place: WorkPlace
    ) -> None:
        await place.writer(3, num_buckets=1)
        member = await place.member()
        for delivery in await member.fetch(3):
            await delivery.reject("first life")
        await member.close()
        folder = place.folder / place.topic
        group_admin.delete(folder, "solvers", [0], filesystem.current())
        member = await place.member()
        assert await member.dead_letters() == []
        (delivery, *rest) = await member.fetch(3)
        await delivery.reject("second life")
        await member.ack(rest)
        (letter,) = await member.dead_letters()
        assert letter["dead_letter"]["reason"] == "second life"
        assert await member.redrive() == 1
        assert len(await member.fetch(3)) == 1

    async def test_letters_are_numbered_without_gaps(self, place: WorkPlace) -> None:
        await place.writer(5, num_buckets=1)
        for _ in range(2):  # two keepers
            member = await place.member()
            for delivery in await member.fetch(2):
                await delivery.reject("broken")
            await member.close()
        member = await place.member()
        numbers = [letter["dead_letter"]["number"] for letter in await member.dead_letters()]
        assert sorted(numbers) == [1, 2, 3, 4]
        assert await member.redrive() == 4
        assert await member.dead_letters() == []

    async def test_dead_letters_may_go_to_a_topic_that_is_divided_by_another_field(
        self, place: WorkPlace
    ) -> None:
        await place.writer(4, num_buckets=1)
        dead = await write_queue(
            f"{place.topic}.dead",
            storage_path=str(place.folder),
            bucket_column="owner",
            num_buckets=3,
            backend="persisting",
        )
        await dead.close()
        member = await place.member()
        for delivery in await member.fetch(4):
            await delivery.reject("broken")
        assert sorted(letter["id"] for letter in await letters_of(place)) == [0, 1, 2, 3]
        assert await member.redrive() == 4

    async def test_a_redriven_record_is_delivered_after_the_dead_letters_were_deleted(
        self, place: WorkPlace
    ) -> None:
        await place.writer(3, num_buckets=1)
        member = await place.member()
        for delivery in await member.fetch(2):
            await delivery.reject("broken")
        assert await member.redrive() == 2
        await member.close()
        member = await place.member()
        (first,) = await member.fetch(1)
        assert first.history.endswith("broken")  # the member has the letters open now
        await first.release()
        await asyncio.to_thread(deletion.delete, place.folder / f"{place.topic}.dead")
        again = sorted(await member.fetch(3), key=lambda d: d.offset)
        assert [(d.record["id"], d.history) for d in again] == [(0, ""), (1, ""), (2, "")]
        await again[1].reject("broken for good")
        await again[0].release()
        (first,) = await member.fetch(1)  # at its old place there is the letter of another record
        assert (first.record["id"], first.history) == (0, "")
        (letter,) = await member.dead_letters()
        assert letter["id"] == 1
        assert letter["dead_letter"]["history"].endswith("broken for good")

    async def test_anything_may_be_put_into_the_topic_of_dead_letters(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1, num_buckets=1)
        member = await place.member()
        (delivery,) = await member.fetch(1)
        await delivery.reject("broken")
        dead = await write_queue(f"{place.topic}.dead", storage_path=str(place.folder))
        await dead.put({"id": 99})
        await dead.put({"id": 98, "dead_letter": None})
        await dead.close()
        assert [letter["id"] for letter in await member.dead_letters()] == [0]
        assert await member.redrive("id > 50") == 0
        assert await member.redrive() == 1


class TestRetention:
    async def fragments(self, place: WorkPlace, count: int, **options: object) -> object:
        writer = await place.writer(
            num_buckets=1, backend_options={**LOGGED, "compaction": False, **options}
        )
        for n in range(count):
            await writer.put({"id": n})
            await writer.flush()
        return writer

    async def test_retention_keeps_what_is_not_acknowledged_and_says_who_holds_it(
        self, place: WorkPlace
    ) -> None:
        writer = await self.fragments(place, 6)
        member = await place.member(lease=30.0)
        deliveries = await member.fetch(4)
        await member.ack([deliveries[0], deliveries[1], deliveries[3]])

        async def dropped_two() -> bool:
            return (await writer.retain(rows=0))["start_offsets"] == {0: 2}

        await until(dropped_two)  # the group stores its floor every two seconds
        retained = await writer.retain(rows=0)
        assert retained["held_by"] == {0: "work group 'solvers'"}
        assert (await writer.stats())["buckets"][0]["retention_held_by"] == "work group 'solvers'"
        await member.ack([deliveries[2], *await member.fetch(6)])
        await member.close()
        assert (await writer.retain(rows=0))["start_offsets"] == {0: 6}
        assert (await writer.stats())["buckets"][0]["retention_held_by"] is None

    async def test_a_group_that_never_received_a_record_keeps_all_records_from_retention(
        self, place: WorkPlace
    ) -> None:
        writer = await self.fragments(place, 3)
        await place.member()
        assert (await writer.retain(rows=0))["dropped"] == 0

    async def test_retention_may_be_told_to_drop_what_is_not_acknowledged(
        self, place: WorkPlace
    ) -> None:
        writer = await self.fragments(place, 6, retention_drops_unacknowledged=True)
        member = await place.member()
        deliveries = await member.fetch(2)
        assert (await writer.retain(rows=2))["dropped"] == 4
        await until(lambda: _removed(member, 4))
        with pytest.raises(LeaseLost):
            await deliveries[0].ack()
        rest = await member.fetch(6, wait=True, timeout=20)
        assert [delivery.offset for delivery in rest] == [4, 5]
        await member.ack(rest)
        assert (await member.stats())["unacknowledged"] == 0

    async def test_a_redriven_record_is_kept_even_by_a_new_keeper(self, place: WorkPlace) -> None:
        writer = await self.fragments(place, 3)
        member = await place.member()
        first, *rest = await member.fetch(3)
        await first.reject("broken")
        await member.ack(rest)
        await member.close()  # stores the floor: nothing is open
        member = await place.member()
        assert await member.redrive() == 1
        assert (await writer.retain(rows=0))["dropped"] == 0
        (again,) = await member.fetch(1)
        assert again.record["id"] == 0
        await again.ack()

    async def test_a_redriven_record_that_retention_dropped_comes_from_its_dead_letter(
        self, place: WorkPlace
    ) -> None:
        writer = await self.fragments(place, 3)
        member = await place.member()
        first, *rest = await member.fetch(3)
        await first.reject("broken")
        await member.ack(rest)
        await member.close()
        assert (await writer.retain(rows=0))["dropped"] == 3
        member = await place.member()
        assert await member.redrive() == 1
        (again,) = await member.fetch(1)
        assert (again.offset, again.record["id"]) == (0, 0)
        await again.reject("once more")
        (letter,) = await member.dead_letters()
        assert (letter["id"], letter["dead_letter"]["history"].count("\n")) == (0, 1)


class TestRestores:
    async def test_a_restore_forgets_what_came_after_it_and_keeps_what_was_before(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(4, num_buckets=1)
        await writer.flush()
        await writer.tag("before")
        await writer.put([{"id": n} for n in range(4, 8)])
        member = await place.member()
        deliveries = await member.fetch(8)
        await member.ack([deliveries[0], deliveries[5]])
        await deliveries[6].reject("broken")
        await writer.restore("before")
        await writer.put([{"id": n} for n in range(100, 104)])

        async def sees_the_restore() -> bool:
            return (await member.stats())["buckets"][0]["next_offset"] <= 4

        await until(sees_the_restore)
        with pytest.raises(LeaseLost):
            await deliveries[4].ack()
        fresh = await member.fetch(10, wait=True)
        assert [d.record["id"] for d in fresh] == [100, 101, 102, 103]
        await member.ack([*deliveries[1:4], *fresh])
        # The record of the dead letter was removed: offset 6 holds another, acknowledged one.
        assert await member.redrive() == 0
        assert await member.dead_letters() == []
        assert (await member.stats())["unacknowledged"] == 0
        assert await member.fetch(10) == []

    async def test_a_restore_while_the_group_has_no_keeper_is_noticed_later(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(2, num_buckets=1)
        await writer.flush()
        await writer.tag("before")
        await writer.put([{"id": n} for n in range(2, 6)])
        member = await place.member()
        await member.ack(await member.fetch(6))
        await member.close()
        await writer.restore("before")
        await writer.put([{"id": n} for n in range(100, 103)])
        member = await place.member()
        fresh = await member.fetch(10, wait=True)
        assert [d.record["id"] for d in fresh] == [100, 101, 102]


class TestDamage:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("persisting.work.session._DAMAGED_PAUSE", 0.2)

    async def test_a_dead_letter_of_a_damaged_record_has_at_least_its_origin(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(
            num_buckets=1, backend_options={**LOGGED, "compaction": False, "flush_interval": None}
        )
        for n in range(2):
            await writer.put({"id": n, "text": f"number {n}"})
            await writer.flush()
        await writer.close()
        member = await place.member()
        deliveries = await member.fetch(2, wait=True, timeout=30)
        await member.close()
        files = (place.folder / place.topic / "bucket_0").rglob("data/*.lance")
        first = min(files, key=lambda path: path.stat().st_mtime_ns)
        first.write_bytes(b"x" * first.stat().st_size)
        member = await place.member(lease=1.0)
        assert await member.release_all() == 2
        assert [d.offset for d in await member.fetch(2)] == [1]
        await place.close()
        place._open.clear()
        member = await place.member(max_deliveries=1, lease=0.05)
        await until(lambda: _letters_after_fetch(member, 2))
        letters = {d["dead_letter"]["offset"]: d for d in await letters_of(place)}
        assert (letters[1]["id"], letters[0]["id"]) == (1, None)
        assert letters[0]["dead_letter"]["bucket"] == deliveries[0].bucket

    async def test_a_damaged_record_holds_back_no_other_and_is_not_given_up(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(
            num_buckets=1, backend_options={**LOGGED, "compaction": False, "flush_interval": None}
        )
        for n in range(3):
            await writer.put({"id": n, "text": f"number {n}"})
            await writer.flush()
        await writer.close()
        files = (place.folder / place.topic / "bucket_0").rglob("data/*.lance")
        middle = sorted(files, key=lambda path: path.stat().st_mtime_ns)[1]
        middle.write_bytes(b"x" * middle.stat().st_size)
        member = await place.member(max_deliveries=1)
        got: list = []
        while len(got) < 2:
            got += await member.fetch(3, wait=True, timeout=30)
        assert sorted(delivery.record["id"] for delivery in got) == [0, 2]
        await member.ack(got)
        with pytest.raises(StorageError):
            await member.fetch(3, wait=True, timeout=30)
        stats = await member.stats()
        assert (stats["unacknowledged"], stats["dead"], stats["dying"]) == (1, 0, 0)


class TestBackups:
    async def test_a_backup_of_a_group_in_use_is_restored_as_the_group_was(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(6, num_buckets=1)
        member = await place.member(lease=600.0)
        deliveries = await member.fetch(3)
        await deliveries[0].ack()
        await deliveries[1].reject("broken")
        source = TopicFolder.open(place.folder / place.topic)
        await asyncio.to_thread(backup.create, source, place.folder / "copy")
        await member.ack([deliveries[2], *await member.fetch(10)])
        assert (await member.stats())["unacknowledged"] == 0
        await asyncio.to_thread(backup.restore, place.folder / "copy", place.folder / "again")
        other = await read_queue(
            "again", storage_path=str(place.folder), group="solvers", mode="work"
        )
        stats = await other.stats()
        assert (stats["acknowledged"], stats["dead"], stats["in_flight"]) == (1, 1, 1)
        assert await other.release_all() == 1
        again = await other.fetch(10, wait=True, timeout=30)
        assert sorted(delivery.offset for delivery in again) == [2, 3, 4, 5]
        # Both groups have the same identity. What is read ahead for one is not for the other.
        copy = await write_queue("again", storage_path=str(place.folder))
        await copy.put([{"id": n} for n in (100, 101)])
        await writer.put([{"id": n} for n in (6, 7)])
        ids = [
            (await reader.fetch(1, wait=True, timeout=30))[0].record["id"]
            for reader in (member, other, member, other)
        ]
        assert ids == [6, 100, 7, 101]
        await copy.close()
        await other.close()


class TestCancellation:
    async def test_calls_that_are_cancelled_at_any_point_lose_no_record(
        self, place: WorkPlace
    ) -> None:
        count = 120
        await place.writer(count, num_buckets=2)
        member = await place.member(lease=1.0, max_deliveries=1_000_000, breaker=False)
        acknowledged: set[int] = set()
        rejected: set[int] = set()
        delivered: Counter[int] = Counter()
        after_end: list[int] = []

        async def work(step: int) -> None:
            for delivery in await member.fetch(2, wait=True, timeout=1.0):
                number = delivery.record["id"]
                delivered[number] += 1
                if number in acknowledged | rejected:
                    after_end.append(number)
                if step % 5 == 0:
                    await delivery.release(delay=0.01)
                elif step % 5 == 1:
                    await delivery.reject("broken")
                    rejected.add(number)
                else:
                    await delivery.extend()
                    await delivery.ack()
                    acknowledged.add(number)

        while not rejected:  # on a slow machine no other step may get to its end
            await work(1)
        for step in range(400):
            task = asyncio.create_task(work(step))
            for _ in range(step % 40):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * (step % 9))
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        while (await member.stats())["unacknowledged"]:
            for delivery in await member.fetch(50, wait=True, timeout=1.0):
                number = delivery.record["id"]
                delivered[number] += 1
                if number in acknowledged | rejected:
                    after_end.append(number)
                await delivery.ack()
                acknowledged.add(number)
        assert after_end == []
        letters = Counter(letter["id"] for letter in await letters_of(place))
        assert max(letters.values()) == 1
        assert rejected <= set(letters)
        # A cancelled ack or reject may have taken effect, so a record may have neither returned.
        assert set(delivered) | set(letters) == set(range(count))
        stats = await member.stats()
        assert stats["acknowledged"] + stats["dead"] == count
        assert stats["dead"] == len(letters)


async def _dead(member, count: int) -> bool:
    return (await member.stats())["dead"] == count


async def _letters_after_fetch(member, count: int) -> bool:
    with suppress(StorageError):
        await member.fetch(2)
    return (await member.stats())["dead"] == count


async def _dying(member, count: int) -> bool:
    await member.fetch(1)
    return (await member.stats())["dying"] == count


async def _has_error(member) -> bool:
    return (await member.stats())["dead_letter_error"] is not None


async def _removed(member, count: int) -> bool:
    return (await member.stats())["removed"] == count
