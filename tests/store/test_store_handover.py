"""Files that another process hands over to the owner of a topic in an object store.

Processes are stores of their own here, which die at a request; ``test_store_handover_kill.py``
kills real ones.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.fault_proxy import FaultProxy
from support.handover import PUTS, texts
from support.handover_kills import points
from support.object_stores import storage_options
from support.store_handover import (
    BUCKETS,
    LEASE,
    MortalStore,
    Owner,
    config_of,
    content,
    create_topic,
    hand_over,
    handovers,
    ids,
    unreferenced,
    written_notes,
)
from support.store_places import topic_store
from support.threads import in_background
from support.waiting import until_true

from persisting.bucket import bulk_import, store_notes
from persisting.bucket.handover_notes import READY, Answer, Note
from persisting.bucket.store_notes import DECIDED, SENT, VOID, HandoverState, StoredAnswer
from persisting.errors import BucketLocked, StorageError
from persisting.store.object_store import ObjectStore, StoreError, open_store
from persisting.store.storage_options import StorageOptions
from persisting.table import bulk_write
from persisting.topic import handover, store_deletion, store_handover
from persisting.wal import lease
from persisting.wal.lease import lease_register

OLD = list(range(PUTS - 10, PUTS))
"""The ids that a new topic holds."""


@pytest.fixture
def topic(where: dict[str, Any]) -> ObjectStore:
    """The store of a topic with two buckets that have no owner."""
    create_topic(where["storage_path"], where["storage_options"])
    return topic_store(where)


@pytest.fixture
def owner(topic: ObjectStore) -> Iterator[Owner]:
    """A living owner of all buckets, with buffered records."""
    owner = Owner(topic)
    owner.put()
    yield owner
    owner.close()


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have owner and driver know each other only by the store, as on two machines."""

    class Nothing(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            pass

    monkeypatch.setattr(lease, "_held_here", Nothing())


def states(store: ObjectStore) -> list[str]:
    """Return the states of all hand-overs."""
    found = [store_notes.state_register(store, name).read() for name in store_notes.list_all(store)]
    return [held.content.state for held in found if held is not None]


def leave_notes(
    store: ObjectStore, records: list[dict[str, Any]], state: str = DECIDED, **given: Any
) -> str:
    """Leave the files and notes of a driver that died; return the id."""
    return send_and_die(store, written_notes(store, records, **given), state)


def send_and_die(store: ObjectStore, notes: dict[int, Note], state: str = DECIDED) -> str:
    name = store_notes.new_name(store)
    store_notes.state_register(store, name).create(HandoverState(state=state, seconds=LEASE))
    for bucket, note in notes.items():
        store_notes.write_note(store, name, bucket, note)
    return name


class TestAdoption:
    @pytest.mark.usefixtures("far_apart")
    def test_rows_get_the_offsets_after_those_of_buffered_records(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        assert hand_over(topic, texts(0, 20)) == 20
        owner.put()
        found = content(topic)
        for bucket, numbers in found.items():
            first, last = PUTS + 5 * bucket, PUTS + 5 * (BUCKETS + bucket)
            handed = [number for number in numbers if number < 20]
            assert numbers[-10 - len(handed) :] == [
                *range(first, first + 5),
                *sorted(handed),
                *range(last, last + 5),
            ]
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 20)]
        assert handovers(topic) == []

    def test_repeated_write_is_stored_once(self, topic: ObjectStore, owner: Owner) -> None:
        assert [hand_over(topic, texts(0, 20)) for _ in range(2)] == [20, 0]
        owner.put()
        assert hand_over(topic, texts(0, 20)) == 0
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 20)]

    def test_overwrite_replaces_what_was_acknowledged_before_it(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        assert hand_over(topic, texts(0, 20), overwrite=True) == 20
        owner.put()
        assert ids(topic) == [*range(20), *range(PUTS + 10, PUTS + 20)]

    def test_field_that_was_widened_since_the_files_were_written_loses_no_value(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        hand_over(topic, [{"id": n, "text": "a", "n": 1} for n in (0, 1)], "first")

        def widen() -> None:
            records = [{"id": n, "text": "c", "n": 0.5} for n in (2, 3)]
            assert hand_over(topic, records, "wider") == 2

        assert hand_over(topic, [{"id": n, "text": "d", "n": n} for n in (4, 5)], meanwhile=widen)
        assert ids(topic)[:6] == [0, 1, 2, 3, 4, 5]
        assert handovers(topic) == []

    def test_several_concurrent_drivers_store_their_writes(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        calls = [
            in_background(lambda n=n: hand_over(topic, texts(100 * n, 20), f"w{n}"))
            for n in range(3)
        ]
        for thread, results in calls:
            thread.join()
            assert results == [20]
        expected = [100 * n + i for n in range(3) for i in range(20)]
        assert ids(topic) == [*expected, *OLD, *range(PUTS, PUTS + 10)]
        assert handovers(topic) == []

    def test_buckets_without_an_owner_are_owned_by_the_driver(self, topic: ObjectStore) -> None:
        owner = Owner(topic, [0])
        owner.put()
        assert hand_over(topic, texts(0, 20)) == 20
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 5)]
        assert handovers(topic) == []
        owner.put()
        owner.close()

    def test_missing_file_is_refused_and_no_bucket_gets_rows(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        notes = written_notes(topic, texts(0, 20))
        (name,) = notes[1].files
        topic.delete([f"bucket_1/data.lance/data/{name}"])
        with pytest.raises(StorageError, match=r"was removed before it was committed; nothing was"):
            handover.adopt(topic, config_of(topic), notes)
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]
        assert handovers(topic) == []
        assert unreferenced(topic) == set()


class TestFlush:
    @pytest.mark.usefixtures("far_apart")
    def test_flush_writes_everything_acknowledged_to_the_tables(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        assert all(backend.bucket.counts[1] for backend in owner.backends.values())
        handover.flush(topic, config_of(topic))
        assert not any(backend.bucket.counts[1] for backend in owner.backends.values())
        assert handovers(topic) == []

    def test_flush_of_a_killed_owner_replays_its_log(self, topic: ObjectStore) -> None:
        dead = MortalStore(topic)
        killed = Owner(dead)
        killed.put()
        dead.kill()
        handover.flush(topic, config_of(topic))
        killed.die()
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]
        assert handovers(topic) == []

    def test_answer_of_a_former_owner_is_ignored(self, topic: ObjectStore) -> None:
        """It may have nothing to flush, while the next owner has."""
        former = Owner(topic, [0])
        former.close()
        owner = Owner(topic, [0])
        owner.put()
        exchange = store_handover.StoreExchange(topic, config_of(topic))
        exchange.send({0: written_notes(topic, texts(0, 20))[0]})
        register = store_notes.answer_register(topic, exchange._name, 0)
        term = owner.backends[0].bucket.ownership.term  # type: ignore[attr-defined]
        register.create(StoredAnswer(answer=Answer(state=READY), term=term - 1))
        assert exchange.answer(0) is None
        exchange.own_if_free(0)
        until_true(lambda: exchange.answer(0) is not None)
        exchange.may_be_decided()
        exchange.remove([0])
        exchange.close(finished=True)
        owner.close()


DRIVER_DEATHS = {
    "before the state": ("create", "state.json", False),
    "after the state": ("create", "state.json", True),
    "between two notes": ("create", "bucket_0.note", True),
    "before the decision": ("swap", '"state":"decided"', False),
    "at the decision": ("swap", '"state":"decided"', True),
    "before the notes are removed": ("delete", ".note", False),
    "when the notes are removed": ("delete", ".note", True),
    "when the answers are removed": ("delete", ".answer", True),
}
DECIDED_AT = list(DRIVER_DEATHS).index("at the decision")
OWNER_DEATHS = {
    "when it has listed the notes": ("list", "handover", True),
    "before it is ready": ("create", ".answer", False),
    "when it is ready": ("create", ".answer", True),
    "before its commit": ("commit", "", False),
    "after its commit": ("commit", "", True),
    "before its answer": ("swap", '"state":"done"', False),
    "at its answer": ("swap", '"state":"done"', True),
}


NOT_NIGHTLY = {
    "between two notes",
    "before the decision",
    "at the decision",
    "when the notes are removed",
    "when it is ready",
    "before its commit",
    "after its commit",
    "before its answer",
}


@pytest.mark.usefixtures("far_apart")
class TestDeaths:
    @pytest.mark.parametrize("point", points(DRIVER_DEATHS, NOT_NIGHTLY))
    def test_driver_that_dies_loses_and_duplicates_nothing(
        self, topic: ObjectStore, owner: Owner, point: str
    ) -> None:
        """The owner drops what was not decided, and completes what was."""
        notes = written_notes(topic, texts(0, 20))
        driver = MortalStore(topic)
        config = config_of(topic)
        driver.kill_at(*DRIVER_DEATHS[point][:2], after=DRIVER_DEATHS[point][2])
        thread, _ = in_background(lambda: handover.adopt(driver, config, notes, 5))
        assert driver.dead.wait(30)
        owner.put()
        owner.log.handovers.called()  # type: ignore[union-attr]  # as cleaning does
        until_true(lambda: handovers(topic) == [])
        thread.join()
        decided = list(DRIVER_DEATHS).index(point) >= DECIDED_AT
        stored = list(range(20)) if decided else []
        assert ids(topic) == [*stored, *OLD, *range(PUTS, PUTS + 20)]
        assert hand_over(topic, texts(0, 20)) == (0 if decided else 20)
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 20)]

    @pytest.mark.parametrize("point", points(OWNER_DEATHS, NOT_NIGHTLY))
    def test_owner_that_dies_loses_and_duplicates_nothing(
        self, topic: ObjectStore, monkeypatch: pytest.MonkeyPatch, point: str
    ) -> None:
        """The driver takes over the buckets once the lease expires, and completes the
        write."""
        mortal = MortalStore(topic)
        owner = Owner(mortal)
        owner.put()
        notes = written_notes(topic, texts(0, 20))
        call, part, after = OWNER_DEATHS[point]
        mortal.kill_at(call, part, after=after)
        if call == "commit":
            commit = bulk_import._commit

            def die(bucket: Any, *args: Any) -> int:
                if bucket._store is not mortal:
                    return commit(bucket, *args)
                rows = commit(bucket, *args) if after else 0
                mortal.kill()
                raise StoreError(f"killed by the test with {rows} rows")

            monkeypatch.setattr(bulk_import, "_commit", die)
        handover.adopt(topic, config_of(topic), notes, 30)
        assert mortal.dead.is_set()
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]
        assert handovers(topic) == []
        assert hand_over(topic, texts(0, 20)) == 0
        owner.die()

    def test_driver_and_owner_that_die_leave_the_rows_to_the_next_owner(
        self, topic: ObjectStore
    ) -> None:
        both = MortalStore(topic)
        dead = Owner(both)
        dead.put()
        notes, config = written_notes(topic, texts(0, 20)), config_of(topic)
        both.kill_at("swap", '"state":"decided"', after=True)
        with pytest.raises(StorageError):
            handover.adopt(both, config, notes, 5)
        assert states(topic) == [DECIDED]
        owner = Owner(topic)
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]
        owner.continue_at(PUTS + 10)
        owner.put()
        until_true(lambda: handovers(topic) == [])
        owner.close()
        dead.die()


class TestPauses:
    def test_driver_that_was_paused_before_its_decision_cannot_decide(
        self, topic: ObjectStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide = store_handover.decide

        def paused(state: Any) -> None:
            state._stopped = True  # no heartbeat
            until_true(lambda: handovers(topic) == [])
            decide(state)

        monkeypatch.setattr(store_handover, "decide", paused)
        with pytest.raises(StorageError, match=r"no heartbeat .*only with the same writeId"):
            hand_over(topic, texts(0, 20))
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]
        assert unreferenced(topic) == set()

    def test_driver_that_was_paused_after_its_decision_finds_its_rows_in_the_tables(
        self, topic: ObjectStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide = store_handover.decide

        def paused(state: Any) -> None:
            decide(state)
            state._stopped = True  # no heartbeat
            until_true(lambda: handovers(topic) == [])
            state._beating.request().result()
            state._stopped = False
            state._beat()

        monkeypatch.setattr(store_handover, "decide", paused)
        assert hand_over(topic, texts(0, 20)) == 20
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]

    def test_hand_over_that_is_void_cannot_be_decided(self, topic: ObjectStore) -> None:
        register = store_notes.state_register(topic, "00000000000000000001-a")
        keeper = store_handover._StateKeeper(topic, "00000000000000000001-a", 60.0)
        held = register.read()
        assert held is not None
        register.swap(held, msgspec.structs.replace(held.content, state=VOID))
        with pytest.raises(StorageError, match="have discarded"):
            keeper.decide()
        assert states(topic) == [VOID]
        keeper.stop()

    def test_hand_over_that_is_decided_cannot_be_given_up(self, topic: ObjectStore) -> None:
        keeper = store_handover._StateKeeper(topic, "00000000000000000001-a", 60.0)
        before = keeper._held
        keeper.decide()
        keeper._held = before  # as if the answer had been lost
        assert not keeper.make_void()
        assert keeper.is_decided
        assert states(topic) == [DECIDED]
        keeper.stop()

    def test_beating_driver_is_not_given_up_and_a_silent_one_is(self, topic: ObjectStore) -> None:
        name = "00000000000000000001-a"
        keeper = store_handover._StateKeeper(topic, name, LEASE)
        seen = store_notes._Seen()
        register = store_notes.state_register(topic, name)
        end = time.monotonic() + 1.5 * LEASE
        while time.monotonic() < end:
            seen.read(register)
            assert seen.state == SENT
            time.sleep(0.05)
        keeper.stop()
        until_true(lambda: seen.read(register) or seen.state == VOID)
        assert seen.status == (False, False)


class TestLostAnswers:
    @pytest.mark.parametrize(
        ("match", "also"),
        [
            ("PUT-if-absent", "state.json"),
            ("PUT-if-absent", ".note"),
            ("PUT-if-match", "state.json"),
            ("PUT-if-match", "lease.json"),
        ],
    )
    def test_request_of_the_driver_whose_answer_is_lost_counts_once(
        self, topic: ObjectStore, owner: Owner, proxy: FaultProxy, far_apart: None,
        match: str, also: str,
    ) -> None:  # fmt: skip
        options = StorageOptions(storage_options(proxy.port, timeout="2s"))
        driver = open_store(topic.address, options)
        notes = written_notes(topic, texts(0, 20))
        lost = proxy.add(match, also=also, times=2, lose=True)
        assert sum(handover.adopt(driver, config_of(topic), notes).values()) == 20
        assert lost.met
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]
        assert handovers(topic) == []

    def test_answers_of_the_owner_that_are_lost_count_once(
        self, topic: ObjectStore, proxy: FaultProxy
    ) -> None:
        options = StorageOptions(storage_options(proxy.port, timeout="2s"))
        owner = Owner(open_store(topic.address, options))
        owner.put()
        lost = proxy.add("PUT", also=".answer", times=3, lose=True)
        assert hand_over(topic, texts(0, 20)) == 20
        assert lost.met == 3
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]
        owner.close()


class TestOwners:
    def test_owner_that_does_not_answer_is_named_and_nothing_is_stored(
        self, topic: ObjectStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notes = written_notes(topic, texts(0, 20))
        monkeypatch.setattr(owner.log._lease, "on_call", lambda: None)
        with pytest.raises(BucketLocked, match=r"process \d+ .*did not check the files within 0.7"):
            handover.adopt(topic, config_of(topic), notes, 0.7)
        assert handovers(topic) == []
        assert unreferenced(topic) == set()
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]

    @pytest.mark.usefixtures("far_apart")
    def test_owner_of_an_older_version_is_named_and_not_disturbed(
        self, topic: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease, "CALLS", 0)
        owner = Owner(topic)
        register = lease_register(topic, owner.log.name)
        with pytest.raises(BucketLocked, match=r"did not answer .*an older version of persisting"):
            handover.ping(topic, config_of(topic), 0.7)
        held = register.read()
        assert held is not None
        assert held.content.calls == 0
        assert handovers(topic) == []
        owner.put()
        owner.close()

    @pytest.mark.usefixtures("far_apart")
    def test_calls_do_not_keep_a_dead_owner_alive(self, topic: ObjectStore) -> None:
        dead = MortalStore(topic)
        owner = Owner(dead)
        owner.put()
        dead.kill()
        stop = threading.Event()

        def call() -> None:
            while not stop.wait(0.1):
                lease.call_owner(topic, owner.log.name)

        thread, _ = in_background(call)
        try:
            next_owner = Owner(topic)
        finally:
            stop.set()
            thread.join()
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]
        next_owner.close()

    def test_many_concurrent_calls_do_not_end_an_ownership(
        self, topic: ObjectStore, owner: Owner, far_apart: None
    ) -> None:
        for _ in range(5):
            lease.call_owner(topic, owner.log.name)
            owner.log.log.beat()
        assert not owner.log.lost
        owner.put()


class TestOpening:
    def test_decided_overwrite_is_stored_before_a_new_owner_takes_puts(
        self, topic: ObjectStore
    ) -> None:
        leave_notes(topic, texts(0, 20), overwrite=True)
        owner = Owner(topic)
        owner.put()
        assert ids(topic) == [*range(20), *range(PUTS, PUTS + 10)]
        until_true(lambda: handovers(topic) == [])
        owner.close()

    @pytest.mark.parametrize("state", [SENT, VOID])
    def test_undecided_notes_are_removed_with_their_files(
        self, topic: ObjectStore, state: str
    ) -> None:
        leave_notes(topic, texts(0, 20), state)
        owner = Owner(topic)
        owner.put()
        until_true(lambda: handovers(topic) == [])
        owner.close()
        assert ids(topic) == [*OLD, *range(PUTS, PUTS + 10)]
        assert unreferenced(topic) == set()

    def test_older_write_that_fails_blocks_the_newer_one_and_the_opening(
        self, topic: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notes = [
            written_notes(topic, texts(first, 20), (f"w{first}", 0), overwrite=True)
            for first in (0, 20)
        ]
        older, newer = [send_and_die(topic, some) for some in notes]
        assert older < newer
        commit = bulk_write.commit_files
        failures = iter([True])

        def fail(*args: Any, **kwargs: Any) -> None:
            if next(failures, False):
                raise StoreError("the store is full")
            commit(*args, **kwargs)

        monkeypatch.setattr(bulk_import.bulk_write, "commit_files", fail)
        with pytest.raises(StorageError, match=rf"cannot be opened .*{older}/bucket_0.note.*full"):
            Owner(topic)
        owner = Owner(topic)
        assert ids(topic) == list(range(20, 40))
        until_true(lambda: handovers(topic) == [])
        owner.close()

    def test_reader_of_spark_sees_what_is_decided_although_the_topic_has_no_owner(
        self, topic: ObjectStore
    ) -> None:
        from persisting.topic.store_files import StoreTopic

        leave_notes(topic, texts(0, 20))
        StoreTopic(topic, config_of(topic)).recover()
        assert ids(topic) == [*range(20), *OLD]

    def test_notes_without_a_state_are_left_over_and_removed(self, topic: ObjectStore) -> None:
        name = leave_notes(topic, texts(0, 20))
        store_notes.forget(topic, name)
        Owner(topic).close()
        assert handovers(topic) == []
        assert ids(topic) == OLD

    def test_decided_note_that_fails_keeps_its_files_from_cleaning(
        self, topic: ObjectStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notes = written_notes(topic, texts(0, 20))

        def fail(*args: Any, **kwargs: Any) -> None:
            raise StoreError("the store is full")

        with monkeypatch.context() as patch:
            patch.setattr(bulk_import.bulk_write, "commit_files", fail)
            with pytest.raises(StorageError, match="do not write the rows again, except with"):
                handover.adopt(topic, config_of(topic), notes, 1)
            for backend in owner.backends.values():
                assert backend.bucket.maintenance._bucket_needs_files()  # type: ignore[attr-defined]
        until_true(lambda: handovers(topic) == [])
        assert ids(topic) == [*range(20), *OLD, *range(PUTS, PUTS + 10)]

    def test_hand_over_that_ends_during_an_inspection_is_not_taken_for_a_void_one(
        self, topic: ObjectStore, owner: Owner
    ) -> None:
        """Its files are in the table, perhaps only in an older version."""
        name = leave_notes(topic, texts(0, 20), SENT)
        notes = owner.backends[0].bucket.new_notes()
        notes.find()
        assert notes.read(name) is not None
        store_notes.forget(topic, name)
        notes.find()
        assert notes.status(name) == (True, False)
        assert notes.read(name) is None

    def test_deletion_of_the_topic_does_not_wait_for_what_was_handed_over(
        self, topic: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave_notes(topic, texts(0, 20))

        def fail(*args: Any, **kwargs: Any) -> None:
            raise StoreError("the store is full")

        monkeypatch.setattr(bulk_import.bulk_write, "commit_files", fail)
        store_deletion.delete(topic)
        assert handovers(topic) == []


class TestRequests:
    @pytest.fixture
    def behind(self, topic: ObjectStore, proxy: FaultProxy) -> ObjectStore:
        """The topic behind the proxy."""
        return open_store(topic.address, StorageOptions(storage_options(proxy.port)))

    def test_owner_that_is_not_notified_makes_no_request_but_its_heartbeat(
        self, behind: ObjectStore, proxy: FaultProxy
    ) -> None:
        owner = Owner(behind)
        proxy.reset_counts()
        owner.log.log.beat()
        owner.log.log.beat()
        assert set(proxy.counts) == {"PUT-if-match"}
        owner.close()

    @pytest.mark.usefixtures("far_apart")
    def test_requests_of_a_hand_over_are_those_of_the_price_table(
        self, behind: ObjectStore, proxy: FaultProxy
    ) -> None:
        """Without heartbeats, and without the GET of both sides while they wait."""
        owner = Owner(behind)
        notes = written_notes(behind, texts(0, 20))
        assert len(notes) == BUCKETS
        assert all(len(note.files) == 1 for note in notes.values())
        proxy.reset_counts()
        handover.adopt(behind, config_of(behind), notes)
        seen = [kind for kind in proxy.seen if "PUT-if-match" not in kind or ".answer" in kind]
        counts = Counter(kind.partition(" ")[0].partition("-")[0] for kind in seen)
        del counts["GET"], counts["HEAD"]
        assert counts == {
            "PUT": 1 + 6 * BUCKETS,  # and 2 that swap the lease and the state
            "LIST": 2 + 4 * BUCKETS,
            "DELETE": 3,
        }
        owner.close()
