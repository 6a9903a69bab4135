"""An index changes how fast a record is found, never whether it is."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.brute_force import QUIET, assert_nearest, distances, recall, vectors
from support.buckets import Bucket

from persisting.errors import BucketClosed, TableError
from persisting.queue import InvalidArgument, StorageError
from persisting.table import indexes
from persisting.table.commit import Committer

SIZE = 8
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
INDEXES = {"v": "vector", "t": "text", "n": "scalar", "k": "bitmap"}


def records(count: int, first: int = 0) -> list[dict[str, Any]]:
    luck = random.Random(first)
    found = vectors(count, SIZE, seed=first + 1)
    return [
        {
            "n": first + i,
            "k": luck.choice("xyz"),
            "t": " ".join(luck.choices(WORDS, k=3)),
            "v": found[i],
        }
        for i in range(count)
    ]


async def index_all(backend: Any) -> None:
    for column, kind in INDEXES.items():
        await backend.create_index(column, kind)


async def test_a_restore_between_an_index_and_its_checksums_leaves_nothing_unchecked(
    persisting: Bucket,
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(50))
    await backend.flush()
    await backend.create_index("n")
    [between] = [one for one in await backend.versions() if one["operation"] == "index"]
    await backend.restore(between["version"])
    await backend.tag("t")
    report = await backend.verify()
    assert (report["ok"], report["unchecked"]) == (True, [])
    assert [one["n"] for one in await backend.lookup("n", 7)] == [7]
    await persisting.close()


async def test_new_index_is_not_forgotten_by_maintenance_that_loads_the_indexes(
    persisting: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(50))
    maintenance = backend._bucket.maintenance
    maintenance._index_specs = None  # as after opening
    load, loaded, created = indexes.load, threading.Event(), threading.Event()

    def slow_load(*args: Any) -> Any:
        found = load(*args)
        if not loaded.is_set():
            loaded.set()
            created.wait(2)  # ends by itself if creating the index waits for this load
        return found

    monkeypatch.setattr(indexes, "load", slow_load)
    loading = asyncio.create_task(asyncio.to_thread(lambda: maintenance.index_specs))
    await asyncio.to_thread(loaded.wait, 60)
    await backend.create_index("n")
    created.set()
    await loading
    assert list(await coverage(backend)) == ["n"]
    await persisting.close()


async def test_index_whose_checksums_were_not_written_is_rebuilt(
    persisting: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(50))
    await backend.flush()
    change = Committer.change

    def refuse(self: Committer, action: str, *args: Any, **options: Any) -> None:
        if action == "note checksums in":
            raise TableError("No space left on device")
        change(self, action, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Committer, "change", refuse)
        with pytest.raises(TableError, match="No space left"):
            await backend.create_index("n")
        await backend.close()
    again = persisting.open(**QUIET)
    report = await again.verify()
    assert (report["ok"], report["unchecked"]) == (True, [])
    assert [one["n"] for one in await again.lookup("n", 7)] == [7]
    await persisting.close()


async def assert_all_found(backend: Any, when: str) -> None:
    """Assert that every kind of search finds what a scan of all records finds."""
    start = (await backend.stats())["start_offset"]
    rows = await backend.get()
    for query in vectors(2, SIZE, seed=99):
        hits = await backend.search(vector=query, k=15, column="v")
        assert_nearest(hits, rows, query, 15, start=start, when=when)
    for word in ("alpha", "theta"):
        hits = await backend.search(text=word, column="t", k=10_000)
        assert {hit["n"] for hit in hits} == {r["n"] for r in rows if word in r["t"].split()}, when
        assert all(rows[hit["_offset"] - start]["n"] == hit["n"] for hit in hits), when
    for number in (rows[0]["n"], rows[-1]["n"], rows[len(rows) // 2]["n"]):
        assert await backend.lookup("n", number) == [r for r in rows if r["n"] == number], when
    assert await backend.lookup("n", -1) == [], when
    assert await backend.query("k = 'y'") == [r for r in rows if r["k"] == "y"], when
    n = rows[len(rows) // 3]["n"]
    between = await backend.query(f"n >= {n} AND n < {n + 40} AND k <> 'x'", limit=5)
    kept = [r for r in rows if n <= r["n"] < n + 40 and r["k"] != "x"]
    assert between == kept[:5], when


async def coverage(backend: Any) -> dict[str, tuple[int, int]]:
    """Return covered and uncovered rows of the index of each field."""
    return {one["column"]: (one["rows"], one["behind"]) for one in await backend.indexes()}


@pytest.fixture
async def filled(persisting: Bucket) -> AsyncIterator[Any]:
    """1500 records in five fragments, every field indexed; 300 more in the table, 60 buffered."""
    backend = persisting.open(**QUIET)
    for start in range(0, 1500, 300):
        await backend.put_batch(records(300, start))
        await backend.flush()
    await index_all(backend)
    await backend.put_batch(records(300, 1500))
    await backend.flush()
    await backend.put_batch(records(60, 1800))
    return backend


# Creating, describing and dropping


async def test_index_description_has_kind_and_coverage(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(1100))
    said = await backend.create_index("v", metric="cosine")
    assert said == {
        "column": "v",
        "kind": "ivf_flat",
        "family": "vector",
        "metric": "cosine",
        "language": None,
        "rows": 1100,
        "behind": 0,
    }
    said = await backend.create_index("t")
    assert (said["kind"], said["family"], said["metric"]) == ("text", "text", None)
    assert (await backend.create_index("n"))["kind"] == "btree"
    assert (await backend.create_index("k", "bitmap"))["family"] == "scalar"
    assert [one["column"] for one in await backend.indexes()] == ["v", "t", "n", "k"]
    await backend.put_batch(records(5, 1100))
    await backend.flush()
    assert (await coverage(backend))["n"] == (1100, 5)


async def test_one_field_may_have_an_index_for_words_and_one_for_values(
    persisting: Bucket,
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": i, "t": f"word{i} common"} for i in range(20)])
    await backend.create_index("t", "text")
    await backend.create_index("t", "scalar")
    assert [one["kind"] for one in await backend.indexes()] == ["text", "btree"]
    assert [row["n"] for row in await backend.lookup("t", "word7 common")] == [7]
    assert [hit["n"] for hit in await backend.search(text="word7", k=1)] == [7]
    assert await backend.drop_index("t", "scalar") == 1
    assert [one["kind"] for one in await backend.indexes()] == ["text"]


async def test_creating_an_index_again_replaces_it(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    rows = records(1200)
    await backend.put_batch(rows)
    for given, kind, metric in (
        ({}, "ivf_flat", "l2"),
        ({}, "ivf_flat", "l2"),
        ({"metric": "cosine"}, "ivf_flat", "cosine"),
        ({"kind": "ivf_rq", "metric": "dot"}, "ivf_rq", "dot"),
        ({"kind": "vector"}, "ivf_flat", "l2"),
    ):
        await backend.create_index("v", **given)
        (one,) = await backend.indexes()
        assert (one["kind"], one["metric"], one["rows"]) == (kind, metric, 1200)
        query = vectors(1, SIZE, seed=3)[0]
        hits = await backend.search(vector=query, k=10, exact=kind == "ivf_rq")
        assert_nearest(hits, rows, query, 10, metric=metric, when=f"{kind} {metric}")
    await backend.create_index("k", "scalar")
    await backend.create_index("k", "bitmap")
    assert [one["kind"] for one in await backend.indexes()] == ["ivf_flat", "bitmap"]
    lance = persisting.folder / "data.lance"
    assert len(_indices_of(lance)) == 2


def _indices_of(folder: Any) -> list[str]:
    import lance

    return [one.name for one in lance.dataset(str(folder)).describe_indices()]


async def test_dropping_an_index_keeps_its_records(filled: Any) -> None:
    assert await filled.drop_index("v") == 1
    assert await filled.drop_index("v") == 0
    assert await filled.drop_index("t", "scalar") == 0
    assert await filled.drop_index("t", "text") == 1
    assert [one["column"] for one in await filled.indexes()] == ["n", "k"]
    await assert_all_found(filled, "after dropping")
    assert await filled.drop_index("nope") == 0


async def test_index_can_be_created_before_there_are_enough_vectors(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    rows = records(1300)
    await backend.put_batch(rows[:10])
    assert (await backend.create_index("v"))["rows"] == 0
    query = vectors(1, SIZE, seed=4)[0]
    for start in range(10, 1300, 430):
        await backend.put_batch(rows[start : start + 430])
        await backend.flush()
        hits = await backend.search(vector=query, k=10)
        assert_nearest(hits, rows[: start + 430], query, 10)
    await backend.close()  # waits for running maintenance
    backend = persisting.open(**QUIET)
    await backend.put(rows[0])
    await backend.flush()
    await backend.close()
    reader = persisting.open(**QUIET)
    assert (await coverage(reader))["v"][0] >= 1300


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("nope", None, "'nope'.*'n', 'k', 't', 'v'"),
        (None, None, "None"),
        (5, None, "5"),
        ("", None, "''"),
        ("v", "scalar", "'v' is"),
        ("v", "text", "'v' is"),
        ("n", "vector", "lists of floats"),
        ("n", "text", "'n' is int64"),
        ("t", "vector", "'t' is string"),
        ("v", "ivf_pq", "ivf_flat"),
        ("v", 5, "5"),
        ("v", "", "''"),
    ],
)
async def test_impossible_index_raises_with_the_reason(
    persisting: Bucket, column: Any, kind: Any, message: str
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(5))
    with pytest.raises(InvalidArgument, match=message):
        await backend.create_index(column, kind)
    with pytest.raises(InvalidArgument, match="l2, cosine, dot"):
        await backend.create_index("v", metric="hamming")
    assert await backend.indexes() == []


@pytest.mark.parametrize("value", [{"a": 1}, [1], [{"a": 1}], None], ids=repr)
async def test_index_on_a_field_of_unsuitable_type_is_refused(
    persisting: Bucket, value: Any
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"x": value})
    with pytest.raises(InvalidArgument, match="'x' is"):
        await backend.create_index("x")


@pytest.mark.parametrize("name", ["Upper", "a/b", "we'ird", 'q"uote'])
async def test_fields_of_any_name_are_indexed(persisting: Bucket, name: str) -> None:
    backend = persisting.open(**QUIET)
    rows = records(1100)
    names = {column: f"{name} {column}" for column in INDEXES}
    await backend.put_batch([{names[c]: row[c] for c in INDEXES} for row in rows[:1050]])
    for column, kind in INDEXES.items():
        await backend.create_index(names[column], kind)
    await backend.put_batch([{names[c]: row[c] for c in INDEXES} for row in rows[1050:]])
    for i in (3, 1070):
        (hit,) = await backend.search(vector=rows[i]["v"], column=names["v"], k=1)
        assert hit[names["n"]] == i
        assert [row[names["n"]] for row in await backend.lookup(names["n"], i)] == [i]
        found = await backend.query(f"`{names['n']}` = {i} AND `{names['k']}` IS NOT NULL")
        assert [row[names["n"]] for row in found] == [i]
        hits = await backend.search(text=rows[i]["t"], column=names["t"], k=10_000)
        assert i in {hit[names["n"]] for hit in hits}
    for column in INDEXES:
        assert await backend.drop_index(names[column]) == 1


async def test_owner_creates_indexes_and_readers_use_them(filled: Any, persisting: Bucket) -> None:
    await filled.flush()
    reader = persisting.open(**QUIET, read_only=True)
    await assert_all_found(reader, "as a reader")
    assert [one["column"] for one in await reader.indexes()] == list(INDEXES)
    for write in (lambda: reader.create_index("n"), lambda: reader.drop_index("n")):
        with pytest.raises(StorageError, match="read_only"):
            await write()
    await filled.close()
    for read in (filled.indexes, lambda: filled.drop_index("n"), lambda: filled.create_index("n")):
        with pytest.raises(BucketClosed):
            await read()


# Changes of the table


async def test_records_are_found_before_and_after_a_flush(filled: Any) -> None:
    await assert_all_found(filled, "buffered")
    await filled.flush()
    await assert_all_found(filled, "flushed")


async def test_records_are_found_after_compaction(filled: Any) -> None:
    before = await filled.compact()
    assert before["fragments_after"] < before["fragments_before"]
    await assert_all_found(filled, "compacted")
    await filled.put_batch(records(100, 1860))
    await assert_all_found(filled, "put after a compaction")
    await filled.compact()
    await assert_all_found(filled, "compacted again")


async def test_compaction_keeps_index_coverage(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    for start in range(0, 1500, 300):
        await backend.put_batch(records(300, start))
        await backend.flush()
    await index_all(backend)
    assert await coverage(backend) == dict.fromkeys(INDEXES, (1500, 0))
    await backend.compact()
    assert await coverage(backend) == dict.fromkeys(INDEXES, (1500, 0))
    assert (await backend.verify())["unchecked"] == []


async def test_records_are_found_after_retention(filled: Any) -> None:
    await filled.retain(rows=800)
    assert (await filled.stats())["start_offset"] == 900
    await assert_all_found(filled, "after retention")
    await filled.compact()
    await assert_all_found(filled, "after retention and compaction")
    await filled.retain(rows=1)
    await filled.put_batch(records(5, 2000))
    await assert_all_found(filled, "after all that was indexed was removed")


async def test_records_are_found_after_a_restore(filled: Any) -> None:
    third = (await filled.versions())[2]
    assert third["rows"] == 900
    await filled.restore(third["version"])
    assert filled.total_count() == 900
    await assert_all_found(filled, "restored to before the indexes")
    assert {one["column"] for one in await filled.indexes()} == set(INDEXES)
    await filled.put_batch(records(300, 900))
    await filled.flush()
    await assert_all_found(filled, "put after a restore")
    last = (await filled.versions())[-1]
    await filled.put_batch(records(50, 1200))
    await filled.restore(last["version"])
    await assert_all_found(filled, "restored to after the indexes")


async def test_records_are_found_after_reopening(filled: Any, persisting: Bucket) -> None:
    backend = await persisting.reopen(filled, **QUIET)
    assert [one["column"] for one in await backend.indexes()] == list(INDEXES)
    await assert_all_found(backend, "reopened")


async def test_records_are_found_after_evolution(filled: Any) -> None:
    row = records(1, 1860)[0]
    await filled.put({**row, "new": "field", "n": 1860.5})
    await assert_all_found(filled, "evolved in the buffer")
    await filled.flush()
    await assert_all_found(filled, "evolved in the table")
    await filled.put({"n": -1.0, "k": None, "t": None, "v": None})
    await filled.compact()
    await assert_all_found_where_given(filled)


async def assert_all_found_where_given(backend: Any) -> None:
    rows = await backend.get()
    assert await backend.lookup("n", 1860.5) == [r for r in rows if r["n"] == 1860.5]
    assert await backend.lookup("t", None) == [r for r in rows if r["t"] is None]
    assert await backend.lookup("new", "field") == [r for r in rows if r["new"] == "field"]
    query = vectors(1, SIZE, seed=5)[0]
    assert_nearest(await backend.search(vector=query, k=5), rows, query, 5)


async def test_widened_vectors_stay_searchable(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    arrays = np.random.default_rng(6).normal(size=(1200, SIZE)).astype(np.float32)
    await backend.put_batch([{"n": i, "v": array} for i, array in enumerate(arrays)])
    await backend.create_index("v")
    await backend.put({"n": 1200, "v": [0.1] * SIZE})
    for _ in range(2):
        (hit,) = await backend.search(vector=[0.1] * SIZE, k=1)
        assert hit["n"] == 1200
        rows = await backend.get()
        query = vectors(1, SIZE, seed=7)[0]
        assert_nearest(await backend.search(vector=query, k=10), rows, query, 10)
        await backend.flush()


async def test_vectors_that_become_lists_lose_search_and_nothing_else(
    persisting: Bucket,
) -> None:
    backend = persisting.open(**QUIET, vectors="widen")
    await backend.put_batch(records(1100))
    await index_all(backend)
    await backend.put({**records(1, 1100)[0], "v": [1.0]})
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="vector"):
            await backend.search(vector=[0.0] * SIZE)
        with pytest.raises(InvalidArgument, match="'v' is list"):
            await backend.search(vector=[0.0] * SIZE, column="v")
        with pytest.raises(InvalidArgument, match="'v' is list"):
            await backend.create_index("v")
        assert [row["n"] for row in await backend.lookup("n", 1100)] == [1100]
        await backend.flush()
    await backend.compact()
    backend = await persisting.reopen(backend, **QUIET)
    await backend.put_batch([{**row, "v": [2.0]} for row in records(5, 1101)])
    await backend.flush()
    await backend.close()
    backend = persisting.open(**QUIET)
    assert (await backend.stats())["upkeep_error"] is None
    assert await backend.lookup("n", 1105) == (await backend.get())[1105:]


async def test_a_default_is_found_through_an_index(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET, schema_defaults={"k": "x"})
    await backend.put_batch([{"n": i} for i in range(10)])
    await backend.flush()
    await backend.put_batch([{"n": 10, "k": "y"}, {"n": 11}])
    await backend.create_index("k", "scalar")
    await backend.put({"n": 12})
    assert [row["n"] for row in await backend.lookup("k", "x")] == [*range(10), 11, 12]


async def test_damaged_index_file_raises_with_advice(
    persisting: Bucket,
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(records(5))
    await backend.create_index("n")
    await backend.close()
    path = persisting.folder / "indexes.json"
    assert [one["column"] for one in json.loads(path.read_text())] == ["n"]
    path.write_text("{")
    backend = persisting.open(**QUIET)
    with pytest.raises(StorageError, match=r"indexes\.json.*remove it"):
        await backend.indexes()
    assert len(await backend.get()) == 5
    path.unlink()


# Automatic updates


async def test_indexes_are_updated_automatically(persisting: Bucket) -> None:
    backend = persisting.open(**{**QUIET, "compaction": True})
    await backend.put_batch(records(1100))
    await index_all(backend)
    for start in range(1100, 12_000, 1090):
        await backend.put_batch(records(1090, start))
        await backend.flush()
    await backend.close()
    backend = persisting.open(**QUIET)
    for column, (rows, behind) in (await coverage(backend)).items():
        assert rows + behind == 12_000, column
        assert behind < 8192, column
    assert (await backend.stats())["upkeep_error"] is None
    await assert_all_found(backend, "after maintenance")


async def test_no_order_of_changes_makes_an_index_miss_a_row(persisting: Bucket) -> None:
    luck = random.Random(8)
    backend = persisting.open(**{**QUIET, "compaction": True})
    await backend.put_batch(records(1100))
    count = 1100
    steps = ["put", "flush", "compact", "index", "drop", "retain", "reopen"]
    for number in range(24):
        step = luck.choices(steps, weights=[6, 4, 3, 4, 1, 1, 1])[0]
        if step == "put":
            await backend.put_batch(records(luck.randrange(1, 200), count))
            count = (await backend.stats())["end_offset"]
        elif step == "flush":
            await backend.flush()
        elif step == "compact":
            await backend.compact()
        elif step == "index":
            column = luck.choice(list(INDEXES))
            await backend.create_index(column, INDEXES[column])
        elif step == "drop":
            await backend.drop_index(luck.choice(list(INDEXES)))
        elif step == "retain":
            await backend.retain(rows=1200)
        else:
            backend = await persisting.reopen(backend, **QUIET)
        if number % 3 == 0 or step in ("compact", "retain"):
            await assert_all_found(backend, f"step {number}: {step}")
    assert (await backend.verify())["ok"]


# Recall


def uniform(luck: np.random.Generator, count: int) -> np.ndarray:
    return luck.random((count, 32), dtype=np.float32)


def clustered(luck: np.random.Generator, count: int) -> np.ndarray:
    centres = luck.normal(size=(50, 32)) * 5
    found = centres[luck.integers(50, size=count)] + luck.normal(size=(count, 32))
    return found.astype(np.float32)


async def measured_recall(
    backend: Any, points: np.ndarray, queries: np.ndarray, metric: str
) -> float:
    shares = []
    for query in queries:
        if metric == "l2":
            found = ((points - query) ** 2).sum(axis=1)
        else:
            found = -(points @ query)
            if metric == "cosine":
                found = found / np.linalg.norm(points, axis=1)
        nearest = {int(i) for i in np.argpartition(found, 10)[:10]}
        shares.append(recall(await backend.search(vector=query, k=10, columns=[]), nearest))
    return float(np.mean(shares))


def _table_of(points: np.ndarray) -> pa.Table:
    flat = pa.array(points.reshape(-1))
    return pa.table({"v": pa.FixedSizeListArray.from_arrays(flat, points.shape[1])})


async def assert_recall(
    bucket: Bucket, points: np.ndarray, queries: np.ndarray, metric: str
) -> None:
    backend = bucket.open(**QUIET)
    await backend.put_arrow(_table_of(points[:16_000]))
    await backend.create_index("v", metric=metric)
    assert (await coverage(backend))["v"] == (16_000, 0)
    assert await measured_recall(backend, points[:16_000], queries, metric) >= 0.99
    await backend.put_arrow(_table_of(points[16_000:18_000]))
    await backend.flush()
    await backend.put_arrow(_table_of(points[18_000:]))
    assert await measured_recall(backend, points, queries, metric) >= 0.99


@pytest.mark.parametrize("shape", [uniform, clustered])
async def test_the_default_index_finds_99_of_100_nearest(persisting: Bucket, shape: Any) -> None:
    luck = np.random.default_rng(9)
    points = shape(luck, 20_000 + 20)
    await assert_recall(persisting, points[:20_000], points[20_000:], "l2")


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("shape", [uniform, clustered])
async def test_the_default_index_finds_99_of_100_nearest_by_every_metric(
    persisting: Bucket, shape: Any, metric: str
) -> None:
    luck = np.random.default_rng(10)
    points = shape(luck, 20_000 + 200)
    await assert_recall(persisting, points[:20_000], points[20_000:], metric)


@pytest.mark.parametrize("kind", ["ivf_rq", "ivf_hnsw_sq"])
async def test_other_vector_index_kinds_find_most_neighbours(persisting: Bucket, kind: str) -> None:
    backend = persisting.open(**QUIET)
    rows = records(2000)
    await backend.put_batch(rows[:1800])
    await backend.create_index("v", kind)
    await backend.put_batch(rows[1800:])
    shares = []
    for query in vectors(10, SIZE, seed=11):
        exact = distances(rows, query)
        nearest = set(sorted(exact, key=lambda i: exact[i])[:10])
        shares.append(recall(await backend.search(vector=query, k=10), nearest))
    assert np.mean(shares) >= 0.8
