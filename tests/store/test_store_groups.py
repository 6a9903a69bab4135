"""Members of a consumer group in an object store: killed, paused, replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.fault_proxy import FaultProxy
from support.waiting import until_true

from persisting.bucket.store_groups import StoredOffset, offset_register, read_committed
from persisting.store.object_store import ObjectStore, StoredObject
from persisting.topic import store_membership
from persisting.topic.store_membership import StoreMembership

LEASE = 0.8
BUCKETS = [0, 1, 2, 3]


def member(store: ObjectStore, lease: float = LEASE) -> StoreMembership:
    return StoreMembership(store, "g", BUCKETS, lease)


def die(dead: StoreMembership) -> None:
    """Stop sending heartbeats, as a killed or paused process does."""
    dead._beating._run = lambda: None


def holds(who: StoreMembership, buckets: set[int], *others: StoreMembership) -> None:
    """Rebalance until a member has these buckets."""

    def has_buckets() -> bool:
        if set(who.held) == buckets:
            return True
        for one in (who, *others):
            one.rebalance()
        return False

    until_true(has_buckets, lambda: f"it has {set(who.held)}")


def test_buckets_of_a_dead_member_are_taken_over_at_its_last_commit(store: ObjectStore) -> None:
    first = member(store)
    holds(first, {0, 1, 2, 3})
    assert first.commit({0: (first.held[0].generation, 7, 0)}) == {0: 7}
    die(first)
    second = member(store)
    began = time.monotonic()
    second.rebalance()
    assert not set(second.held)  # the first one may live
    holds(second, {0, 1, 2, 3})
    assert time.monotonic() - began >= LEASE
    assert second.held[0].start == 7
    second.leave()


def test_requests_of_a_member_are_those_of_the_price_table(
    patient: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[float, Callable[[], None]]] = []
    hand = SimpleNamespace(after=lambda seconds, call: planned.append((seconds, call)))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(store_membership, "timer", hand)
    monkeypatch.setattr(store_membership, "time", clock)
    first = member(patient, 300.0)
    first.rebalance()
    assert set(first.held) == {0, 1, 2, 3}
    proxy.reset_counts()
    given = {b: (assigned.generation, 7, 0) for b, assigned in first.held.items()}
    assert first.commit(given) == dict.fromkeys(BUCKETS, 7)
    assert proxy.counts == {"PUT-if-match": 4}  # one per bucket
    proxy.reset_counts()
    for beats in range(1, 4):
        ((seconds, beat),) = planned
        assert seconds == 300.0 / 3
        planned.clear()
        beat()
        until_true(lambda count=beats: proxy.counts.total() >= count)
        assert proxy.counts == {"PUT-if-match": beats}
    until_true(lambda: first._last_beat.content.beat == 3)
    proxy.reset_counts()
    for clock.now in range(300):  # it reads all the time
        first.rebalance()
    assert proxy.counts == {"LIST": 4}  # every 60 s
    first.leave()


def test_paused_member_that_was_replaced_cannot_commit(store: ObjectStore) -> None:
    first = member(store)
    holds(first, {0, 1, 2, 3})
    assigned = first.held
    die(first)
    second = member(store)
    holds(second, {0, 1, 2, 3})
    assert second.commit({1: (second.held[1].generation, 5, 0)}) == {1: 5}
    assert first.commit({1: (assigned[1].generation, 100, 0)}) == {}
    assert read_committed(store, "g", 1).offset == 5
    first.rebalance()  # it polls the store, and has nothing more
    assert not set(first.held)
    second.leave()


def test_member_that_was_taken_for_dead_joins_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_membership, "_LOOKS_PER_LEASE", 1000)
    first = member(store, 120.0)  # neither takes the other for dead if the machine stops
    holds(first, {0, 1, 2, 3})
    store.delete(store.list("groups/g/members"))
    first._beat()
    assert len(store.list("groups/g/members")) == 1
    second = member(store, 120.0)

    def share_equally() -> bool:
        first.rebalance()
        second.rebalance()
        return len(first.held) == len(second.held) == 2

    until_true(share_equally)
    assert not set(first.held) & set(second.held)
    first.leave()
    second.leave()


def test_loss_that_a_heartbeat_notices_during_a_poll_is_not_forgotten(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = StoreMembership(store, "g", BUCKETS, 60.0)
    one.rebalance()
    register = offset_register(store, "g", 0)
    get = store.get

    def get_before_another_takes_it(key: str) -> StoredObject | None:
        found = get(key)
        if key.endswith("bucket_0.json"):
            monkeypatch.undo()
            register.update(lambda last: StoredOffset(generation=2, member="another"))
            one._was_removed = True  # as a heartbeat does
        return found

    monkeypatch.setattr(store, "get", get_before_another_takes_it)
    one._was_removed, one._looked_at = True, None
    one.rebalance()
    one._looked_at = None
    one.rebalance()
    assert one.held[0].generation == 3  # it has taken the bucket again
    one.leave()


def test_released_buckets_are_free_immediately(store: ObjectStore) -> None:
    first = member(store)
    holds(first, {0, 1, 2, 3})
    first.commit({2: (first.held[2].generation, 9, 0)})
    first.leave()
    assert store.list("groups/g/members") == []
    second = member(store)
    second.rebalance()
    assert set(second.held) == {0, 1, 2, 3}
    assert second.held[2].start == 9
    second.leave()
