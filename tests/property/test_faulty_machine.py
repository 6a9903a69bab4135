"""Any sequence of operations on a disk that fails at random calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from support.bucket_machine import BucketMachine, machine
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, WAL_ZSTD
from support.comparing import equal_but_for_absent
from support.faults import FaultyFileSystem

from persisting import fs
from persisting.queue import BucketLocked, StorageError

SHAPES = [
    lambda i: {"i": i},
    lambda i: {"i": i, "text": "x" * 50},
    lambda i: {"i": i, "n": i},
    lambda i: {"i": i, "n": i + 0.5},
    lambda i: {"i": i, "d": {"a": i}},
    lambda i: {"i": i, "d": {"b": [i]}},
    lambda i: {"i": i, "v": [0.5] * (i % 3 + 1)},
]


class FaultyMachine(BucketMachine):
    """Acknowledged records are stored once, in order; refused ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.files = FaultyFileSystem()
        self.stored: list[dict[str, Any]] = []
        self.number = 0
        self.open_when_released()

    def open(self) -> None:
        with fs.use(self.files):
            while True:
                try:
                    self.backend = self.bucket.open(flush_threshold=8, flush_interval=None)
                except BucketLocked:
                    raise  # no fault of the disk: open_when_released() retries
                except StorageError:
                    self.files.heal()
                else:
                    return

    def teardown(self) -> None:
        self.files.heal()
        super().teardown()

    def make(self, shape: int) -> dict[str, Any]:
        self.number += 1
        return SHAPES[shape if self.kind.evolving else 0](self.number)

    @rule(calls=st.integers(0, 25))
    def let_a_call_fail(self, calls: int) -> None:
        self.files.fail_once_at(calls)

    @rule(shape=st.integers(0, len(SHAPES) - 1))
    def put(self, shape: int) -> None:
        record = self.make(shape)
        try:
            self.run(self.backend.put(record))
        except StorageError:
            return
        self.stored.append(record)

    @rule(shapes=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=6))
    def put_batch(self, shapes: list[int]) -> None:
        records = [self.make(shape) for shape in shapes]
        try:
            self.run(self.backend.put_batch(records))
        except StorageError:
            return
        self.stored += records

    @rule(shapes=st.lists(st.integers(0, len(SHAPES) - 1), min_size=2, max_size=6))
    def put_at_once(self, shapes: list[int]) -> None:
        records = [self.make(shape) for shape in shapes]

        async def put_all() -> list[Any]:
            return await asyncio.gather(
                *(self.backend.put(record) for record in records), return_exceptions=True
            )

        results = self.run(put_all())
        assert all(r is None or isinstance(r, StorageError) for r in results), results
        accepted = {
            record["i"]: record
            for record, result in zip(records, results, strict=True)
            if result is None
        }
        # Concurrent puts have no order until they are acknowledged.
        order = [r["i"] for r in self.run(self.backend.get(len(self.stored)))]
        assert sorted(order) == sorted(accepted)
        self.stored += [accepted[i] for i in order]

    @rule()
    def flush(self) -> None:
        try:
            self.run(self.backend.flush())
        except StorageError:
            return
        assert self.run(self.backend.stats())["persisted_count"] == len(self.stored)

    @rule()
    def heal_and_flush(self) -> None:
        self.files.heal()
        try:
            self.run(self.backend.flush())
        except StorageError:
            self.run(self.backend.flush())  # the first may retry an earlier failure
        assert self.run(self.backend.stats())["persisted_count"] == len(self.stored)

    @rule()
    def reopen(self) -> None:
        try:
            self.run(self.backend.close())
        except StorageError:
            self.files.heal()
            self.run(self.backend.close())
        self.open_when_released()

    @invariant()
    def all_is_there(self) -> None:
        got = self.run(self.backend.get())
        assert [r["i"] for r in got] == [r["i"] for r in self.stored]
        assert all(map(equal_but_for_absent, self.stored, got))


class CrashingMachine(FaultyMachine):
    """The process may also die: nothing acknowledged is lost."""

    @rule()
    def die(self) -> None:
        self.files.heal()
        self.drop_and_reopen()
        # A put that failed may have reached the log; it counts from now on.
        got = self.run(self.backend.get())
        known = {r["i"] for r in self.stored}
        assert [r["i"] for r in got if r["i"] in known] == [r["i"] for r in self.stored]
        assert len(got) == len({r["i"] for r in got})
        self.stored = got


TestLance = machine(FaultyMachine, LANCE, examples=6, steps=20)
TestPersisting = machine(FaultyMachine, PERSISTING, examples=7, steps=20)
TestSynced = machine(CrashingMachine, WAL_SYNCED, examples=5, steps=20)
TestLogged = machine(CrashingMachine, WAL_ZSTD, examples=4, steps=20)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyPersisting(  # type: ignore[misc]
    machine(FaultyMachine, PERSISTING, examples=150, steps=40, fixed=False)
):
    pass


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlySynced(  # type: ignore[misc]
    machine(CrashingMachine, WAL_SYNCED, examples=150, steps=40, fixed=False)
):
    pass
