"""Puts to several owners that are simulated: order, shared calls, moves and lost replies."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated_owners import Owners, PostingConnection

from persisting.cluster import locator, put_delivery, wire
from persisting.cluster.put_pipeline import PutPipeline
from persisting.cluster.transport import Answered, Unreachable
from persisting.cluster.wire import Request
from persisting.errors import SchemaError, StorageError


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locator.OwnerLocator, "pause_seconds", 0.001)
    monkeypatch.setattr(put_delivery, "_TOGETHER_SECONDS", 0.02)


def pipeline_to(owners: Owners, *, as_columns: bool = False) -> PutPipeline:
    locators = {bucket: owners.locator(bucket) for bucket in owners.stored}
    return PutPipeline(locators.__getitem__, as_columns=as_columns)


def parts(*buckets: int, number: int = 0, **fields: Any) -> list[tuple[int, Any]]:
    return [(bucket, [{"id": number, **fields}]) for bucket in buckets]


async def owned_by(
    owners: Owners, *, as_columns: bool = False, **buckets: list[int]
) -> PutPipeline:
    """Give each node its buckets; return a pipeline that has put a record into all of them."""
    for node, numbers in buckets.items():
        for bucket in numbers:
            owners.owner[bucket] = node
    pipeline = pipeline_to(owners, as_columns=as_columns)
    await pipeline.start(parts(*owners.stored, number=-1))
    owners.calls.clear()
    return pipeline


def stored(owners: Owners) -> list[list[int]]:
    """Return the ids of every bucket, without those of :func:`owned_by`."""
    return [[n for n in bucket.ids if n >= 0] for bucket in owners.stored.values()]


async def test_first_put_reaches_each_owner_in_one_call() -> None:
    owners = Owners(2, 4)
    for bucket in range(4):
        owners.owner[bucket] = f"n{bucket % 2}"
    await pipeline_to(owners).start(parts(0, 1, 2, 3))
    assert sorted(owners.calls) == [("n0", "put_parts"), ("n1", "put_parts")]
    assert stored(owners) == [[0]] * 4


async def test_list_put_costs_one_call_per_owner() -> None:
    owners = Owners(3, 6)
    pipeline = await owned_by(owners, n0=[0, 1, 2], n1=[3, 4], n2=[5])
    await pipeline.start(parts(0, 1, 2, 3, 4, 5))
    assert sorted(owners.calls) == [("n0", "put_parts"), ("n1", "put_parts"), ("n2", "put")]


async def test_waiting_puts_to_buckets_of_one_owner_share_a_call() -> None:
    owners = Owners(1, 4)
    pipeline = await owned_by(owners, n0=[0, 1, 2, 3])
    await asyncio.gather(*(pipeline.start(parts(n % 4, number=n)) for n in range(100)))
    assert owners.calls == [("n0", "put_parts")]
    assert stored(owners) == [list(range(bucket, 100, 4)) for bucket in range(4)]


async def test_producers_that_started_one_after_another_end_up_sharing_calls() -> None:
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])

    async def produce(first: int) -> None:
        for number in range(first, first + 20):
            await pipeline.start(parts(number % 2, number=number))

    early = [asyncio.ensure_future(produce(100 * n)) for n in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(produce(100 * n)) for n in range(4, 8)]
    await asyncio.gather(*early, *late)
    assert sum(len(bucket) for bucket in stored(owners)) == 160
    assert len(owners.calls) == 21


async def test_bucket_that_moves_keeps_the_order_of_its_puts() -> None:
    owners = Owners(2, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    await owners.move(1, "n1")
    puts = [pipeline.start(parts(0, 1, number=5)), pipeline.start(parts(1, number=6))]
    await asyncio.sleep(0)
    puts += [pipeline.start(parts(0, number=7)), pipeline.start(parts(0, 1, number=8))]
    await asyncio.gather(*puts)
    assert stored(owners) == [[5, 7, 8], [5, 6, 8]]


async def test_buckets_of_one_message_may_move_to_different_owners() -> None:
    owners = Owners(3, 3)
    pipeline = await owned_by(owners, n0=[0, 1, 2])
    await owners.move(1, "n1")
    await owners.move(2, "n2")
    await pipeline.start(parts(0, 1, 2, number=1))
    await pipeline.start(parts(0, 1, 2, number=2))
    assert stored(owners) == [[1, 2]] * 3
    assert sorted(owners.calls[-3:]) == [("n0", "put"), ("n1", "put"), ("n2", "put")]


async def test_put_to_another_bucket_does_not_wait_for_a_bucket_without_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = step = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    monkeypatch.setattr(locator, "time", SimpleNamespace(monotonic=clock))
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    await owners.move(1, "gone")
    searches, opened = 0, owners.open

    def counted(bucket: int, node: str) -> wire.Reply:
        nonlocal searches
        searches += 1
        return opened(bucket, node)

    monkeypatch.setattr(owners, "open", counted)
    failing = pipeline.start(parts(0, 1, number=1))
    await asyncio.wait_for(pipeline.start(parts(0, number=2)), 60)
    assert not failing.done()
    while searches < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    step = locator.PATIENCE_SECONDS
    with pytest.raises(StorageError, match=r"bucket 1 of topic 't'.*node gone"):
        await failing
    assert stored(owners) == [[1, 2], []]


async def test_old_owner_gets_one_call_per_bucket() -> None:
    owners = Owners(2, 4)
    owners.old_nodes.add("n0")
    pipeline = await owned_by(owners, n0=[0, 1], n1=[2, 3])
    await pipeline.start(parts(0, 1, 2, 3, number=1))
    assert sorted(owners.calls) == [("n0", "put"), ("n0", "put"), ("n1", "put_parts")]
    await pipeline.put_sequenced(parts(0, 1, number=2), ("writer", 1))
    assert stored(owners) == [[1, 2], [1, 2], [1], [1]]


@pytest.mark.parametrize("takes_posts", [False, True], ids=["asked", "posted"])
@pytest.mark.parametrize("is_atomic", [True, False], ids=["atomic", "bucket by bucket"])
async def test_schema_error_fails_only_the_put_that_has_it(
    is_atomic: bool, takes_posts: bool
) -> None:
    owners = Owners(1, 3, is_atomic=is_atomic, takes_posts=takes_posts)
    pipeline = await owned_by(owners, n0=[0, 1, 2])
    puts = [
        pipeline.start(parts(0, 1, number=1)),
        pipeline.start(parts(1, number=2, bad=True)),
        pipeline.start(parts(1, 2, number=3)),
        pipeline.start(parts(2, number=4)),
    ]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), SchemaError, type(None), type(None)]
    assert stored(owners) == [[1], [1, 3], [3, 4]]
    await pipeline.start(parts(0, 1, 2, number=5))
    assert stored(owners) == [[1, 5], [1, 3, 5], [3, 4, 5]]


async def test_put_with_a_schema_error_is_found_in_few_calls() -> None:
    owners = Owners(1, 4)
    pipeline = await owned_by(owners, n0=[0, 1, 2, 3])
    puts = [pipeline.start(parts(n % 4, number=n)) for n in range(50)]
    failing = pipeline.start(parts(2, number=50, bad=True))
    puts += [pipeline.start(parts(n % 4, number=n)) for n in range(51, 200)]
    with pytest.raises(SchemaError):
        await failing
    await asyncio.gather(*puts)
    assert len(owners.calls) <= 20
    expected = [[n for n in range(b, 200, 4) if n != 50] for b in range(4)]
    assert stored(owners) == expected


async def test_put_that_no_message_holds_is_staged_and_stored_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES", 1000)
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    rows = [{"id": number, "text": "x" * 300} for number in range(20)]
    await pipeline.start([(0, rows), (1, rows)])
    assert owners.calls == [("n0", "put_parts")]
    assert stored(owners) == [list(range(20))] * 2


async def test_repeated_numbered_put_is_stored_only_where_it_is_missing() -> None:
    owners = Owners(2, 3)
    pipeline = await owned_by(owners, n0=[0, 1, 2])
    await pipeline.put_sequenced(parts(0, 1, number=1), ("writer", 1))
    await owners.move(1, "n1")
    await pipeline.put_sequenced(parts(0, 1, 2, number=1), ("writer", 1))
    assert stored(owners) == [[1], [1], [1]]


async def test_drain_waits_only_for_earlier_puts_to_its_bucket() -> None:
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    put = pipeline.start(parts(0, number=1))
    await pipeline.drain(1)
    assert not put.done()
    await pipeline.drain(0)
    assert put.done()
    assert not pipeline.is_busy(0)


async def test_cancelled_put_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    put = pipeline.start(parts(0, number=1))
    put.cancel()
    await pipeline.start(parts(0, number=2))
    assert stored(owners) == [[1, 2]]
    assert not pipeline.is_busy(0)


async def test_late_request_is_refused_once_its_rows_are_sent_in_other_messages() -> None:
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    late: list[Any] = []
    answer = owners.answer

    async def answer_late(node: str, endpoint: str, request: wire.Request) -> wire.Reply:
        if request.op == "put_parts" and not late:
            # An earlier request with the part of bucket 0 alone is still on its way.
            args = {"mark": request.args["mark"]}
            late.append(wire.Request("put", args, request.rows[:1]))  # type: ignore[index]
        reply = await answer(node, endpoint, request)
        if request.op == "give_up" and endpoint.split("/")[-2] == "0":
            late.append(await owners.topics[node].services[0].answer(late[0]))
        return reply

    owners.answer = answer_late  # type: ignore[method-assign]
    puts = [pipeline.start(parts(0, number=1)), pipeline.start(parts(1, number=2, bad=True))]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), SchemaError]
    assert "was given up by its sender" in late[1].error[1]
    assert stored(owners) == [[1], []]


async def test_old_owner_that_answers_late_stores_a_put_once() -> None:
    owners = Owners(1, 2)
    owners.old_nodes.add("n0")
    pipeline = await owned_by(owners, n0=[0, 1])
    await pipeline.start(parts(0, 1, number=0))
    late: list[wire.Request] = []
    answer = owners.answer

    async def answer_late(node: str, endpoint: str, request: wire.Request) -> wire.Reply:
        bucket = endpoint.split("/")[-2]
        if request.op == "give_up":
            raise wire.unknown_request("give_up")
        if request.op == "put" and bucket == "0" and not late:
            late.append(request)
            raise Unreachable("the reply took too long")
        reply = await answer(node, endpoint, request)
        if request.op == "last_number" and bucket == "0":
            await owners.topics[node].services[0].answer(late[0])
        return reply

    owners.answer = answer_late  # type: ignore[method-assign]
    puts = [pipeline.start(parts(0, number=1)), pipeline.start(parts(1, number=2, bad=True))]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), SchemaError]
    assert stored(owners) == [[0, 1], [0]]


@pytest.mark.parametrize("takes_posts", [False, True], ids=["asked", "posted"])
@pytest.mark.parametrize("is_atomic", [True, False], ids=["atomic", "bucket by bucket"])
@pytest.mark.parametrize("seed", range(12))
async def test_no_put_is_lost_duplicated_or_reordered_while_buckets_move_and_replies_get_lost(
    seed: int, is_atomic: bool, takes_posts: bool
) -> None:
    chance = random.Random(seed)
    owners = Owners(3, 5, seed=seed, is_atomic=is_atomic, takes_posts=takes_posts)
    if chance.random() < 0.3:
        owners.old_nodes.add("n1")
    pipeline = pipeline_to(owners, as_columns=takes_posts)
    owners.lossiness = chance.choice([0.0, 0.1, 0.3])
    expected: dict[int, list[int]] = {bucket: [] for bucket in owners.stored}
    puts: list[asyncio.Future[None]] = []
    wrong: set[int] = set()
    mover = asyncio.create_task(_move_forever(owners, chance))
    for number in range(250):
        buckets = chance.sample(range(5), chance.choice([1, 1, 1, 2, 5]))
        if chance.random() < 0.03:
            wrong.add(number)
            puts.append(pipeline.start(parts(*buckets, number=number, bad=True)))
        else:
            count = 40 if takes_posts and chance.random() < 0.1 else 1
            puts.append(pipeline.start([(b, [{"id": number}] * count) for b in buckets]))
            for bucket in buckets:
                expected[bucket] += [number] * count
        if chance.random() < 0.3:
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
    results = await asyncio.wait_for(asyncio.gather(*puts, return_exceptions=True), 60)
    mover.cancel()
    await owners.finish_late_requests()
    assert {n for n, result in enumerate(results) if isinstance(result, SchemaError)} == wrong
    assert [r for n, r in enumerate(results) if n not in wrong and r is not None] == []
    assert {bucket: found.ids for bucket, found in owners.stored.items()} == expected
    assert not any(pipeline.is_busy(bucket) for bucket in owners.stored)


async def _move_forever(owners: Owners, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
        await owners.move(chance.randrange(5), chance.choice(list(owners.topics)))


async def test_single_records_share_a_call_and_keep_their_order_among_other_puts() -> None:
    owners = Owners(1, 2)
    pipeline = await owned_by(owners, n0=[0, 1])
    puts: list[Any] = []
    for number in range(30):
        if number % 5 == 4:
            puts.append(pipeline.start(parts(0, 1, number=number)))
        else:
            puts.append(pipeline.start_row(number % 2, {"id": number}))
    await asyncio.gather(*puts)
    assert owners.calls == [("n0", "put_parts")]
    lists = [number for number in range(30) if number % 5 == 4]
    singles = [number for number in range(30) if number % 5 != 4]
    assert stored(owners) == [
        sorted(lists + [number for number in singles if number % 2 == bucket]) for bucket in (0, 1)
    ]


async def test_single_record_that_cannot_be_packed_fails_alone() -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    records: list[dict[str, Any]] = [{"id": 0}, {"id": 2**70}, {"id": 1, "t": "\ud800"}, {"id": 2}]
    puts = [pipeline.start_row(0, record) for record in records]
    assert all(put is not None for put in puts)
    results = await asyncio.gather(*puts, return_exceptions=True)  # type: ignore[arg-type]
    assert [type(result) for result in results] == [
        type(None),
        SchemaError,
        SchemaError,
        type(None),
    ]
    assert stored(owners) == [[0, 2]]
    await pipeline.drain(0)


async def test_single_record_that_the_owner_refuses_fails_alone() -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    puts = [
        pipeline.start_row(0, {"id": number, **({"bad": 1} if number == 3 else {})})
        for number in range(8)
    ]
    results = await asyncio.gather(*puts, return_exceptions=True)  # type: ignore[arg-type]
    assert [number for number, result in enumerate(results) if result is not None] == [3]
    assert stored(owners) == [[0, 1, 2, 4, 5, 6, 7]]


async def test_cancelled_single_record_does_not_hold_up_a_drain() -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    put = pipeline.start_row(0, {"id": 0})
    assert put is not None
    put.cancel()
    await asyncio.wait_for(pipeline.drain(0), 60)
    assert stored(owners) == [[0]]


@pytest.mark.parametrize("record", [{"id": [1]}, {"id": "x" * 100_000}, ["id"], {"id": {"a": 1}}])
async def test_only_small_plain_records_take_the_fast_path(record: Any) -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    assert pipeline.start_row(0, record) is None
    assert not pipeline.is_busy(0)


async def test_single_record_for_an_unknown_owner_takes_the_slow_path() -> None:
    assert pipeline_to(Owners(1, 1)).start_row(0, {"id": 1}) is None


@pytest.mark.parametrize("takes_posts", [False, True], ids=["asked", "posted"])
@pytest.mark.parametrize("seed", range(8))
async def test_single_records_are_stored_once_and_in_order_while_buckets_move(
    seed: int, takes_posts: bool
) -> None:
    owners = Owners(3, 4, seed=seed, takes_posts=takes_posts)
    pipeline = await owned_by(owners, n0=[0, 1], n1=[2, 3])
    owners.lossiness = 0.2
    puts: list[Any] = []
    for number in range(120):
        bucket = number % 4
        put = pipeline.start_row(bucket, {"id": number})
        puts.append(put if put is not None else pipeline.start(parts(bucket, number=number)))
        if number % 9 == 0:
            await owners.move(owners.chance.randrange(4), f"n{owners.chance.randrange(3)}")
        for _ in range(owners.chance.randrange(3)):
            await asyncio.sleep(0)
    await asyncio.gather(*puts)
    owners.lossiness = 0.0
    await owners.finish_late_requests()
    assert stored(owners) == [list(range(bucket, 120, 4)) for bucket in range(4)]


async def test_put_of_a_lone_producer_is_sent_before_it_waits() -> None:
    owners = Owners(1, 2, takes_posts=True)
    pipeline = await owned_by(owners, n0=[0, 1])
    posted = owners.posted
    for number in range(5):
        put = pipeline.start_row(number % 2, {"id": number})
        assert put is not None
        posted += 1
        assert owners.posted == posted
        await put
    assert stored(owners) == [[0, 2, 4], [1, 3]]


async def test_puts_that_wait_for_the_same_message_share_all_later_ones() -> None:
    owners = Owners(1, 2, takes_posts=True)
    pipeline = await owned_by(owners, n0=[0, 1])

    async def produce(first: int) -> None:
        for number in range(first, first + 20):
            put = pipeline.start_row(number % 2, {"id": number})
            assert put is not None
            await put

    await asyncio.gather(*(produce(100 * n) for n in range(8)))
    assert sum(len(bucket) for bucket in stored(owners)) == 160
    assert len(owners.calls) == 21


async def test_two_producers_do_not_take_turns() -> None:
    owners = Owners(1, 1, takes_posts=True)
    pipeline = await owned_by(owners, n0=[0])

    async def produce(first: int) -> None:
        for number in range(first, first + 30):
            put = pipeline.start_row(0, {"id": number})
            assert put is not None
            await put

    await asyncio.gather(produce(0), produce(100))
    assert len(owners.calls) == 31


async def test_puts_that_could_not_be_posted_are_sent_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = Owners(1, 2, takes_posts=True)
    pipeline = await owned_by(owners, n0=[0, 1])
    await asyncio.gather(*(pipeline.start(parts(n % 2, number=n)) for n in range(4)))

    def post(connection: PostingConnection, request: Request, answered: Answered) -> bool:
        raise RuntimeError("not a fault of the store")

    monkeypatch.setattr(PostingConnection, "post", post)
    puts = [pipeline.start(parts(n % 2, number=n)) for n in range(4, 8)]
    await asyncio.wait_for(asyncio.gather(*puts), 30)
    assert stored(owners) == [[0, 2, 4, 6], [1, 3, 5, 7]]


async def test_columns_of_a_list_go_to_the_owners_to_which_the_buckets_have_moved() -> None:
    owners = Owners(3, 4, takes_posts=True)
    pipeline = await owned_by(owners, as_columns=True, n0=[0, 1, 2, 3])
    await owners.move(1, "n1")
    await owners.move(3, "n2")
    rows = [(bucket, [{"id": 100 * bucket + n} for n in range(40)]) for bucket in range(4)]
    await pipeline.start(rows)
    await pipeline.start(rows)
    expected = [[row["id"] for row in part] * 2 for _, part in rows]
    assert stored(owners) == expected


async def test_columns_that_no_message_holds_are_staged_and_stored_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES", 3000)
    owners = Owners(1, 2, takes_posts=True)
    pipeline = await owned_by(owners, as_columns=True, n0=[0, 1])
    rows = [{"id": number, "text": "x" * 300} for number in range(40)]
    await pipeline.start([(0, rows), (1, rows)])
    assert owners.calls == [("n0", "put_parts")]
    assert stored(owners) == [list(range(40))] * 2


async def test_lone_put_that_the_owner_refuses_fails_and_the_next_one_is_stored() -> None:
    owners = Owners(1, 1, takes_posts=True)
    pipeline = await owned_by(owners, n0=[0])
    refused, kept = (
        pipeline.start_row(0, {"id": 1, "bad": 1}),
        pipeline.start_row(0, {"id": 2}),
    )
    assert refused is not None
    assert kept is not None
    with pytest.raises(SchemaError):
        await refused
    await kept
    assert stored(owners) == [[2]]


async def test_pipeline_continues_after_its_sender_was_cancelled() -> None:
    owners = Owners(1, 1)
    pipeline = await owned_by(owners, n0=[0])
    before = asyncio.all_tasks()
    put = pipeline.start(parts(0, number=1))
    (sender,) = asyncio.all_tasks() - before
    await asyncio.sleep(0)
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    await asyncio.wait_for(pipeline.start(parts(0, number=2)), 30)
    assert stored(owners)[0][-1] == 2
