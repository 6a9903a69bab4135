"""Search finds what a scan of all records finds, in the buffer and in the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.brute_force import EXACT, QUIET, ROUNDED, assert_nearest, complaint, distances, vectors
from support.buckets import Bucket

from persisting.queue import InvalidArgument

SIZE = 8
ENOUGH = 1100
"""Rows in the indexed part of the table."""

METRICS = ("l2", "cosine", "dot")
PLACES = ("buffer", "table", "both", "index", "index and later rows")


def with_vectors(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"id": i, "v": v} for i, v in enumerate(vectors(count, SIZE, seed))]


async def lay(
    bucket: Bucket,
    rows: list[dict[str, Any]],
    place: str,
    index: dict[str, Any],
    **options: Any,
) -> Any:
    """Return a backend with ``rows`` in the buffer, the table, both, or an indexed table."""
    backend = bucket.open(**{**QUIET, **options})
    first = len(rows) // 2 if place == "both" else len(rows)
    if place == "index and later rows":
        first = len(rows) * 3 // 4
    await backend.put_batch(rows[:first])
    if place != "buffer":
        await backend.flush()
    if place.startswith("index"):
        await backend.create_index(**index)
    rest = rows[first:]
    if place == "index and later rows":
        await backend.put_batch(rest[: len(rest) // 2])
        await backend.flush()
        rest = rest[len(rest) // 2 :]
    await backend.put_batch(rest)
    return backend


# Vectors


@pytest.mark.parametrize(
    ("place", "metric"),
    [
        *((place, "l2") for place in PLACES),
        *((place, metric) for place in ("both", PLACES[-1]) for metric in ("cosine", "dot")),
    ],
)
async def test_vector_search_finds_the_nearest_in_table_and_buffer(
    persisting: Bucket, place: str, metric: str
) -> None:
    rows = with_vectors(ENOUGH + 400)
    backend = await lay(persisting, rows, place, {"column": "v", "metric": metric})
    for query in vectors(4, SIZE, seed=1):
        for k in (1, 10, 100):
            hits = await backend.search(vector=query, k=k, metric=metric)
            assert_nearest(hits, rows, query, k, metric=metric, when=f"k={k}")


@pytest.mark.parametrize("width", ["float64", "float32", "float16"])
@pytest.mark.parametrize("place", ["buffer", "table", "index and later rows"])
async def test_vectors_of_every_width_are_searched(
    persisting: Bucket, place: str, width: str
) -> None:
    rows = with_vectors(ENOUGH + 400)
    backend = await lay(persisting, rows, place, {"column": "v"}, vector_type=width)
    stored = await backend.get()
    error = ROUNDED if width == "float16" else EXACT
    for metric in METRICS:
        query = vectors(1, SIZE, seed=2)[0]
        hits = await backend.search(vector=query, k=20, metric=metric)
        assert_nearest(hits, stored, query, 20, metric=metric, error=error, when=metric)


@pytest.mark.parametrize("width", [np.float32, np.float16])
async def test_numpy_vectors_are_stored_and_searched_in_their_width(
    persisting: Bucket, width: Any
) -> None:
    backend = persisting.open(**QUIET)
    arrays = np.random.default_rng(3).normal(size=(50, SIZE)).astype(width)
    await backend.put_batch([{"id": i, "v": array} for i, array in enumerate(arrays)])
    for _ in range(2):
        hits = await backend.search(vector=arrays[7], k=1)
        assert [hit["id"] for hit in hits] == [7]
        await backend.flush()


@pytest.mark.parametrize("place", PLACES)
async def test_records_without_a_distance_are_skipped_and_hide_no_other(
    persisting: Bucket, place: str
) -> None:
    rows = with_vectors(ENOUGH + 400)
    last = len(rows) - 1
    for i in (0, 9, 600, last):
        rows[i]["v"] = None
    for i in (1, 601, last - 1):
        rows[i]["v"] = [float("nan")] * SIZE
    for i in (2, 602, last - 2):
        rows[i]["v"] = [1.0] * (SIZE - 1) + [float("nan")]
    for i in (3, 603, last - 3):
        rows[i]["v"] = [float("inf")] + [0.0] * (SIZE - 1)
    backend = await lay(persisting, rows, place, {"column": "v"})
    for metric in METRICS:
        query = vectors(1, SIZE, seed=4)[0]
        for k in (10, len(rows)):
            hits = await backend.search(vector=query, k=k, metric=metric)
            assert_nearest(hits, rows, query, k, metric=metric, when=f"{metric}, k={k}")


@pytest.mark.parametrize("place", ["buffer", "both", "index and later rows"])
async def test_a_zero_vector_has_no_cosine_distance(persisting: Bucket, place: str) -> None:
    rows = with_vectors(ENOUGH + 400)
    for i in (5, 700, len(rows) - 1):
        rows[i]["v"] = [0.0] * SIZE
    backend = await lay(persisting, rows, place, {"column": "v", "metric": "cosine"})
    query = vectors(1, SIZE, seed=5)[0]
    hits = await backend.search(vector=query, k=len(rows), metric="cosine")
    assert_nearest(hits, rows, query, len(rows), metric="cosine")


@pytest.mark.parametrize("place", ["buffer", "both", "index and later rows"])
async def test_equal_vectors_are_all_found(persisting: Bucket, place: str) -> None:
    rows = with_vectors(ENOUGH + 400)
    twins = [10, 11, 500, 1200, len(rows) - 1]
    for i in twins:
        rows[i]["v"] = rows[10]["v"]
    backend = await lay(persisting, rows, place, {"column": "v"})
    hits = await backend.search(vector=rows[10]["v"], k=len(twins))
    assert [hit["_offset"] for hit in hits] == twins
    assert all(hit["_distance"] < EXACT for hit in hits)


@pytest.mark.parametrize("place", ["buffer", "both", "index and later rows"])
async def test_search_for_more_than_stored_returns_all(persisting: Bucket, place: str) -> None:
    rows = with_vectors(ENOUGH)
    backend = await lay(persisting, rows, place, {"column": "v"})
    query = vectors(1, SIZE, seed=6)[0]
    hits = await backend.search(vector=query, k=10_000)
    assert_nearest(hits, rows, query, 10_000)
    assert len(hits) == len(rows)


async def test_a_record_is_found_as_soon_as_it_is_put(persisting: Bucket) -> None:
    rows = with_vectors(ENOUGH + 20)
    backend = await lay(persisting, rows[:ENOUGH], "index", {"column": "v"})
    for row in rows[ENOUGH:]:
        await backend.put(row)
        hits = await backend.search(vector=row["v"], k=1)
        assert [hit["id"] for hit in hits] == [row["id"]]
        if row["id"] % 5 == 0:
            await backend.flush()
            hits = await backend.search(vector=row["v"], k=1)
            assert [hit["id"] for hit in hits] == [row["id"]]


async def test_search_works_with_a_metric_other_than_the_index(persisting: Bucket) -> None:
    rows = with_vectors(ENOUGH)
    backend = await lay(persisting, rows, "index", {"column": "v", "metric": "cosine"})
    query = vectors(1, SIZE, seed=7)[0]
    for metric in METRICS:
        hits = await backend.search(vector=query, k=10, metric=metric)
        assert_nearest(hits, rows, query, 10, metric=metric, when=metric)
    assert_nearest(await backend.search(vector=query), rows, query, 10, metric="cosine")


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_rq", "ivf_hnsw_sq"])
async def test_an_exact_search_ignores_the_index(persisting: Bucket, kind: str) -> None:
    rows = with_vectors(ENOUGH + 300)
    index = {"column": "v", "kind": kind}
    backend = await lay(persisting, rows, "index and later rows", index)
    query = vectors(1, SIZE, seed=8)[0]
    assert_nearest(await backend.search(vector=query, k=50, exact=True), rows, query, 50)


@pytest.mark.parametrize("place", PLACES)
async def test_vector_search_filters_before_choosing_the_nearest(
    persisting: Bucket, place: str
) -> None:
    rows = with_vectors(ENOUGH + 400)
    backend = await lay(persisting, rows, place, {"column": "v"})
    query = vectors(1, SIZE, seed=9)[0]
    kept = {i: d for i, d in distances(rows, query).items() if rows[i]["id"] % 97 == 3}
    expected = sorted(kept, key=lambda i: kept[i])[:10]
    hits = await backend.search(vector=query, k=10, where="id % 97 = 3")
    assert [hit["_offset"] for hit in hits] == expected
    assert await backend.search(vector=query, k=10, where="id < 0") == []


async def test_hits_have_requested_fields_distance_and_offset(
    persisting: Bucket,
) -> None:
    rows = [{**row, "text": f"t{row['id']}"} for row in with_vectors(20)]
    backend = await lay(persisting, rows, "both", {})
    query = rows[3]["v"]
    (hit,) = await backend.search(vector=query, k=1, columns=["text", "id"])
    assert list(hit) == ["text", "id", "_distance", "_offset"]
    assert (hit["text"], hit["id"], hit["_offset"]) == ("t3", 3, 3)
    (hit,) = await backend.search(vector=query, k=1, columns=[])
    assert list(hit) == ["_distance", "_offset"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "vector=.*text="),
    ({"vector": [0.0] * (SIZE - 1)}, f"{SIZE - 1} values.*'v' has {SIZE}"),
    ({"vector": []}, "0 values"),
    ({"vector": [[0.0] * SIZE]}, "2 dimensions"),
    ({"vector": 1.0}, "0 dimensions"),
    ({"vector": "abc"}, "list of floats"),
    ({"vector": {"a": 1}}, "list of floats"),
    ({"vector": [float("nan")] * SIZE}, "not finite"),
    ({"vector": [float("inf")] * SIZE}, "not finite"),
    ({"vector": [1e300] * SIZE}, "vector"),
    ({"vector": [0.0] * SIZE, "column": "nope"}, "'nope'.*'id', 'v', 't'"),
    ({"vector": [0.0] * SIZE, "column": "t"}, "'t' is string"),
    ({"vector": [0.0] * SIZE, "column": 5}, "column"),
    ({"vector": [0.0] * SIZE, "column": ["v", "t"]}, "one vector field"),
    ({"text": "x", "column": "v"}, "'v' is"),
    ({"text": "x", "column": "id"}, "'id' is"),
    ({"text": ""}, "words"),
    ({"text": "  "}, "words"),
    ({"text": 5}, "words"),
    ({"text": b"x"}, "words"),
    ({"vector": [0.0] * SIZE, "k": 0}, "k must be"),
    ({"vector": [0.0] * SIZE, "k": -1}, "k must be"),
    ({"vector": [0.0] * SIZE, "k": 1.5}, "k must be"),
    ({"vector": [0.0] * SIZE, "k": True}, "k must be"),
    ({"vector": [0.0] * SIZE, "metric": "hamming"}, "l2, cosine, dot"),
    ({"vector": [0.0] * SIZE, "where": "id ="}, "id ="),
    ({"vector": [0.0] * SIZE, "where": "nope = 1"}, "'nope'.*'id'"),
    ({"vector": [0.0] * SIZE, "where": 5}, "where"),
    ({"vector": [0.0] * SIZE, "columns": ["nope"]}, "'nope'"),
    ({"vector": [0.0] * SIZE, "columns": "id"}, "columns"),
    ({"vector": [0.0] * SIZE, "columns": 5}, "columns"),
    ({"text": "x", "where": "nope = 1"}, "'nope'.*'id'"),
    ({"text": "x", "where": "id = 'a'"}, "id = 'a'"),
]


async def test_invalid_search_raises_with_the_reason(persisting: Bucket) -> None:
    rows = [{**row, "t": "x"} for row in with_vectors(4)]
    backend = await lay(persisting, rows, "both", {})
    wrong = [(a, await complaint(backend.search(**a), message)) for a, message in WRONG]
    assert [one for one in wrong if one[1]] == []


async def test_vector_search_without_a_vector_field_raises(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            await backend.search(vector=[1.0])
        with pytest.raises(InvalidArgument):
            await backend.search(text="x")
        await backend.put({"id": 1, "v": None, "t": None})


async def test_search_requires_a_column_if_there_are_two_vector_fields(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"a": [float(i), 0.0], "b": [0.0, float(i)]} for i in range(5)])
    with pytest.raises(InvalidArgument, match="'a', 'b'"):
        await backend.search(vector=[1.0, 0.0])
    (hit,) = await backend.search(vector=[0.0, 3.0], column="b", k=1)
    assert hit["_offset"] == 3


async def test_search_refuses_records_with_a_field_named_like_a_result(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"v": [1.0, 2.0], "t": "x", "_distance": 9.5})
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="'_distance'"):
            await backend.search(vector=[1.0, 2.0])
        assert [row["_distance"] for row in await backend.get()] == [9.5]
        await backend.flush()


# Words

TEXTS = [
    "the quick brown fox",
    "jumps over the lazy dog",
    "Quick! Foxes; running (fast)",
    "ÜBER straße 東京 Ωmega",
    "don't stop-me now",
    "the the the",
    "a",
    "x" * 500,
    "3.14 and 42",
    "snake_case user@example.com",
    "",
    "   ",
    None,
    "naïve CAFÉ",
    "quick quick quick dog",
]
QUERIES: list[tuple[str, set[int]]] = [
    ("quick", {0, 2, 14}),
    ("QUICK", {0, 2, 14}),
    ("fox", {0}),
    ("the", {0, 1, 5}),
    ("a", {6}),
    ("x" * 500, {7}),
    ("straße", {3}),
    ("über", {3}),
    ("東京", {3}),
    ("42", {8}),
    ("now", {4}),
    ("café", {13}),
    ("fox dog", {0, 1, 14}),
    ("nowhere", set()),
    ("nowhere fox", {0}),
    ("!!!", set()),
    ("quick!", {0, 2, 14}),
    ("(fast)", {2}),
    ('"fox"', {0}),
    ("fox'; DROP TABLE x", {0}),
    ("*", set()),
    ("fo*", set()),
]


def with_texts() -> list[dict[str, Any]]:
    return [{"id": i, "t": text} for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("place", PLACES)
async def test_text_search_finds_words_in_table_and_buffer(persisting: Bucket, place: str) -> None:
    backend = await lay(persisting, with_texts(), place, {"column": "t"})
    for text, expected in QUERIES:
        hits = await backend.search(text=text, k=100)
        assert {hit["id"] for hit in hits} == expected, text
        scores = [hit["_score"] for hit in hits]
        assert scores == sorted(scores, reverse=True), text
        assert all(hit["t"] == TEXTS[hit["_offset"]] for hit in hits), text
        assert all(score > 0 for score in scores), text


@pytest.mark.parametrize("place", ["buffer", "both", "index and later rows"])
async def test_text_with_more_matching_words_ranks_first(persisting: Bucket, place: str) -> None:
    rows = [{"id": i, "t": f"filler{i} alpha words"} for i in range(40)]
    rows[33]["t"] = "filler33 alpha beta"
    backend = await lay(persisting, rows, place, {"column": "t"})
    hits = await backend.search(text="alpha beta", k=3)
    assert hits[0]["id"] == 33
    assert len(hits) == 3


async def test_a_text_is_found_as_soon_as_it_is_put(persisting: Bucket) -> None:
    rows = [{"id": i, "t": f"Common word{i}"} for i in range(30)]
    backend = await lay(persisting, rows, "index", {"column": "t"})
    for i in range(30, 40):
        await backend.put({"id": i, "t": f"Common WORD{i}"})
        hits = await backend.search(text=f"word{i}", k=1)
        assert [hit["id"] for hit in hits] == [i]
        if i % 4 == 0:
            await backend.flush()


@pytest.mark.parametrize("place", ["buffer", "both", "index and later rows"])
async def test_text_search_filters_before_choosing_the_best(persisting: Bucket, place: str) -> None:
    rows = [{"id": i, "t": "word " * (1 + i % 3) + f"w{i}"} for i in range(60)]
    backend = await lay(persisting, rows, place, {"column": "t"})
    hits = await backend.search(text="word", k=5, where="id >= 50 AND id < 58")
    assert len(hits) == 5
    assert all(50 <= hit["id"] < 58 for hit in hits)
    assert await backend.search(text="word", where="id < 0") == []


async def test_text_search_defaults_to_the_indexed_field(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"a": "red", "b": "blue"}, {"a": "blue", "b": "red"}])
    with pytest.raises(InvalidArgument, match="'a', 'b'"):
        await backend.search(text="red")
    await backend.create_index("b")
    assert [hit["_offset"] for hit in await backend.search(text="red")] == [1]
    assert [hit["_offset"] for hit in await backend.search(text="red", column="a")] == [0]


# Both


def hybrid_rows() -> list[dict[str, Any]]:
    rows = with_vectors(300)
    return [{**row, "t": f"w{row['id'] % 10} " + "common " * (row["id"] % 4)} for row in rows]


def by_rank_fusion(
    rankings: list[list[dict[str, Any]]], weight: Callable[[int], float]
) -> dict[int, float]:
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[hit["_offset"]] = scores.get(hit["_offset"], 0.0) + weight(rank)
    return scores


@pytest.mark.parametrize("place", ["buffer", "table", "both"])
async def test_hybrid_search_fuses_vector_and_text_by_rank(persisting: Bucket, place: str) -> None:
    backend = await lay(persisting, hybrid_rows(), place, {})
    query = vectors(1, SIZE, seed=11)[0]
    depth, k = 50, 10
    rankings = [
        await backend.search(vector=query, k=depth),
        await backend.search(text="w3 common", k=depth),
    ]
    scores = by_rank_fusion(rankings, lambda rank: 1 / (60 + rank))
    expected = sorted(scores, key=lambda offset: (-scores[offset], offset))[:k]
    hits = await backend.search(vector=query, text="w3 common", k=k)
    assert [hit["_offset"] for hit in hits] == expected
    for hit in hits:
        assert hit["_score"] == pytest.approx(scores[hit["_offset"]])
        assert "_distance" not in hit
        assert hit["id"] == hit["_offset"]


async def test_hybrid_search_ranks_the_best_of_both_first(persisting: Bucket) -> None:
    rows = hybrid_rows()
    rows[123]["t"] = "unique"
    backend = await lay(persisting, rows, "both", {})
    hits = await backend.search(vector=rows[123]["v"], text="unique", k=5)
    assert hits[0]["_offset"] == 123
    assert hits[0]["_score"] == pytest.approx(2 / 61)
    assert len({hit["_offset"] for hit in hits}) == len(hits) == 5


async def test_hybrid_search_with_unknown_words_keeps_the_vector_order(persisting: Bucket) -> None:
    rows = hybrid_rows()
    backend = await lay(persisting, rows, "both", {})
    query = vectors(1, SIZE, seed=12)[0]
    alone = await backend.search(vector=query, k=10)
    both = await backend.search(vector=query, text="nowhere", k=10)
    assert [hit["_offset"] for hit in both] == [hit["_offset"] for hit in alone]


async def test_hybrid_search_filters_both_rankings(persisting: Bucket) -> None:
    backend = await lay(persisting, hybrid_rows(), "both", {})
    query = vectors(1, SIZE, seed=13)[0]
    hits = await backend.search(vector=query, text="common", k=50, where="id % 5 = 0")
    assert len(hits) == 50
    assert all(hit["id"] % 5 == 0 for hit in hits)


async def test_hybrid_search_takes_both_columns_in_one_list(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    rows = [
        {"v": [float(i), 0.0], "w": [0.0, float(i)], "s": f"s{i}", "t": f"t{i}"} for i in range(9)
    ]
    await backend.put_batch(rows)
    with pytest.raises(InvalidArgument, match="'v', 'w'"):
        await backend.search(vector=[0.0, 0.0], text="t4")
    (hit,) = await backend.search(vector=[0.0, 4.0], text="t4", column=["t", "w"], k=1)
    assert hit["_offset"] == 4
