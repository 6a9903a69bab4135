"""What docs/guide/search.md says about vectors, words, conditions and indexes."""

from __future__ import annotations

import asyncio
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.doc_pages import DOCS, both, code, table_with

from persisting.backends.table_api import TableApi
from persisting.bucket import maintenance, snapshot_search
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.queue import LanceBackend, PersistingBackend, write_queue
from persisting.table import indexes, search

pages = pytest.mark.parametrize("page", both("guide/search.md"), ids=["en", "zh"])


@pages
def test_the_arguments_of_search_are_those_of_the_code(page: Path):
    parameters = list(inspect.signature(TableApi.search).parameters.values())[1:]
    listed = [(code(row[0]), eval(code(row[1]))) for row in table_with(page, "k", "exact")]  # noqa: S307
    order = [one.name for one in parameters]
    assert sorted(listed, key=lambda one: order.index(one[0])) == [
        (one.name, one.default) for one in parameters
    ]


@pages
def test_the_kinds_and_metrics_are_those_of_the_code(page: Path):
    kinds = [eval(code(row[0])) for row in table_with(page, '"vector"', '"btree"')]  # noqa: S307
    assert kinds == [None, *indexes.KINDS]
    metrics = [eval(code(row[0])) for row in table_with(page, '"l2"')]  # noqa: S307
    assert metrics == list(indexes.METRICS)


@pages
def test_the_numbers_are_those_of_the_code(page: Path):
    text = page.read_text("utf-8")
    for number in (
        snapshot_search._MOST,
        indexes.LEAST_VECTORS,
        maintenance._BEHIND_ROWS,
        search._PROBED * indexes._PARTITION_ROWS,
    ):
        assert f"{number:,}" in text
    assert f"{100 // maintenance._BEHIND_SHARE} %" in text
    assert f"1 / ({snapshot_search._FUSION} + " in text
    assert f"{snapshot_search._CANDIDATES} × `k`" in text
    assert indexes._RETRAIN == 8


WORDS = {
    "after": {0},
    "AFTER": {0},
    "cafe": {1},
    "café": {1},
    "dog": {2},
    "dogs": {3},
    "code": {4},
    "42": {4},
    "storm dog": {0, 2},
    "天气": {5},
    "天气很好": {6},
    "cat": set(),
}
TEXTS = ["After the storm", "café au lait", "a dog", "two dogs", "error_code=42", "天气 很好"]
TEXTS.append("天气很好，出门")


async def found(backend: Any) -> dict[str, set[int]]:
    return {word: {hit["n"] for hit in await backend.search(text=word)} for word in WORDS}


async def test_words_are_found_alike_in_the_buffer_in_the_table_and_through_an_index(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"n": n, "text": text} for n, text in enumerate(TEXTS)])
        assert await found(backend) == WORDS
        await backend.flush()
        assert await found(backend) == WORDS
        await backend.create_index("text")
        assert await found(backend) == WORDS


async def test_a_record_is_found_as_soon_as_it_is_put_whatever_the_index_covers(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"n": 0, "text": "first word", "v": [0.0, 0.0]})
        await backend.create_index("text")
        await backend.create_index("v")
        for n in range(1, 4):
            await backend.put({"n": n, "text": "another word", "v": [float(n), 0.0]})
            assert len(await backend.search(text="word")) == n + 1
            assert (await backend.search(vector=[float(n), 0.0], k=1))[0]["n"] == n
            if n == 2:
                await backend.flush()


@pytest.mark.parametrize(
    ("metric", "distance"),
    [
        ("l2", lambda v, q: ((v - q) ** 2).sum()),
        ("cosine", lambda v, q: 1 - v @ q / np.linalg.norm(v) / np.linalg.norm(q)),
        ("dot", lambda v, q: 1 - v @ q),
    ],
)
async def test_the_distances_are_what_the_page_says(tmp_path, metric, distance):
    vectors, query = np.random.default_rng(1).normal(size=(20, 4)), np.array([1.0, -2.0, 0.5, 3.0])
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"v": vector.tolist()} for vector in vectors])
        hits = await backend.search(vector=query, metric=metric, k=20)
    expected = sorted(distance(vector, query) for vector in vectors)
    assert [hit["_distance"] for hit in hits] == pytest.approx(expected, rel=1e-5)


async def test_records_without_a_usable_vector_are_not_found(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        rows = [[1.0, 2.0], None, [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]]
        await backend.put_batch([{"n": n, "v": vector} for n, vector in enumerate(rows)])
        for _ in ("buffer", "table"):
            assert [hit["n"] for hit in await backend.search(vector=[1, 2])] == [0, 4]
            await backend.flush()


@pytest.mark.parametrize("name", ["_distance", "_score"])
async def test_a_field_with_a_name_that_search_needs_is_in_its_way(tmp_path, name):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"text": "word", name: 1.0})
        with pytest.raises(InvalidArgument, match=name):
            await backend.search(text="word")


async def test_both_adds_the_reciprocal_ranks(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        rows = [(0, "word", [9.0]), (1, "word word", [1.0]), (2, "other", [0.0])]
        await backend.put_batch([{"n": n, "text": t, "v": v} for n, t, v in rows])
        ask: dict[str, Any] = {"vector": [0.0], "text": "word"}
        by_text = [hit["n"] for hit in await backend.search(text="word")]
        scores = {n: 1 / (60 + rank) for rank, n in enumerate([2, 1, 0], 1)}
        for rank, n in enumerate(by_text, 1):
            scores[n] += 1 / (60 + rank)
        hits = await backend.search(**ask, column=["v", "text"])
        assert {hit["n"]: hit["_score"] for hit in hits} == pytest.approx(scores)
        assert [hit["n"] for hit in hits] == sorted(scores, key=lambda n: -scores[n])
        assert [hit["n"] for hit in await backend.search(**ask, where="n = 0")] == [0]


async def test_the_condition_comes_before_the_ranking(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        rows = [{"n": n, "v": [float(n)], "text": "word " * (100 - n)} for n in range(100)]
        await backend.put_batch(rows)
        for _ in ("buffer", "table"):
            near = await backend.search(vector=[0.0], k=2, where="n >= 50")
            assert [hit["n"] for hit in near] == [50, 51]
            hits = await backend.search(text="word", k=100, where="n >= 50")
            assert {hit["n"] for hit in hits} == set(range(50, 100))
            await backend.flush()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("n <> 1 AND n < 3", [0, 2]),
        ("n IN (1, 3)", [1, 3]),
        ("n BETWEEN 1 AND 2", [1, 2]),
        ("name LIKE 'b%'", [1]),
        ("note IS NULL", [0, 1, 2]),
        ("NOT (n = 0 OR n = 1)", [2, 3]),
        ("user.age > 30", [3]),
        ("`is-new` = true", [0, 2]),
    ],
)
async def test_the_conditions_that_the_page_names_work(tmp_path, where, expected):
    rows = [
        {
            "n": n,
            "name": name,
            "note": "x" if n == 3 else None,
            "user": {"age": 10 * n + 5},
            "is-new": n % 2 == 0,
        }
        for n, name in enumerate(["ann", "bob", "cy", "dee"])
    ]
    async with PersistingBackend(0, str(tmp_path)) as backend:
        await backend.put_batch(rows)
        for _ in ("buffer", "table"):
            assert [row["n"] for row in await backend.query(where, columns=["n"])] == expected
            await backend.flush()


@pytest.mark.parametrize(
    "where", ["n >", "n > 1 n", "n = 1; drop", "", "n = 1) OR (true", "nosuch = 1", 'name = "ann"']
)
async def test_a_condition_that_cannot_be_read_to_its_end_raises(tmp_path, where):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"n": 1, "name": "ann"})
        for _ in ("buffer", "table"):
            with pytest.raises(InvalidArgument, match="where"):
                await backend.query(where)
            await backend.flush()


async def vectors(folder: Path, count: int = 3000) -> tuple[LanceBackend, np.ndarray]:
    made = np.random.default_rng(2).normal(size=(count, 8))
    array = pa.FixedSizeListArray.from_arrays(pa.array(made.ravel()), 8)
    backend = LanceBackend(0, str(folder))
    await backend.put_arrow(pa.table({"n": range(count), "v": array}))
    return backend, made


def nearest(made: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    return np.argsort(((made - query) ** 2).sum(axis=1))[:k].tolist()


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_rq", "ivf_hnsw_sq"])
async def test_ivf_flat_is_exact_and_the_others_are_with_exact(tmp_path, kind):
    backend, made = await vectors(tmp_path)
    async with backend:
        assert (await backend.create_index("v", kind))["rows"] == len(made)
        for query in np.random.default_rng(3).normal(size=(5, 8)):
            hits = await backend.search(vector=query, exact=kind != "ivf_flat")
            assert [hit["n"] for hit in hits] == nearest(made, query, 10)


async def test_another_metric_than_that_of_the_index_is_exact(tmp_path):
    backend, made = await vectors(tmp_path)
    async with backend:
        await backend.create_index("v", "ivf_rq", metric="cosine")
        query = made[7] * 2
        hits = await backend.search(vector=query, metric="l2")
        assert [hit["n"] for hit in hits] == nearest(made, query, 10)
        assert (await backend.search(vector=query, k=1))[0]["n"] == 7  # by the angle


@pytest.mark.parametrize("count", [indexes.LEAST_VECTORS - 1, indexes.LEAST_VECTORS])
async def test_a_vector_index_is_built_from_1024_records_on(tmp_path, count):
    backend, _ = await vectors(tmp_path, count)
    async with backend:
        made = await backend.create_index("v")
        assert (made["rows"] > 0) == (count >= indexes.LEAST_VECTORS)
        assert made["rows"] + made["behind"] == count


async def test_a_field_has_one_index_of_each_family_and_the_kind_follows_the_type(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put({"url": "a b", "n": 1, "v": [1.0]})
        assert (await backend.create_index("v"))["kind"] == "ivf_flat"
        assert (await backend.create_index("n"))["kind"] == "btree"
        assert (await backend.create_index("n", "bitmap"))["kind"] == "bitmap"
        assert (await backend.create_index("url"))["kind"] == "text"
        await backend.create_index("url", "scalar")
        kinds = sorted((one["column"], one["kind"]) for one in await backend.indexes())
        assert kinds == [("n", "bitmap"), ("url", "btree"), ("url", "text"), ("v", "ivf_flat")]
        assert await backend.drop_index("url") == 2
        assert await backend.drop_index("url") == 0


async def test_lookup_take_and_query_give_the_same_with_and_without_an_index(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        rows = [{"n": n, "key": f"it's {n % 7}"} for n in range(50)]
        await backend.put_batch(rows)
        for _ in ("buffer", "index", "more"):
            assert await backend.lookup("key", "it's 3") == [r for r in rows if r["n"] % 7 == 3]
            assert await backend.take([5, 0, 5]) == [rows[5], rows[0], rows[5]]
            await backend.create_index("key", "scalar")
            await backend.put({"n": len(rows), "key": f"it's {len(rows) % 7}"})
            rows.append({"n": len(rows), "key": f"it's {len(rows) % 7}"})
        with pytest.raises(OffsetOutOfRange, match=f"no offset {len(rows)}"):
            await backend.take([len(rows)])


async def test_a_topic_merges_its_buckets_into_one_top_k(tmp_path):
    made = np.random.default_rng(4).normal(size=(200, 4))
    options = {"num_buckets": 4, "backend": "lance", "storage_path": str(tmp_path)}
    async with await write_queue(topic="t", **options) as writer:
        await writer.put([{"id": n, "v": row.tolist()} for n, row in enumerate(made)])
        hits = await writer.search(vector=made[11], k=25, columns=["id"])
        assert [hit["id"] for hit in hits] == nearest(made, made[11], 25)
        pairs = [(hit["_bucket"], hit["_offset"]) for hit in hits]
        assert [row["id"] for row in await writer.take(pairs)] == [hit["id"] for hit in hits]


async def test_a_topic_in_memory_cannot_be_searched(tmp_path):
    async with await write_queue(topic="t", backend="memory") as writer:
        await writer.put({"id": 1})
        with pytest.raises(StorageError, match="has no table"):
            await writer.search(text="x")


READER = """
import asyncio
from persisting.queue import BucketLocked, read_queue
async def main():
    async with await read_queue("t", storage_path={path!r}) as reader:
        print(sorted(hit["id"] for hit in await reader.search(text="word")))
        try:
            await reader.create_index("text")
        except BucketLocked:
            print("locked")
asyncio.run(main())
"""


def elsewhere(program: str) -> list[str]:
    """The lines that a program prints in another process."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


async def test_another_process_finds_what_is_flushed_and_cannot_make_an_index(tmp_path):
    options = {"num_buckets": 2, "backend": "lance", "storage_path": str(tmp_path)}
    async with await write_queue(topic="t", **options) as writer:
        await writer.put([{"id": n, "text": "word"} for n in range(4)])
        await writer.flush()
        await writer.put({"id": 9, "text": "word"})
        printed = await asyncio.to_thread(elsewhere, READER.format(path=str(tmp_path)))
    assert printed == ["[0, 1, 2, 3]", "locked"]


def test_the_page_is_in_the_navigation_and_linked_from_the_start():
    assert "guide/search.md" in (DOCS / "index.md").read_text("utf-8")
    assert "guide/search.md" in (DOCS.parent / "mkdocs.yml").read_text("utf-8")
