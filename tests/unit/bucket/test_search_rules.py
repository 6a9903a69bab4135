"""Rules of search that docs/guide/search.md states: words, distances, conditions, index kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persisting.queue import LanceBackend, PersistingBackend
from persisting.table import indexes

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
    "天气": {5, 6},
    "天气很好": {5, 6},
    "cat": set(),
}


TEXTS = [
    "After the storm",
    "café au lait",
    "a dog",
    "two dogs",
    "error_code=42",
    "天气 很好",
    "天气很好，出门",
]


async def found(backend: Any) -> dict[str, set[int]]:
    return {word: {hit["n"] for hit in await backend.search(text=word)} for word in WORDS}


async def test_text_search_gives_the_same_hits_in_buffer_table_and_index(tmp_path):
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"n": n, "text": text} for n, text in enumerate(TEXTS)])
        assert await found(backend) == WORDS
        await backend.flush()
        assert await found(backend) == WORDS
        await backend.create_index("text")
        assert await found(backend) == WORDS


@pytest.mark.parametrize(
    ("metric", "distance"),
    [
        ("l2", lambda v, q: ((v - q) ** 2).sum()),
        ("cosine", lambda v, q: 1 - v @ q / np.linalg.norm(v) / np.linalg.norm(q)),
        ("dot", lambda v, q: 1 - v @ q),
    ],
)
async def test_distance_of_each_metric_follows_its_formula(tmp_path, metric, distance):
    vectors, query = np.random.default_rng(1).normal(size=(20, 4)), np.array([1.0, -2.0, 0.5, 3.0])
    async with LanceBackend(0, str(tmp_path)) as backend:
        await backend.put_batch([{"v": vector.tolist()} for vector in vectors])
        hits = await backend.search(vector=query, metric=metric, k=20)
    expected = sorted(distance(vector, query) for vector in vectors)
    assert [hit["_distance"] for hit in hits] == pytest.approx(expected, rel=1e-5)


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
async def test_documented_where_conditions_work(tmp_path, where, expected):
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


async def vectors(folder: Path, count: int = 3000) -> tuple[LanceBackend, np.ndarray]:
    made = np.random.default_rng(2).normal(size=(count, 8))
    array = pa.FixedSizeListArray.from_arrays(pa.array(made.ravel()), 8)
    backend = LanceBackend(0, str(folder))
    await backend.put_arrow(pa.table({"n": range(count), "v": array}))
    return backend, made


def nearest(made: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    return np.argsort(((made - query) ** 2).sum(axis=1))[:k].tolist()


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_rq", "ivf_hnsw_sq"])
async def test_ivf_flat_is_exact_and_other_kinds_are_exact_on_request(tmp_path, kind):
    backend, made = await vectors(tmp_path)
    async with backend:
        assert (await backend.create_index("v", kind))["rows"] == len(made)
        for query in np.random.default_rng(3).normal(size=(5, 8)):
            hits = await backend.search(vector=query, exact=kind != "ivf_flat")
            assert [hit["n"] for hit in hits] == nearest(made, query, 10)


@pytest.mark.parametrize("count", [indexes.LEAST_VECTORS - 1, indexes.LEAST_VECTORS])
async def test_vector_index_is_built_from_1024_records_on(tmp_path, count):
    backend, _ = await vectors(tmp_path, count)
    async with backend:
        made = await backend.create_index("v")
        assert (made["rows"] > 0) == (count >= indexes.LEAST_VECTORS)
        assert made["rows"] + made["behind"] == count


async def test_field_has_one_index_per_family_and_a_kind_by_its_type(tmp_path):
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
