"""Compaction never moves a row: every offset reads the same before and after."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buckets import LANCE, PERSISTING, Bucket, Kind

from persisting import fs
from persisting.table import compaction, indexes, operations
from persisting.table.compaction import Limit
from persisting.table.indexes import IndexSpec
from persisting.table.layout import ARRIVAL_FIELD
from persisting.table.table import Table
from persisting.table.view import TableView

NARROW = pa.schema([("n", pa.int64()), ("i", pa.int64())])
VECTOR = pa.list_(pa.float64(), 2)
SCHEMAS = [
    NARROW,
    pa.schema([*NARROW, ("word", pa.string())]),
    pa.schema([("n", pa.int64()), ("i", pa.float64()), ("word", pa.string())]),
    pa.schema([("n", pa.int64()), ("i", pa.float64()), ("word", pa.string()), ("v", VECTOR)]),
]
WANTED = [
    IndexSpec(column="n", kind="btree"),
    IndexSpec(column="i", kind="bitmap"),
    IndexSpec(column="word", kind="text"),
    IndexSpec(column="word", kind="btree"),
    IndexSpec(column="v", kind="ivf_flat"),
]

FLUSHES = st.tuples(
    st.just("flush"), st.lists(st.sampled_from([1, 1, 2, 3, 5, 8, 40]), min_size=2, max_size=6)
)
COMPACTION = st.one_of(
    st.tuples(st.just("suffix"), st.integers(1, 8)),
    st.tuples(st.just("policy"), st.sampled_from([10, 60, 262_144])),
    st.tuples(st.just("all"), st.sampled_from([10, 60, 262_144])),
)
OTHER = st.one_of(
    st.tuples(st.just("evolve"), st.just(1)),
    st.tuples(st.just("index"), st.integers(0, len(WANTED) - 1)),
    st.tuples(st.just("optimize"), st.integers(0, 1)),
    st.tuples(st.just("drop"), st.integers(1, 2)),
)
STEPS = st.lists(
    st.tuples(FLUSHES, st.lists(OTHER, max_size=2), FLUSHES, COMPACTION).map(
        lambda found: [found[0], *found[1], found[2], found[3]]
    ),
    min_size=2,
    max_size=7,
).map(lambda found: [step for steps in found for step in steps])
Step = tuple[str, Any]


class Growing:
    """A table that changes, and the rows that it must hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table(folder, fs.current())
        self.rows: list[dict[str, Any]] = []
        self.start = self.schema = self.sequence = 0
        self.wanted: list[IndexSpec] = []

    def flush(self, rows: int) -> None:
        self.sequence += 1
        end = self.start + len(self.rows)
        made = [
            {"n": n, "i": n % 5, "word": f"word{n % 3}", "v": [float(n % 7), float(n)]}
            for n in range(end, end + rows)
        ]
        schema = SCHEMAS[self.schema]
        made = [{name: row[name] for name in schema.names} for row in made]
        batch = pa.RecordBatch.from_pylist(made, schema=schema)
        times = pa.array([self.sequence] * rows, ARRIVAL_FIELD.type)
        self.table.append([(batch, times)], schema, self.sequence)
        self.rows += made

    def step(self, name: str, number: Any) -> None:
        if name == "flush":
            for rows in number:
                self.flush(rows)
        elif name == "evolve":
            self.schema = min(self.schema + 1, len(SCHEMAS) - 1)
        elif name == "drop":
            count = min(number, len(self.table.view.sizes))
            dropped = operations.drop_first(self.table, count) if count else 0
            self.start, self.rows = self.start + dropped, self.rows[dropped:]
        elif name == "index":
            if WANTED[number] not in self.wanted:
                self.wanted.append(WANTED[number])
            operations.build_indexes(self.table, self.wanted)
        elif name == "optimize":
            operations.optimize_indexes(self.table, whole=bool(number))
        else:
            self.compact(name, number)

    def compact(self, name: str, number: int) -> None:
        view = self.table.view
        limit = Limit(rows=50) if name == "suffix" else Limit(rows=number)
        count = {
            "suffix": lambda: min(number, len(view.sizes)),
            "policy": lambda: compaction.worthwhile(view.sizes, limit),
            "all": lambda: compaction.everything(view.sizes, limit),
        }[name]()
        if not count:
            return
        kept = [fragment.id for fragment in view.fragments[:-count]]
        operations.compact(self.table, fs.current(), count, limit)
        after = self.table.view
        assert [fragment.id for fragment in after.fragments[: len(kept)]] == kept
        assert (after.start, after.end) == (view.start, view.end)
        self.check(view)
        self.check(after)

    def check(self, view: TableView) -> None:
        """Assert all rows of a view by scan, by take, one by one, and through its indexes."""
        expected = [row["n"] for row in self.rows]
        assert (view.start, view.end) == (self.start, self.start + len(expected))
        assert rows_of(view, view.start, view.rows) == self.rows_in(view)
        for offset in range(view.start, view.end, 5):
            assert rows_of(view, offset, 1) == self.rows_in(view)[offset - view.start :][:1]
        if expected:
            back = list(range(view.start, view.end))[::-1]
            assert view.take(back)["n"].to_pylist() == expected[::-1]

    def rows_in(self, view: TableView) -> list[dict[str, Any]]:
        return [{name: row.get(name) for name in view.schema.names} for row in self.rows]


def rows_of(view: TableView, offset: int, limit: int) -> list[dict[str, Any]]:
    return [row for batch in view.batches(offset, limit) for row in batch.to_pylist()]


def any_sequence(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "LEAST_VECTORS", 8)
        patch.setattr(compaction, "_MANY", 4)
        patch.setattr(compaction, "_EVEN", 2)
        growing = Growing(Path(folder))
        growing.flush(3)
        for name, number in steps:
            growing.step(name, number)
        growing.check(growing.table.view)
        again = Table(Path(folder), fs.current())
        again.open(left_clean=True)
        growing.check(again.view)


@settings(max_examples=8)
@given(STEPS)
def test_every_offset_reads_the_same_after_any_sequence_of_compactions(steps: list[Step]) -> None:
    any_sequence(steps)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=300, derandomize=False)
@given(STEPS)
def test_nightly_every_offset_reads_the_same_after_any_sequence_of_compactions(
    steps: list[Step],
) -> None:
    any_sequence(steps)


async def state_of(backend: Any) -> list[Any]:
    """Return every offset, the whole table, and the results of searches and filters."""
    end = (await backend.stats())["end_offset"]
    singles = [(await backend.get(offset, 1))[0] for offset in range(end)]
    return [
        singles,
        await backend.get(),
        (await backend.get_arrow()).to_pylist(),
        [record async for record in backend.get_stream()],
        await backend.take(list(range(end))[::-1]),
        await backend.query("i % 4 = 1"),
        await backend.lookup("i", 17),
        await backend.search(vector=[3.0, 4.0], k=5),
        [hit["_offset"] for hit in await backend.search(text="odd", k=1000)],
    ]


def record(i: int) -> dict[str, Any]:
    word = "odd" if i % 2 else "even"
    return {"i": i, "word": f"{word} {i}", "v": [float(i), i / 2]}


@pytest.mark.parametrize("kind", [LANCE, PERSISTING], ids=str)
async def test_automatic_compaction_does_not_change_what_is_read(kind: Kind, folder: Path) -> None:
    bucket = Bucket(kind, folder)
    backend = bucket.open(compaction=False, flush_interval=None)
    for i in range(36):
        await backend.put_batch([record(2 * i), record(2 * i + 1)])
        await backend.flush()
        if i == 10:
            await backend.create_index("i")
            await backend.create_index("word")
    before = await state_of(backend)
    assert (await backend.stats())["fragments"] == 36
    backend = await bucket.reopen(backend, compaction=True, flush_interval=None)
    backend._bucket.maintenance._job.request().result(60)
    stats = await backend.stats()
    assert stats["upkeep_error"] is None
    assert stats["fragments"] < 36
    assert await state_of(backend) == before
    await bucket.close()


@pytest.mark.parametrize("seed", range(3))
async def test_requested_compaction_does_not_change_what_is_read(
    persisting: Bucket, seed: int
) -> None:
    rng = random.Random(seed)
    backend = persisting.open(compaction=False, flush_interval=None)
    number = 0
    for _ in range(12):
        rows = rng.choice([1, 2, 9])
        changed = {"x": 1} if rng.random() < 0.3 else {}
        await backend.put_batch([record(number + i) | changed for i in range(rows)])
        number += rows
        await backend.flush()
        if rng.random() < 0.3:
            await backend.create_index(rng.choice(["i", "word"]))
    before = await state_of(backend)
    done = await backend.compact()
    assert done["fragments_before"] == 12
    assert done["fragments_after"] == 1
    assert await state_of(backend) == before
