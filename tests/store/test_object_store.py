"""The five calls, against SeaweedFS and through a proxy that delays, refuses and loses requests."""

from __future__ import annotations

import os
import threading
import time

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import BUCKET, SECRET, SeaweedFS, storage_options, url
from support.waiting import until_true

from persisting.store.object_store import (
    ObjectChanged,
    ObjectExists,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    open_store,
)
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse


def data_of(store: ObjectStore, key: str) -> bytes | None:
    found = store.get(key)
    return None if found is None else found.data


def test_created_object_is_returned_by_get_and_list(store: ObjectStore) -> None:
    assert store.get("a/1") is None
    version = store.create("a/1", b"one")
    found = store.get("a/1")
    assert found is not None
    assert found == (b"one", version)
    store.create("a/3", b"three")
    store.create("a/2", b"two")
    assert store.list("a") == ["a/1", "a/2", "a/3"]
    assert store.list("a", after="a/1") == ["a/2", "a/3"]
    assert store.list("b") == []


def test_second_create_of_an_object_is_refused_and_returns_the_first(store: ObjectStore) -> None:
    store.create("a", b"one")
    with pytest.raises(ObjectExists) as caught:
        store.create("a", b"two")
    assert caught.value.found.data == b"one"
    assert data_of(store, "a") == b"one"


def test_swap_replaces_only_the_version_that_was_read(store: ObjectStore) -> None:
    first = store.create("a", b"one")
    second = store.swap("a", b"two", first)
    with pytest.raises(ObjectChanged) as caught:
        store.swap("a", b"three", first)
    assert caught.value.found is not None
    assert caught.value.found == (b"two", second)
    store.swap("a", b"three", second)
    assert data_of(store, "a") == b"three"


def test_swap_of_a_deleted_object_is_refused(store: ObjectStore) -> None:
    version = store.create("a", b"one")
    store.delete(["a"])
    with pytest.raises(ObjectChanged) as caught:
        store.swap("a", b"two", version)
    assert caught.value.found is None
    assert store.get("a") is None


def test_delete_ignores_missing_objects(store: ObjectStore) -> None:
    for number in range(5):
        store.create(f"d/{number}", b"x")
    store.delete(["d/0", "d/missing", "d/4"])
    store.delete(["d/0"])
    assert store.list("d") == ["d/1", "d/2", "d/3"]


@pytest.mark.nightly
def test_one_of_many_racing_creates_wins(store: ObjectStore) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        try:
            store.create("race", b"%d" % number)
            won.append(number)
        except ObjectExists:
            pass

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert data_of(store, "race") == b"%d" % won[0]


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_temporary_refusals_are_retried(
    patient: ObjectStore, proxy: FaultProxy, status: int
) -> None:
    for match in ("PUT-if-absent", "PUT-if-match", "GET", "LIST", "DELETE"):
        proxy.add(match, answer=status, times=2)
    version = patient.create("a", b"one")
    patient.swap("a", b"two", version)
    assert data_of(patient, "a") == b"two"
    assert patient.list("") == ["a"]
    patient.delete(["a"])
    assert patient.get("a") is None


@pytest.mark.parametrize("fault", [{"lose": True}, {"hold": 2.0}, {"drop": True}])
def test_put_with_a_lost_answer_is_resolved_by_reading_back(
    faulty: ObjectStore, store: ObjectStore, proxy: FaultProxy, fault: dict[str, object]
) -> None:
    proxy.add("PUT-if-absent", times=1, **fault)
    version = faulty.create("a", b"one")
    assert store.get("a") == (b"one", version)
    proxy.add("PUT-if-match", times=1, **fault)
    version = faulty.swap("a", b"two", version)
    assert store.get("a") == (b"two", version)


@pytest.mark.nightly
def test_late_request_cannot_replace_what_came_meanwhile(
    faulty: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    held = proxy.add("PUT-if-match", times=1, hold=2.5)
    version = store.create("a", b"one")
    faulty.swap("a", b"two", version)
    assert held.met == 1
    current = store.get("a")
    assert current is not None
    store.swap("a", b"three", current.version)
    time.sleep(3)  # until the held request has reached the store
    assert data_of(store, "a") == b"three"


def test_create_that_lost_its_answer_and_its_place_reports_the_other_object(
    patient: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    created = threading.Event()
    proxy.add("PUT-if-absent", times=1, drop=True)
    reading = proxy.add("GET", times=1, until=created)

    def create_theirs() -> None:
        reading.reached.wait(60)
        store.create("a", b"theirs")
        created.set()

    other = threading.Thread(target=create_theirs)
    other.start()
    with pytest.raises(ObjectExists) as caught:
        patient.create("a", b"ours")
    other.join()
    assert caught.value.found.data == b"theirs"


@pytest.mark.nightly
def test_outcome_is_unknown_if_no_answer_ever_comes(
    store: ObjectStore, faulty: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.add("PUT", lose=True)
    proxy.add("GET", drop=True)
    with pytest.raises(OutcomeUnknown, match=r"it is unknown whether s3://.* was stored"):
        faulty.create("a", b"one")
    assert data_of(store, "a") == b"one"


def test_refused_credentials_are_not_retried(
    server: SeaweedFS, prefix: str, proxy: FaultProxy
) -> None:
    options = server.options(aws_secret_access_key="wrong-secret-of-the-test")
    options["aws_endpoint"] = f"http://127.0.0.1:{proxy.port}"
    store = open_store(parse(f"s3://{BUCKET}/{prefix}"), StorageOptions(options))
    with pytest.raises(StoreError, match="check the credentials") as caught:
        store.create("a", b"one")
    assert "wrong-secret" not in str(caught.value)
    assert sum(proxy.counts.values()) == 1


def test_refusal_after_a_lost_answer_leaves_the_outcome_unknown(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.add("PUT-if-absent", times=1, drop=True)
    proxy.add("GET", times=1, answer=404)
    proxy.add("PUT-if-absent", answer=403)
    with pytest.raises(OutcomeUnknown, match="refuses to write"):
        patient.create("a", b"one")


def test_missing_bucket_is_named(faulty: ObjectStore, proxy: FaultProxy) -> None:
    proxy.add("PUT", answer=404)  # SeaweedFS would create the bucket
    with pytest.raises(StoreError, match="there is no bucket 'lab'"):
        faulty.create("a", b"one")


def test_forked_process_cannot_use_the_connection(store: ObjectStore) -> None:
    store.create("a", b"one")
    store._process = os.getpid() + 1
    with pytest.raises(StoreError, match="forked"):
        store.get("a")


def test_large_objects_are_stored_in_one_request(proxy: FaultProxy, prefix: str) -> None:
    options = StorageOptions(storage_options(proxy.port, timeout="60s"))
    store = open_store(parse(url(prefix)), options)
    data = os.urandom(9 << 20)
    store.create("large", data)
    assert proxy.counts == {"PUT-if-absent": 1}
    assert data_of(store, "large") == data


def test_secret_of_the_server_is_not_in_any_key(store: ObjectStore) -> None:
    store.create("a", b"one")
    assert SECRET not in "".join(store.list(""))


def test_missing_bucket_does_not_mean_that_an_earlier_attempt_stored_nothing(
    faulty: ObjectStore, proxy: FaultProxy, store: ObjectStore
) -> None:
    let_go = threading.Event()
    proxy.add("PUT-if-absent", until=let_go, times=1)
    proxy.add("PUT-if-absent", answer=404)
    with pytest.raises(OutcomeUnknown, match="there is no bucket"):
        faulty.create("late", b"data")
    let_go.set()
    until_true(lambda: store.get("late") is not None)
