"""JSON objects that are changed by compare-and-swap."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.fault_proxy import FaultProxy

from persisting.errors import StorageError
from persisting.store.object_store import ObjectChanged, ObjectExists, ObjectStore
from persisting.store.register import Register


class Count(msgspec.Struct, frozen=True):
    number: int
    format: int = 1


def register_in(store: ObjectStore) -> Register[Count]:
    return Register(store, "count.json", Count, 1)


def test_register_is_created_once_and_swapped_by_its_reader(store: ObjectStore) -> None:
    register = register_in(store)
    assert register.read() is None
    held = register.create(Count(1))
    with pytest.raises(ObjectExists):
        register.create(Count(1))
    register.swap(held, Count(2))
    with pytest.raises(ObjectChanged):
        register.swap(held, Count(3))
    found = register.read()
    assert found is not None
    assert found.content == Count(2)


def test_equal_contents_of_two_writers_are_different_versions(store: ObjectStore) -> None:
    register = register_in(store)
    held = register.create(Count(1))
    register.swap(held, Count(1))
    with pytest.raises(ObjectChanged):
        register.swap(held, Count(2))


def test_updates_of_many_threads_are_all_applied(store: ObjectStore) -> None:
    def add() -> None:
        for _ in range(5):
            register_in(store).update(lambda old: Count(1 if old is None else old.number + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = register_in(store).read()
    assert found is not None
    assert found.content.number == 20


def test_update_that_changes_nothing_writes_nothing(
    patient: ObjectStore, proxy: FaultProxy
) -> None:
    register = register_in(patient)
    register.create(Count(1))
    proxy.reset_counts()
    assert register.update(lambda old: Count(1)) == Count(1)
    assert proxy.counts == {"GET": 1}


def test_damaged_register_is_named(store: ObjectStore) -> None:
    store.create("count.json", b"{")
    with pytest.raises(StorageError, match=r"count\.json is damaged"):
        register_in(store).read()


def test_register_of_a_newer_format_asks_for_an_upgrade(store: ObjectStore) -> None:
    store.create("count.json", b'{"format": 2, "other": 1}')
    with pytest.raises(StorageError, match="upgrade persisting"):
        register_in(store).read()
