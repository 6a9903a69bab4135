"""The log in an object store: slots, leases, claims and taking over."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from support.fault_proxy import FaultProxy
from support.log_slots import slots_of
from support.waiting import until_true

from persisting.bucket.store_ownership import Ownership
from persisting.errors import BucketLocked, OwnershipLost, StorageError, WALError
from persisting.store.object_store import ObjectExists, ObjectStore
from persisting.wal import Payload, sealing
from persisting.wal.frame import RECORDS, START, SegmentStart, encode_start
from persisting.wal.lease import Lease, lease_register
from persisting.wal.object_log import ObjectLog
from persisting.wal.slots import is_claim, lease_key, new_log_name, slot_key

SECONDS = 0.6


def preamble() -> list[Payload]:
    start = encode_start(SegmentStart(0, {}))
    return [Payload(START, 0, len(start), start)]


def new_log(store: ObjectStore, seconds: float = SECONDS) -> ObjectLog:
    return ObjectLog(store, Lease(store, new_log_name(), seconds))


def append(log: ObjectLog, text: bytes) -> int:
    return log.append([[Payload(RECORDS, 0, len(text), text)]], preamble, 1)[-1]


def test_append_is_one_request(patient: ObjectStore, proxy: FaultProxy) -> None:
    log = new_log(patient)
    proxy.reset_counts()
    for number in range(3):
        assert append(log, b"%d" % number) == 2 * number + 2
    assert proxy.counts == {"PUT-if-absent": 3}
    assert slots_of(patient, log) == [0, 1, 2]


def test_claimed_log_refuses_its_owner(store: ObjectStore) -> None:
    log = new_log(store)
    append(log, b"one")
    sealed = sealing.seal(store, log.name, "other")
    assert sealed.slots == range(0, 1)
    with pytest.raises(OwnershipLost, match="another process claimed it"):
        append(log, b"two")
    with pytest.raises(OwnershipLost):
        log.beat()
    assert log.lost
    assert [is_claim(data) for data in sealing.read_slots(store, sealed)] == [False]


def test_claimed_log_accepts_nothing_whatever_its_lease_says(store: ObjectStore) -> None:
    """The slots behind a claim are free: an owner that tried them would acknowledge what no
    process reads."""
    log = new_log(store)
    append(log, b"one")
    sealing.seal(store, log.name, "other")
    with pytest.raises(OwnershipLost):
        append(log, b"two")
    log._lease.lost = ""
    with pytest.raises(WALError, match="holds the claim of another process"):
        append(log, b"three")
    assert slots_of(store, log) == [0, 1]


def test_put_that_arrives_after_the_claim_is_refused(
    patient: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    log = new_log(patient)
    append(log, b"one")
    claimed = threading.Event()
    held = proxy.add("PUT-if-absent", also="/slots/", until=claimed, times=1)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            append(log, b"two")
        except BaseException as exc:
            errors.append(exc)

    late = threading.Thread(target=put)
    late.start()
    assert held.reached.wait(60)
    try:
        sealed = sealing.seal(store, log.name, "other")
    finally:
        claimed.set()
    late.join()
    assert sealed.slots == range(0, 1)
    assert isinstance(errors[0], OwnershipLost)


def test_slot_written_before_the_claim_is_read(store: ObjectStore) -> None:
    log = new_log(store)
    for text in (b"one", b"two", b"three"):
        append(log, text)
    sealed = sealing.seal(store, log.name, "other")
    assert len(sealing.read_slots(store, sealed)) == 3
    assert sealing.seal(store, log.name, "third") == sealed


def test_released_slots_are_announced_before_they_are_deleted(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    log = new_log(patient)
    lasts = [append(log, b"%d" % number) for number in range(4)]
    log.release(lasts[1])
    assert slots_of(patient, log) == [0, 1, 2, 3]
    proxy.reset_counts()
    log.beat()
    log.delete_released()  # unless the heartbeat has begun to
    assert [kind.split(" ")[0] for kind in proxy.seen] == ["PUT-if-match", "DELETE"]
    assert slots_of(patient, log) == [2, 3]
    sealed = sealing.seal(patient, log.name, "other")
    assert sealed.slots == range(2, 4)


def test_owner_that_lost_its_lease_deletes_nothing(store: ObjectStore) -> None:
    log = new_log(store)
    last = append(log, b"one")
    log.release(last)
    sealing.seal(store, log.name, "other")
    with pytest.raises(OwnershipLost):
        log.beat()
    assert slots_of(store, log) == [0, 1]


def test_claim_and_lease_outlive_the_log(store: ObjectStore) -> None:
    log = new_log(store)
    append(log, b"one")
    sealed = sealing.seal(store, log.name, "other")
    sealing.remove(store, sealed)
    assert slots_of(store, log) == [1]
    assert store.get(lease_key(log.name)) is not None
    with pytest.raises(OwnershipLost):
        append(log, b"two")


@pytest.mark.parametrize("first", ["the same process", "another one", "nobody"])
def test_log_that_is_removed_while_it_is_listed_keeps_its_only_claim(
    patient: ObjectStore, store: ObjectStore, proxy: FaultProxy, first: str
) -> None:
    """``first``: who has ended the log before."""
    log = new_log(store)
    for text in (b"one", b"two"):
        append(log, text)
    claimants = {"the same process": "third", "another one": "other"}
    if first in claimants:
        sealing.seal(store, log.name, claimants[first])
    removed = threading.Event()
    listing = proxy.add("LIST", also="/slots/", until=removed, times=1)

    def is_taken() -> bool:
        held = lease_register(store, log.name).read()
        return held is not None and bool(held.content.taken_by)

    def remove() -> None:
        assert listing.reached.wait(60)
        until_true(is_taken)
        sealing.remove(store, sealing.seal(store, log.name, "second"))
        removed.set()

    removing = threading.Thread(target=remove)
    removing.start()
    sealed = sealing.seal(patient, log.name, "third")
    removing.join()
    assert sealed.slots == range(2, 2)
    assert slots_of(store, log) == [2]
    sealing.remove(store, sealed)
    with pytest.raises(OwnershipLost):
        append(log, b"late")


def test_log_whose_removal_is_under_way_is_not_damaged(store: ObjectStore) -> None:
    log = new_log(store)
    for text in (b"one", b"two", b"three"):
        append(log, text)
    sealed = sealing.seal(store, log.name, "other")
    listed = store.list

    def after_a_part_is_removed(prefix: str, after: str | None = None) -> list[str]:
        store.list = listed  # type: ignore[method-assign]
        sealing._announce_removal(store, sealed)
        store.delete([slot_key(log.name, 0)])
        return listed(prefix, after)

    store.list = after_a_part_is_removed  # type: ignore[method-assign]
    assert sealing.seal(store, log.name, "other").slots == range(3, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("arrives", [True, False], ids=["arrives", "is-lost"])
def test_next_owner_decides_about_a_put_of_unknown_outcome(
    faulty: ObjectStore, store: ObjectStore, proxy: FaultProxy, arrives: bool
) -> None:
    log = new_log(faulty)
    append(log, b"one")
    proxy.add("/slots/", lose=arrives, drop=not arrives)
    with pytest.raises(WALError, match="may be stored"):
        append(log, b"two")
    proxy.heal()
    with pytest.raises(OwnershipLost, match=r"it is unknown whether .* was stored"):
        append(log, b"three")
    assert sealing.seal(store, log.name, "other").slots == range(2 if arrives else 1)
    with pytest.raises(ObjectExists):
        store.create(slot_key(log.name, 2 if arrives else 1), b"the request arrives too late")


def test_missing_or_damaged_slot_is_named(store: ObjectStore) -> None:
    log = new_log(store)
    append(log, b"one")
    append(log, b"two")
    sealed = sealing.seal(store, log.name, "other")
    first = store.get(slot_key(log.name, 0))
    assert first is not None
    damaged = bytearray(first.data)
    damaged[-1] ^= 1
    store.swap(slot_key(log.name, 0), bytes(damaged), first.version)
    with pytest.raises(WALError, match=r"0{20} is damaged"):
        sealing.read_slots(store, sealed)
    store.delete([slot_key(log.name, 0)])
    with pytest.raises(WALError, match=r"0{20} is missing"):
        sealing.read_slots(store, sealed)


def test_living_owner_is_not_waited_for(store: ObjectStore) -> None:
    log = new_log(store, 120.0)  # much longer than a machine may stop for
    beats = threading.Event()

    def beat() -> None:
        while not beats.wait(0.1):
            log.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(BucketLocked, match=r"process \d+ on .* is alive"):
            sealing.wait_for_owner(store, log.name, lambda seconds: time.sleep(0.05))
    finally:
        beats.set()
        thread.join()


def test_silent_owner_is_given_the_time_of_its_lease(store: ObjectStore) -> None:
    log = new_log(store)
    began = time.monotonic()
    sealing.wait_for_owner(store, log.name)
    assert time.monotonic() - began >= SECONDS


def test_process_that_polls_a_lease_may_take_over_once_it_expires(
    store: ObjectStore,
) -> None:
    log = new_log(store)
    began = time.monotonic()
    with pytest.raises(BucketLocked, match=r"lease of .* has not ended"):
        sealing.check_owner(store, log.name)
    while True:
        with suppress(BucketLocked):
            sealing.check_owner(store, log.name)
            break
        time.sleep(SECONDS / 10)
    assert time.monotonic() - began >= SECONDS
    log.beat()
    with pytest.raises(BucketLocked):
        sealing.check_owner(store, log.name)


def test_log_that_this_process_has_ended_is_not_waited_for(store: ObjectStore) -> None:
    log = new_log(store)
    log.close()

    def wait(seconds: float) -> None:
        raise AssertionError("it waited")

    sealing.wait_for_owner(store, log.name, wait)
    sealing.check_owner(store, log.name)


def test_pause_of_the_claimant_does_not_count_as_silence_of_the_owner(store: ObjectStore) -> None:
    log = new_log(store)
    waits: list[float] = []

    def paused(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            time.sleep(2 * SECONDS)  # the claimant stops, and the owner sends heartbeats meanwhile
            log.beat()

    with pytest.raises(BucketLocked):
        sealing.wait_for_owner(store, log.name, paused)


def test_heartbeat_whose_answer_was_lost_is_not_a_take_over(
    faulty: ObjectStore, proxy: FaultProxy
) -> None:
    log = new_log(faulty)
    proxy.add("lease.json", lose=True)
    with pytest.raises(StorageError):
        log.beat()
    proxy.heal()
    log.beat()
    append(log, b"one")
    assert not log.lost


def test_bucket_that_is_closed_during_a_take_over_is_taken_immediately(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = new_log(store)
    owned = Ownership(store, 0, former.name)
    owned.use_own_log()
    wait_for_owner = sealing.wait_for_owner

    def close_first(place: ObjectStore, name: str) -> None:
        owned.give_back()
        former.close()
        former.delete_all()
        store.delete([lease_key(former.name)])
        wait_for_owner(place, name)

    monkeypatch.setattr(sealing, "wait_for_owner", close_first)
    taken = Ownership(store, 0, new_log(store).name)
    assert (taken.term, taken.left_log) == (2, None)


def test_missing_lease_of_an_owner_is_an_error(store: ObjectStore) -> None:
    former = new_log(store)
    Ownership(store, 0, former.name).use_own_log()
    store.delete([lease_key(former.name)])
    with pytest.raises(WALError, match=r"lease of the log .* is missing"):
        Ownership(store, 0, new_log(store).name)
