"""Any sequence of operations on a bucket as a table, against a plain Python model of it.

Maintenance is eager (it compacts, indexes and cleans after a few flushes of a few rows), so that
every sequence goes through many compactions, indexed and cleaned-up states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)
from support.bucket_machine import BucketMachine, machine
from support.buckets import LANCE, PERSISTING, WAL_ZSTD
from support.comparing import equal_but_for_absent

from persisting.bucket import maintenance as bucket_maintenance
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.table import compaction, indexes
from persisting.table.compaction import Limit

Record = dict[str, Any]

WORDS = ["red", "green", "blue", "red tin", "Blue glass tin"]
VALUES = st.integers(-3, 3)
VECTORS = st.lists(st.integers(-4, 4).map(float), min_size=3, max_size=3)
ROWS: st.SearchStrategy[Record] = st.fixed_dictionaries(
    {
        "i": st.none() | VALUES,
        "word": st.none() | st.sampled_from(WORDS),
        "v": st.none() | VECTORS,
    }
)
TYPED: Record = {"i": 1, "word": "red", "v": [0.0, 1.0, 2.0]}
"""The first record of every bucket: it defines the types of all fields."""

EVOLVED: list[Record] = [
    {"x": 1},
    {"x": 2.5},
    {"y": "text"},
    {"d": {"a": 1}},
    {"d": {"b": [2]}},
    {"d": {"a": 0.5}},
    {"i": 0.5},
    {"i": -1.0, "x": 3},
]
FILTERS: list[tuple[str, Callable[[Record], bool]]] = [
    ("i >= 1", lambda r: r["i"] is not None and r["i"] >= 1),
    ("i IS NULL", lambda r: r["i"] is None),
    ("word = 'red'", lambda r: r["word"] == "red"),
    ("n % 3 = 0", lambda r: r["n"] % 3 == 0),
    ("n < 40 AND v IS NOT NULL", lambda r: r["n"] < 40 and r["v"] is not None),
    ("i < 0 OR word = 'green'", lambda r: (r["i"] or 0) < 0 or r["word"] == "green"),
]
LOOKUPS = st.one_of(
    st.tuples(st.just("n"), st.integers(0, 100)),
    st.tuples(st.just("i"), st.none() | VALUES),
    st.tuples(st.just("word"), st.none() | st.sampled_from(WORDS)),
)
INDEXES = [("v", "vector"), ("word", "text"), ("word", "scalar"), ("i", "scalar"), ("n", "scalar")]
TAGS = st.sampled_from(["one", "two", "three"])
PLACES = st.floats(0, 1)
"""A position among offsets or versions, as a fraction: their number may depend on maintenance,
but draws must not."""
OPTIONS = [
    {},
    {"keep_versions": 0.001},
    {"keep_versions": None},
    {"compaction": False},
    {"flush_threshold": 4},
]


@dataclass
class Content:
    """The records of a bucket or of one of its versions."""

    start: int = 0
    rows: list[Record] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def copy(self) -> Content:
        return Content(self.start, list(self.rows))

    def window(self, offset: int, limit: int | None) -> list[Record]:
        """Return what a read finds, or raise as the bucket must."""
        if 0 < offset < self.start:
            raise OffsetOutOfRange("below the start")
        first = max(offset, self.start) - self.start
        return self.rows[first : None if limit is None else first + limit]


def same_rows(expected: list[Record], got: list[Record]) -> None:
    assert [r["n"] for r in got] == [r["n"] for r in expected]
    for ours, theirs in zip(expected, got, strict=True):
        assert equal_but_for_absent(ours, theirs), f"\n{ours!r}\n{theirs!r}"


class TableMachine(BucketMachine):
    """The bucket holds what the model holds, at every offset of every version."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(compaction, "_MANY", 4)
        self.patch.setattr(compaction, "_EVEN", 2)
        self.patch.setattr(indexes, "LEAST_VECTORS", 12)
        self.patch.setattr(bucket_maintenance, "_BEHIND_ROWS", 6)
        self.now, self.epoch = Content(), 0
        self.tagged: dict[str, Content] = {}
        self.past: dict[int, Content] = {}
        self.indexed: set[tuple[str, str]] = set()
        self.offset_of: dict[int, int] = {}
        self.fields: dict[str, None] = {}
        self.restored = False
        self.open()

    def open(self, **options: Any) -> None:
        given = {"flush_threshold": 30, "flush_interval": None, **options}
        self.backend = self.bucket.open(**given)
        self.backend._bucket.maintenance._limit = Limit(rows=60, nbytes=10**6)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()

    # Making records

    def made(self, rows: list[Record]) -> list[Record]:
        """Return numbered rows; the first row of the bucket has every type."""
        made: list[Record] = []
        for row in rows:
            number = len(self.offset_of) + len(made)
            made.append({"n": number, **(TYPED | row if number else TYPED)})
        return made

    def stored(self, rows: list[Record]) -> None:
        for row in rows:
            self.offset_of[row["n"]] = self.now.end
            self.now.rows.append(row)
            self.fields.update(dict.fromkeys(row))

    @property
    def exists(self) -> bool:
        return bool(self.offset_of)

    # Comparing

    def check_all(self) -> None:
        """Assert that every offset reads right, in one read and each by itself."""
        same_rows(self.now.rows, self.run(self.backend.get()))
        offsets = list(range(self.now.start, self.now.end))
        mixed = offsets[::3] + offsets[::-1]
        got = self.run(self.backend.take(mixed)) if mixed else []
        same_rows([self.now.rows[o - self.now.start] for o in mixed], got)

    def expect(self, read: Callable[[], list[Record]], offset: int, limit: int | None) -> None:
        """Compare a read of the newest version."""
        if 0 < offset < self.now.start:
            with pytest.raises(OffsetOutOfRange):
                read()
            return
        got = read()
        same_rows(self.now.window(offset, limit), got)
        if not self.restored:
            assert all(list(row) == list(self.fields) for row in got)

    def note_versions(self) -> None:
        """Remember the content of versions that are seen for the first time."""
        seen = [v for v in self.run(self.backend.versions()) if v["version"] not in self.past]
        for one in seen[-3:]:
            rows = self.read_version(one["version"])
            if rows is None:
                continue
            assert len(rows) == one["rows"]
            start = self.now.start if not rows else self.offset_of[rows[0]["n"]]
            numbers = [self.offset_of[row["n"]] for row in rows]
            assert numbers == list(range(start, start + len(rows))), "no window of the records"
            if rows:
                self.past[one["version"]] = Content(start, rows)

    def read_version(self, version: Any, offset: int = 0) -> list[Record] | None:
        """Return the rows of a version, None if it was cleaned up."""
        try:
            return self.run(self.backend.get(offset, version=version))
        except OffsetOutOfRange:
            raise
        except StorageError:
            self.finish_maintenance()  # it may be in the middle of cleaning
            if version not in self.kept() | set(self.tagged):
                return None
        return self.run(self.backend.get(offset, version=version))

    def kept(self) -> set[int]:
        return {one["version"] for one in self.run(self.backend.versions())}

    def check_past(self, name: Any, content: Content) -> bool:
        """Return whether the version exists; assert that its content has not changed."""
        got = self.read_version(name, content.start)
        if got is None:
            return False
        same_rows(content.rows, got)
        if content.start > 1:
            with pytest.raises(OffsetOutOfRange):
                self.run(self.backend.get(content.start - 1, version=name))
        return True

    def finish_maintenance(self) -> None:
        """Run maintenance until it has nothing left to do."""
        self.backend._bucket.maintenance._job.request().result(60)

    # Putting

    @initialize(
        flushes=st.lists(st.lists(ROWS, min_size=1, max_size=6), max_size=9),
        which=st.sets(st.sampled_from(INDEXES), max_size=3),
        after=st.integers(0, 9),
        retained=st.none() | st.integers(0, 20),
        options=st.sampled_from(OPTIONS),
    )
    def begin(
        self,
        flushes: list[list[Record]],
        which: set[tuple[str, str]],
        after: int,
        retained: int | None,
        options: dict[str, Any],
    ) -> None:
        """A bucket with some history, so that later steps meet flushed and buffered rows."""
        self.reopen(options)
        for number, rows in enumerate(flushes):
            self.put_batch(rows)
            self.flush()
            if number == after:
                for one in sorted(which):
                    self.create_index(one)
        if retained is not None and flushes:
            self.retain(retained)

    @rule(row=ROWS)
    def put(self, row: Record) -> None:
        rows = self.made([row])
        self.run(self.backend.put(rows[0]))
        self.stored(rows)

    @rule(rows=st.lists(ROWS, min_size=1, max_size=12))
    def put_batch(self, rows: list[Record]) -> None:
        rows = self.made(rows)
        self.run(self.backend.put_batch(rows))
        self.stored(rows)

    @precondition(lambda self: self.exists)
    @rule(rows=st.lists(ROWS, min_size=1, max_size=12))
    def put_arrow(self, rows: list[Record]) -> None:
        rows = self.made(rows)
        schema = [("n", pa.int64()), ("i", pa.int64()), ("word", pa.string())]
        typed = pa.schema([*schema, ("v", pa.list_(pa.float64(), 3))])
        whole = [row | {"i": None if row["i"] is None else int(row["i"])} for row in rows]
        self.run(self.backend.put_arrow(pa.Table.from_pylist(whole, schema=typed)))
        self.stored(whole)

    @rule()
    def flush(self) -> None:
        self.run(self.backend.flush())
        assert self.run(self.backend.stats())["persisted_count"] == len(self.now.rows)

    @rule(rows=st.lists(ROWS, min_size=4, max_size=10))
    def flush_many_small_ones(self, rows: list[Record]) -> None:
        for row in rows:
            self.put(row)
            self.run(self.backend.flush())
        self.note_versions()

    # Maintenance

    @precondition(lambda self: self.exists)
    @rule()
    def let_maintenance_finish(self) -> None:
        self.finish_maintenance()
        self.check_all()
        report = self.run(self.backend.verify())
        assert report["ok"], report
        assert report["unchecked"] == []

    @precondition(lambda self: self.exists)
    @rule()
    def compact(self) -> None:
        self.run(self.backend.flush())
        self.check_all()
        self.note_versions()
        self.run(self.backend.compact())
        self.check_all()
        self.note_versions()

    @precondition(lambda self: self.exists)
    @rule(which=st.sampled_from(INDEXES))
    def create_index(self, which: tuple[str, str]) -> None:
        self.run(self.backend.create_index(*which))
        self.indexed.add(which)
        self.note_versions()

    @precondition(lambda self: self.exists)
    @rule(which=st.sampled_from(INDEXES))
    def drop_index(self, which: tuple[str, str]) -> None:
        dropped = self.run(self.backend.drop_index(*which))
        assert dropped == (which in self.indexed)
        self.indexed.discard(which)

    @precondition(lambda self: self.exists)
    @rule(rows=st.integers(0, 60))
    def retain(self, rows: int) -> None:
        before = len(self.now.rows)
        self.run(self.backend.flush())
        self.note_versions()
        result = self.run(self.backend.retain(rows=rows))
        dropped = result["dropped"]
        assert result["start_offset"] == self.now.start + dropped
        assert before - dropped >= min(rows, before)
        assert dropped == before or rows
        self.now = Content(self.now.start + dropped, self.now.rows[dropped:])
        self.check_all()
        self.note_versions()

    # Versions

    @precondition(lambda self: self.exists)
    @rule(name=TAGS)
    def tag(self, name: str) -> None:
        made = self.run(self.backend.tag(name))
        self.tagged[name] = self.now.copy()
        assert made["rows"] == len(self.now.rows)
        assert (made["start_offset"], made["end_offset"]) == (self.now.start, self.now.end)

    @precondition(lambda self: self.exists)
    @rule(name=TAGS)
    def delete_tag(self, name: str) -> None:
        assert self.run(self.backend.delete_tag(name)) == (name in self.tagged)
        self.tagged.pop(name, None)

    @rule()
    def look_at_tags(self) -> None:
        tags = self.run(self.backend.tags())
        assert {one["name"] for one in tags} == set(self.tagged)
        kept = self.kept()
        for one in tags:
            assert one["version"] in kept
            assert self.check_past(one["name"], self.tagged[one["name"]])

    def some_version(self, place: float) -> int | None:
        """Return one of the known versions that still exist."""
        while self.past:
            version = pick(sorted(self.past), place)
            if self.check_past(version, self.past[version]):
                return version
            del self.past[version]
        return None

    @precondition(lambda self: self.exists)
    @rule(place=PLACES)
    def look_back(self, place: float) -> None:
        self.some_version(place)

    def restore_to(self, version: Any, content: Content) -> None:
        end = self.now.end
        try:
            result = self.run(self.backend.restore(version))
        except InvalidArgument:
            assert version not in {0, *self.tagged, *self.kept()}, "it was there"
            return
        self.epoch += 1
        self.restored = True
        self.now = content.copy()
        assert result["epoch"] == self.epoch
        assert (result["start_offset"], result["end_offset"]) == (content.start, content.end)
        assert result["removed"] == max(0, end - content.end)
        self.check_all()

    @precondition(lambda self: self.tagged)
    @rule(place=PLACES)
    def restore_a_tag(self, place: float) -> None:
        name = pick(sorted(self.tagged), place)
        self.restore_to(name, self.tagged[name])

    @precondition(lambda self: self.exists)
    @rule(place=PLACES)
    def restore_a_version(self, place: float) -> None:
        version = self.some_version(place)
        if version is not None:
            self.restore_to(version, self.past[version])

    @precondition(lambda self: len(self.offset_of) > 20)
    @rule()
    def restore_to_nothing(self) -> None:
        self.restore_to(0, Content())

    # Reading

    @rule(place=PLACES, limit=st.none() | st.integers(0, 60))
    def get(self, place: float, limit: int | None) -> None:
        offset = pick(range(self.now.end + 3), place)
        self.expect(lambda: self.run(self.backend.get(offset, limit)), offset, limit)

    @rule(place=PLACES, limit=st.none() | st.integers(0, 60))
    def get_arrow(self, place: float, limit: int | None) -> None:
        offset = pick(range(self.now.end + 3), place)
        self.expect(
            lambda: self.run(self.backend.get_arrow(offset, limit)).to_pylist(), offset, limit
        )

    @rule(place=PLACES, limit=st.none() | st.integers(1, 60))
    def get_stream(self, place: float, limit: int | None) -> None:
        offset = pick(range(self.now.end + 3), place)

        async def collect() -> list[Record]:
            return [record async for record in self.backend.get_stream(offset, limit)]

        self.expect(lambda: self.run(collect()), offset, limit)

    @rule(places=st.lists(PLACES, max_size=6), beyond=st.booleans())
    def take(self, places: list[float], beyond: bool) -> None:
        known = range(self.now.start, self.now.end)
        offsets = [pick(range(self.now.end + 1) if beyond else known or [0], p) for p in places]
        if all(self.now.start <= offset < self.now.end for offset in offsets):
            expected = [self.now.rows[o - self.now.start] for o in offsets]
            same_rows(expected, self.run(self.backend.take(offsets)))
        else:
            with pytest.raises(OffsetOutOfRange):
                self.run(self.backend.take(offsets))

    @precondition(lambda self: self.exists)
    @rule(where=st.sampled_from(FILTERS), limit=st.none() | st.integers(0, 20))
    def query(self, where: tuple[str, Callable[[Record], bool]], limit: int | None) -> None:
        condition, keeps = where
        expected = [row for row in self.now.rows if keeps(row)][:limit]
        same_rows(expected, self.run(self.backend.query(condition, limit=limit)))

    @precondition(lambda self: self.exists)
    @rule(asked=LOOKUPS)
    def lookup(self, asked: tuple[str, Any]) -> None:
        column, wanted = asked
        expected = [row for row in self.now.rows if row[column] == wanted]
        same_rows(expected, self.run(self.backend.lookup(column, wanted)))

    @precondition(lambda self: self.exists)
    @rule(
        vector=VECTORS,
        k=st.integers(1, 20),
        exact=st.booleans(),
        where=st.none() | st.sampled_from(FILTERS),
    )
    def search_vector(
        self,
        vector: list[float],
        k: int,
        exact: bool,
        where: tuple[str, Callable[[Record], bool]] | None,
    ) -> None:
        condition, keeps = where or (None, lambda r: True)
        fitting = [r for r in self.now.rows if r["v"] is not None and keeps(r)]
        distances = {r["n"]: _distance(vector, r["v"]) for r in fitting}
        hits = self.run(self.backend.search(vector=vector, k=k, exact=exact, where=condition))
        # The order of equally near rows is undefined.
        assert [hit["_distance"] for hit in hits] == sorted(distances.values())[:k]
        assert [hit["_distance"] for hit in hits] == [distances[hit["n"]] for hit in hits]
        self.check_hits(hits)

    @precondition(lambda self: self.exists)
    @rule(word=st.sampled_from(["red", "blue", "tin", "none"]))
    def search_text(self, word: str) -> None:
        fitting = [r["n"] for r in self.now.rows if word in (r["word"] or "").lower().split()]
        hits = self.run(self.backend.search(text=word, column="word", k=1000))
        assert sorted(hit["n"] for hit in hits) == fitting
        scores = [hit["_score"] for hit in hits]
        assert scores == sorted(scores, reverse=True)
        self.check_hits(hits)

    def check_hits(self, hits: list[Record]) -> None:
        offsets = [hit["_offset"] for hit in hits]
        assert len(set(offsets)) == len(offsets)
        for hit in hits:
            record = {k: v for k, v in hit.items() if k not in ("_distance", "_score", "_offset")}
            same_rows([self.now.rows[hit["_offset"] - self.now.start]], [record])

    # Reopening

    @rule(options=st.sampled_from(OPTIONS))
    def reopen(self, options: dict[str, Any]) -> None:
        self.run(self.backend.close())
        self.open(**options)
        self.check_all()
        families = {(one["column"], one["family"]) for one in self.run(self.backend.indexes())}
        assert families == self.indexed

    @invariant()
    def facts_agree(self) -> None:
        stats = self.run(self.backend.stats())
        assert stats["upkeep_error"] is None
        assert stats["flush_error"] is None
        assert (stats["start_offset"], stats["end_offset"]) == (self.now.start, self.now.end)
        assert stats["total_count"] == self.backend.total_count() == len(self.now.rows)
        assert stats["epoch"] == self.epoch


class EvolvingTableMachine(TableMachine):
    """Records may also bring new fields and wider values."""

    @precondition(lambda self: self.exists)
    @rule(changes=st.lists(st.sampled_from(EVOLVED), min_size=1, max_size=3), flush=st.booleans())
    def evolve(self, changes: list[Record], flush: bool) -> None:
        rows = self.made(changes)
        self.run(self.backend.put_batch(rows))
        self.stored(rows)
        if flush:
            self.run(self.backend.flush())
            self.note_versions()

    @precondition(lambda self: "x" in self.fields)
    @rule(value=st.sampled_from([None, 1, 3]))
    def look_for_a_new_field(self, value: Any) -> None:
        expected = [row for row in self.now.rows if row.get("x") == value]
        try:
            got = self.run(self.backend.lookup("x", value))
        except InvalidArgument:
            assert self.restored, "a field that was put is known"
            assert all(row.get("x") is None for row in self.now.rows)
        else:
            same_rows(expected, got)


class LoggedTableMachine(EvolvingTableMachine):
    """The process may also die: acknowledged records, tags and restores survive."""

    @rule()
    def die(self) -> None:
        self.drop_and_reopen()
        self.check_all()


def pick(choices: Any, place: float) -> Any:
    return choices[min(int(place * len(choices)), len(choices) - 1)]


def _distance(one: list[float], other: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


TestLance = machine(TableMachine, LANCE, examples=5, steps=18)
TestPersisting = machine(EvolvingTableMachine, PERSISTING, examples=8, steps=20)
TestLogged = machine(LoggedTableMachine, WAL_ZSTD, examples=4, steps=20)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyLance(machine(TableMachine, LANCE, examples=100, steps=50, fixed=False)):  # type: ignore[misc]
    pass


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyPersisting(  # type: ignore[misc]
    machine(EvolvingTableMachine, PERSISTING, examples=150, steps=50, fixed=False)
):
    pass


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestNightlyLogged(  # type: ignore[misc]
    machine(LoggedTableMachine, WAL_ZSTD, examples=100, steps=50, fixed=False)
):
    pass
