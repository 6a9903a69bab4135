"""Any sequence of operations: a table backend against MemoryBackend as the model."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.bucket_machine import BucketMachine, machine
from support.buckets import LANCE, PERSISTING, WAL_SYNCED, WAL_ZSTD
from support.comparing import equal_but_for_absent

from persisting.queue import MemoryBackend, SchemaError

SMALL = st.integers(-(2**53), 2**53)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "i": SMALL,
    "text": st.text(max_size=5),
    "flag": st.booleans(),
    "items": st.lists(SMALL, max_size=3),
    "vector": st.lists(st.floats(allow_nan=False), min_size=2, max_size=2),
    "dict": st.fixed_dictionaries({"a": st.none() | SMALL, "b": st.none() | st.text(max_size=3)}),
    "dicts": st.lists(st.fixed_dictionaries({"x": st.none() | SMALL}), max_size=2),
}
WIDER: dict[str, st.SearchStrategy[Any]] = {
    "i": st.floats(allow_nan=False),
    "items": st.lists(st.floats(allow_nan=False), max_size=3),
    "vector": st.lists(st.floats(allow_nan=False), max_size=4),
    "dict": st.fixed_dictionaries({"a": st.floats(allow_nan=False), "c": st.lists(SMALL)}),
    "dicts": st.lists(st.fixed_dictionaries({"y": st.text(max_size=3)}), max_size=2),
    "new": st.dates(),
    "other": st.lists(st.dictionaries(st.sampled_from("pq"), SMALL), max_size=2),
}

complete = st.fixed_dictionaries({name: st.none() | value for name, value in FIELDS.items()})
partial = st.fixed_dictionaries(
    {}, optional={name: st.none() | value for name, value in FIELDS.items()}
)
wider = st.fixed_dictionaries(
    {}, optional={name: st.none() | value for name, value in WIDER.items()}
)
BAD = [{"i": "text"}, {"text": 5}, {"flag": 1}, {"i": 2**63}, {"": 1}, {"i": object()}, None]


class Machine(BucketMachine):
    """The backend holds what the model holds after any operations."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MemoryBackend()
        self.fields: dict[str, None] = {}
        self.open()

    def open(self) -> None:
        self.backend = self.bucket.open(flush_threshold=20, flush_interval=None)

    def both(self, method: str, data: Any) -> None:
        self.run(getattr(self.model, method)(data))
        self.run(getattr(self.backend, method)(data))

    def note(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.fields.update(dict.fromkeys(row))

    def expect(self, got: list[dict[str, Any]], offset: int, limit: int | None) -> None:
        expected = self.run(self.model.get(offset, limit))
        assert len(got) == len(expected)
        for ours, theirs in zip(expected, got, strict=True):
            assert equal_but_for_absent(ours, theirs), f"\n{ours!r}\n{theirs!r}"
            assert list(theirs) == list(self.fields)

    @rule(row=complete)
    def put(self, row: dict[str, Any]) -> None:
        self.both("put", row)
        self.note([row])

    @rule(rows=st.lists(complete, max_size=8))
    def put_batch(self, rows: list[dict[str, Any]]) -> None:
        self.both("put_batch", rows)
        self.note(rows)

    @rule(row=complete, count=st.integers(1, 25))
    def put_many(self, row: dict[str, Any], count: int) -> None:
        for _ in range(count):
            self.both("put", row)
        self.note([row])

    @precondition(lambda self: self.fields)
    @rule(offset=st.integers(0, 5), limit=st.integers(1, 5))
    def put_what_was_read_as_arrow(self, offset: int, limit: int) -> None:
        table: pa.Table = self.run(self.backend.get_arrow(offset, limit))
        assert table.column_names == list(self.fields)
        self.run(self.backend.put_arrow(table))
        self.run(self.model.put_batch(self.run(self.model.get(offset, limit))))

    @rule()
    def flush(self) -> None:
        self.run(self.backend.flush())
        stats = self.run(self.backend.stats())
        assert stats["persisted_count"] == self.model.total_count()

    @rule(offset=st.integers(0, 60), limit=st.none() | st.integers(0, 60))
    def get(self, offset: int, limit: int | None) -> None:
        self.expect(self.run(self.backend.get(offset, limit)), offset, limit)

    @rule(offset=st.integers(0, 60), limit=st.none() | st.integers(0, 60))
    def stream(self, offset: int, limit: int | None) -> None:
        async def collect() -> list[dict[str, Any]]:
            return [record async for record in self.backend.get_stream(offset, limit)]

        self.expect(self.run(collect()), offset, limit)

    @precondition(lambda self: self.model.total_count())
    @rule(data=st.data())
    def wait_for_the_end(self, data: st.DataObject) -> None:
        count = self.model.total_count()
        offset = data.draw(st.integers(0, count - 1))

        async def collect() -> list[dict[str, Any]]:
            stream = self.backend.get_stream(offset, count - offset, block=True)
            return [record async for record in stream]

        self.expect(self.run(collect()), offset, None)

    @precondition(lambda self: self.fields)
    @rule(bad=st.sampled_from(BAD), rows=st.lists(complete, max_size=3))
    def refuse_a_bad_record(self, bad: Any, rows: list[dict[str, Any]]) -> None:
        typed = {"i": 1, "text": "a", "flag": True, "items": [], "vector": [0.5, 1.5]}
        good = {**typed, "dict": {"a": 1, "b": "b"}, "dicts": []}
        wrong = {**good, **bad} if isinstance(bad, dict) else bad
        with pytest.raises(SchemaError):
            self.run(self.backend.put_batch([*rows, good, wrong]))
        if bad is None or "" in bad or not isinstance(next(iter(bad.values())), (str, int)):
            with pytest.raises(SchemaError):
                self.run(self.backend.put(wrong))

    @rule(options=st.sampled_from([{}, {"compression": "lz4"}, {"flush_threshold": 3}]))
    def reopen(self, options: dict[str, Any]) -> None:
        given = {"flush_threshold": 20, "flush_interval": None, **options}
        self.backend = self.run(self.bucket.reopen(self.backend, **given))

    @invariant()
    def counts_agree(self) -> None:
        assert self.backend.total_count() == self.model.total_count()


class EvolvingMachine(Machine):
    """Records may also lack fields, and bring new fields and wider values."""

    @rule(rows=st.lists(partial, min_size=1, max_size=4))
    def put_partial(self, rows: list[dict[str, Any]]) -> None:
        self.both("put_batch", rows)
        self.note(rows)

    @rule(rows=st.lists(wider, min_size=1, max_size=3))
    def widen(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.both("put", row)
        self.note(rows)


class LoggedMachine(EvolvingMachine):
    """The process may also die: acknowledged records are recovered."""

    @rule()
    def die(self) -> None:
        self.drop_and_reopen()


TestLance = machine(Machine, LANCE, examples=8, steps=20)
TestPersisting = machine(EvolvingMachine, PERSISTING, examples=10, steps=20)
TestLogged = machine(LoggedMachine, WAL_ZSTD, examples=8, steps=20)
TestSynced = machine(LoggedMachine, WAL_SYNCED, examples=3, steps=15)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyLance(machine(Machine, LANCE, examples=150, steps=40, fixed=False)):  # type: ignore[misc]
    pass


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyLogged(  # type: ignore[misc]
    machine(LoggedMachine, WAL_ZSTD, examples=150, steps=40, fixed=False)
):
    pass
