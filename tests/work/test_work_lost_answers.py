"""Lost answers, readers that close, keepers that end, restores: no lease and no record is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.filesystems import QuickFileSystem
from support.waiting import until
from support.work_places import WorkPlace

from persisting.cluster.wire import Request
from persisting.errors import BucketClosed, InvalidArgument, WALError
from persisting.local_socket import frames, socket_groups
from persisting.local_socket.connection import Connections
from persisting.local_socket.shared_reader import SharedReaderClient
from persisting.topic.table_calls import MakeDurable
from persisting.work.group_storage import FolderGroup, journal_folder
from persisting.work.journal import JournalEntry
from persisting.work.keeper import Keeper, KeeperEnded
from persisting.work.state import GroupState

pytestmark = pytest.mark.asyncio


def open_keeper(folder: Path, end: int = 10) -> Keeper:
    keeper = Keeper(FolderGroup(folder, "g", QuickFileSystem()))
    keeper.set_span(0, 0, end)
    return keeper


async def ask(place: WorkPlace, connections: Connections, op: str, **args: Any) -> Any:
    """Call the keeper of this process as another process would."""
    connection = await connections.to(str(place.kept_here()._server._path))
    return (await connection.ask(frames.TOPIC, Request(op, args))).value


class TestClaims:
    async def test_a_repeated_claim_gets_the_same_records_from_this_keeper_and_the_next(
        self, tmp_path: Path
    ) -> None:
        keeper = open_keeper(tmp_path)
        claimed, _ = await keeper.claim("m", 3, 60.0, 0, number=5, answered=5)
        again, _ = await keeper.claim("m", 3, 60.0, 0, number=5, answered=5)
        assert [lease[:4] for lease in again] == [lease[:4] for lease in claimed]
        assert await keeper.ack([claimed[0][:3]]) == []
        keeper.close()
        for _ in range(2):  # the second one loads a snapshot
            keeper = open_keeper(tmp_path)
            again, _ = await keeper.claim("m", 3, 60.0, 0, number=5, answered=5)
            assert [lease[:4] for lease in again] == [lease[:4] for lease in claimed[1:]]
            keeper.close()
        keeper = open_keeper(tmp_path)
        following, _ = await keeper.claim("m", 2, 60.0, 0, number=6, answered=6)
        assert [lease.offset for lease in following] == [3, 4]
        other, _ = await keeper.claim("m", 1, 60.0, 0, number=5, answered=6)
        assert [lease.offset for lease in other] == [5]  # its answer had come
        assert (await keeper.stats())["delivered"] == 6
        assert await keeper.release([lease[:3] for lease in following], unused=True) == []
        again, _ = await keeper.claim("m", 2, 60.0, 0, number=6, answered=6)
        assert [lease[:2] for lease in again] == [(0, 3), (0, 4)]  # the claim was cancelled
        keeper.close()

    async def test_a_stopped_repeat_returns_the_leases_of_its_first_call(
        self, tmp_path: Path
    ) -> None:
        keeper = open_keeper(tmp_path)
        claimed, _ = await keeper.claim("m", 3, 60.0, 0, number=1)  # the answer is lost
        await keeper.stop_waiting("m", 1)
        again, _ = await keeper.claim("m", 3, 60.0, 60.0, number=1)
        assert [lease.token for lease in again] == [lease.token for lease in claimed]
        await keeper.stop_waiting("m", 2)
        assert (await keeper.claim("m", 3, 60.0, 60.0, number=2))[0] == []
        keeper.close()

    async def test_a_cancelled_claim_gives_back_only_leases_that_no_repeat_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keeper = open_keeper(tmp_path)
        write, gate = keeper._storage.write, threading.Event()

        def write_later(*args: Any) -> None:
            gate.wait(60)
            write(*args)

        monkeypatch.setattr(keeper._storage, "write", write_later)
        first, repeat, alone = (
            asyncio.create_task(keeper.claim("m", 3, 60.0, 0, number=number))
            for number in (1, 1, 2)
        )
        await asyncio.sleep(0)  # all wait for the journal now
        first.cancel()
        alone.cancel()
        await asyncio.gather(first, alone, return_exceptions=True)
        gate.set()
        leases, _ = await repeat
        assert (await keeper.stats())["in_flight"] == 3
        assert await keeper.ack([lease[:3] for lease in leases]) == []
        assert not keeper._not_repeated
        keeper.close()

    async def test_claims_of_members_without_leases_are_forgotten(self) -> None:
        state = GroupState()
        for number in range(50):
            leases = state.claim(number, 1, 1000, f"m{number}", {0: (0, 100)})
            state.number_claim(f"m{number}", 1, 1, leases)
            if number % 2:
                assert state.ack([lease[:3] for lease in leases]) == []
        state.dump()
        assert len(state._claims.dump()) == 25

    async def test_calls_whose_answers_are_lost_are_repeated_without_harm(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await place.writer(3, num_buckets=1)
        member = await place.member(lease=60.0)
        answer, calls = socket_groups.answer, []

        async def lose_first(keeper: Keeper, op: str, args: dict[str, Any]) -> Any:
            result = await answer(keeper, op, args)
            calls.append(op)
            if calls.count(op) == 1:
                raise BucketClosed("the answer is lost")
            return result

        monkeypatch.setattr(socket_groups, "answer", lose_first)
        first, second, third = await member.fetch(3)
        await first.ack()
        await second.release(delay=30.0)
        await third.reject("broken")
        stats = await member.stats()
        assert Counter(calls) == dict.fromkeys(("claim", "ack", "release", "reject", "stats"), 2)
        names = ("delivered", "acknowledged", "released", "dead", "in_flight", "unacknowledged")
        assert [stats[name] for name in names] == [3, 1, 1, 1, 0, 1]

    async def test_a_claim_of_a_process_that_has_exited_takes_no_record(
        self, place: WorkPlace
    ) -> None:
        writer = await place.writer(num_buckets=1)
        member = await place.member()
        connections = Connections()
        claim = asyncio.create_task(
            ask(place, connections, "claim", member="gone", count=1, lease=60.0, wait=30.0)
        )
        keeper = place.kept_here().keeper
        await until(lambda: _true(keeper._members_waiting))
        connections.close()
        await asyncio.gather(claim, return_exceptions=True)
        await until(lambda: _true(not keeper._members_waiting))
        await writer.put({"id": 0})
        (delivery,) = await member.fetch(1, wait=True, timeout=20)
        assert delivery.attempt == 1

    async def test_tokens_of_a_group_that_was_recreated_are_not_those_from_before(self) -> None:
        leases = [GroupState().claim(now, 2, 10, "m", {0: (0, 5)})[0] for now in (1000, 2000)]
        assert leases[0].token < leases[1].token
        recreated = GroupState()
        recreated.claim(2000, 2, 10, "m", {0: (0, 5)})
        assert recreated.ack([leases[0][:3]]) == [leases[0][:3]]


class TestReaders:
    async def test_a_reader_that_is_closed_takes_no_record_with_it(self, place: WorkPlace) -> None:
        writer = await place.writer(num_buckets=1)
        member, other = await place.member(lease=60.0), await place.member(lease=60.0)
        waiting = [asyncio.create_task(member.fetch(1, wait=True)) for _ in range(2)]
        await until(lambda: _true(len(member._waits) == 2))
        await asyncio.gather(member.close(), writer.put({"id": 0}))
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BucketClosed}
        (delivery,) = await other.fetch(1, wait=True, timeout=20)
        assert delivery.attempt == 1
        with pytest.raises(BucketClosed, match="is closed"):
            await member.fetch(1)

    async def test_closing_after_a_cancelled_fetch_leaves_no_lease_behind(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await place.writer(5, num_buckets=1)
        member = await place.member(lease=60.0)
        client = member._session._client
        call, claimed, gate = client.call, asyncio.Event(), asyncio.Event()

        async def answer_later(op: str, args: dict[str, Any]) -> Any:
            result = await call(op, args)
            if op == "claim":
                claimed.set()
                await gate.wait()
            return result

        monkeypatch.setattr(client, "call", answer_later)
        fetch = asyncio.create_task(member.fetch(5))
        await claimed.wait()
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        closing = asyncio.create_task(member.close())
        await asyncio.wait([closing], timeout=0.1)
        gate.set()
        await closing
        other = await place.member(lease=60.0)
        assert {d.attempt for d in await other.fetch(5)} == {1}

    async def test_readers_of_one_process_are_counted_as_members(self, place: WorkPlace) -> None:
        await place.writer(4, num_buckets=1)
        members = [await place.member() for _ in range(3)]
        for member in members:
            assert len(await member.fetch(1)) == 1
        assert (await members[0].stats())["members"] == 3
        await members[0].close()
        assert len(await members[1].fetch(1)) == 1
        assert (await members[1].stats())["members"] == 2

    async def test_a_delivery_of_another_group_is_not_acknowledged(self, place: WorkPlace) -> None:
        await place.writer(2, num_buckets=1)
        first, second = await place.member("one"), await place.member("two")
        (mine,), (other,) = await first.fetch(1), await second.fetch(1)
        with pytest.raises(InvalidArgument, match="not a delivery of work group 'one'"):
            await first.ack([mine, other])
        assert (await first.stats())["acknowledged"] == 0
        same = await place.member("one", lease=1.0)
        await same.ack([mine])

    async def test_a_handler_that_raises_a_cancellation_has_failed(self, place: WorkPlace) -> None:
        await place.writer(1, num_buckets=1)
        member = await place.member(lease=60.0)
        calls = []

        async def handle(record: dict) -> None:
            calls.append(record["id"])
            if len(calls) == 1:
                raise asyncio.CancelledError

        while not (await member.stats())["acknowledged"]:
            await member.run(handle, backoff=0.0, wait=False)
        assert calls == [0, 0]

    async def test_redriven_records_keep_the_order_of_their_keys(self, place: WorkPlace) -> None:
        writer = await place.writer(num_buckets=1)
        await writer.put([{"id": n, "key": "ab"[n % 2]} for n in range(4)])
        member = await place.member(ordered_by="key")
        rejected = 0
        while rejected < 4:
            for delivery in await member.fetch(4, wait=True, timeout=20):
                await delivery.reject("broken")
                rejected += 1
        assert await member.redrive() == 4
        first = await member.fetch(4)
        assert [d.record["id"] for d in first] == [0, 1]
        await first[1].ack()
        assert [d.record["id"] for d in await member.fetch(4, wait=True, timeout=20)] == [3]


class TestKeepers:
    async def test_nothing_is_journaled_while_a_keeper_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keeper = open_keeper(tmp_path)
        await keeper.claim("m", 1, 60.0, 0)
        outcomes: list[Any] = []

        def claim_meanwhile() -> None:
            outcomes.append(asyncio.run(_outcome(keeper.claim("m", 1, 60.0, 0))))

        monkeypatch.setattr(keeper, "write_floors", claim_meanwhile)
        await asyncio.to_thread(keeper.close)
        assert [type(outcome) for outcome in outcomes] == [KeeperEnded]
        following = open_keeper(tmp_path)
        assert following.state.counts.delivered == 1
        following.close()

    async def test_a_failed_keeper_whose_process_makes_no_call_is_replaced(
        self, place: WorkPlace
    ) -> None:
        await place.writer(1, num_buckets=1)
        member = await place.member()
        failed = place.kept_here()
        with failed.keeper._guard:
            failed.keeper._fail(WALError("the disk was full"))
        connections = Connections()
        with pytest.raises(BucketClosed, match="the disk was full"):
            await ask(place, connections, "stats")
        await until(lambda: _true(failed not in socket_groups._kept.groups.values()))
        connections.close()
        assert len(await member.fetch(1)) == 1

    @pytest.mark.parametrize(
        ("operations", "message"),
        [
            ([("Z", 1)], "unknown operation 'Z'; upgrade persisting"),
            ([("a", 0, 0, "more")], "upgrade persisting, or restore"),
            ([("a", 0, 7)], "the journal is damaged"),
        ],
    )
    async def test_a_journal_that_makes_no_sense_is_refused_and_named(
        self, tmp_path: Path, operations: list, message: str
    ) -> None:
        keeper = open_keeper(tmp_path)
        await keeper.claim("m", 1, 60.0, 0)
        first = keeper.state.operations
        keeper._storage.write(JournalEntry(first, operations, 0, keeper.state.dump))
        keeper.close()
        with pytest.raises(WALError, match=message) as raised:
            open_keeper(tmp_path)
        assert str(journal_folder(tmp_path, "g")) in str(raised.value)

    async def test_letters_keep_their_numbers_when_retention_removes_some_of_a_batch(self) -> None:
        state = GroupState()
        leases = state.claim(1, 3, 10, "m", {0: (0, 3)})
        for lease in leases:
            state.reject(2, *lease[:3], "broken")
        state.next_batch(10)
        state.cut(0, 1, 3, 0)
        numbers = {position: dying.number for position, dying in state.dying.items()}
        assert state.next_batch(10) == [(0, 1), (0, 2)]
        assert numbers == {(0, 1): 2, (0, 2): 3}

    async def test_a_bucket_that_seems_shorter_once_delivers_nothing_again(
        self, place: WorkPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = await place.writer(3, num_buckets=1)
        member = await place.member()
        await member.ack(await member.fetch(3))
        call, misled = SharedReaderClient.call, []

        async def mislead(self: SharedReaderClient, asked: Any) -> Any:
            if isinstance(asked, MakeDurable) and not misled:
                misled.append(asked)
                return 0
            return await call(self, asked)

        monkeypatch.setattr(SharedReaderClient, "call", mislead)
        await until(lambda: _true(misled))
        await writer.put({"id": 3})
        (delivery,) = await member.fetch(4, wait=True, timeout=20)
        assert delivery.record["id"] == 3


async def _true(value: Any) -> bool:
    return bool(value)


async def _outcome(work: Any) -> Any:
    (outcome,) = await asyncio.gather(work, return_exceptions=True)
    return outcome
