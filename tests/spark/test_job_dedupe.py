"""Duplicates: rows with equal keys, and texts that are nearly the same."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.spark.topics import put, writer

from persisting.errors import InvalidArgument
from persisting.spark import jobs, read_topic
from persisting.spark.jobs import minhash, near_dedupe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Three rows for each id, put one after the other; the ids are in two buckets."""
    folder = tmp_path_factory.mktemp("dedupe")
    with writer(folder) as queue:
        for turn in ("a", "b", "c"):
            queue.put_batch([{"id": i, "turn": turn, "half": i // 2} for i in range(20)])
            queue.flush()
    return read_topic(spark, folder / "t", includeMetadata=True)


class TestDeduplicate:
    @pytest.mark.parametrize(("keep", "turn"), [("first", "a"), ("last", "c")])
    def test_deduplicate_keeps_the_first_or_last_arrival_of_each_key(
        self, rows: DataFrame, keep: str, turn: str
    ) -> None:
        found = jobs.deduplicate(rows, "id", keep=keep)
        assert found.columns == rows.columns
        assert sorted((row["id"], row["turn"]) for row in found.collect()) == [
            (i, turn) for i in range(20)
        ]

    def test_deduplicate_takes_several_keys(self, rows: DataFrame) -> None:
        found = jobs.deduplicate(rows, ["half", "turn"])
        assert sorted((row["half"], row["turn"]) for row in found.collect()) == [
            (half, turn) for half in range(10) for turn in "abc"
        ]

    def test_deduplicate_orders_rows_of_one_put_by_bucket_and_offset(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [{"id": i, "key": "one"} for i in range(30)])
        rows = read_topic(spark, tmp_path / "t", includeMetadata=True)
        places = sorted((r["_time"], r["_bucket"], r["_offset"], r["id"]) for r in rows.collect())
        for keep, place in (("first", places[0]), ("last", places[-1])):
            (found,) = jobs.deduplicate(rows, "key", keep=keep).collect()
            assert found["id"] == place[3]

    def test_deduplicate_treats_nulls_as_equal(self, spark: SparkSession) -> None:
        rows = spark.createDataFrame([(1, None), (2, None), (3, "x")], "n int, key string")
        found = jobs.deduplicate(rows, "key", order_by="n", keep="last")
        assert sorted(row["n"] for row in found.collect()) == [2, 3]

    def test_deduplicate_takes_names_with_dots_and_spaces(self, spark: SparkSession) -> None:
        rows = spark.createDataFrame([(1, 7), (2, 7)], "`a.n` int, `the key` int")
        found = jobs.deduplicate(rows, "the key", order_by="a.n")
        assert [tuple(row) for row in found.collect()] == [(1, 7)]

    def test_deduplicate_refuses_wrong_arguments_by_name(
        self, spark: SparkSession, rows: DataFrame
    ) -> None:
        with pytest.raises(InvalidArgument, match=r"keys names 'nope'.*'id', 'turn'"):
            jobs.deduplicate(rows, ["id", "nope"])
        with pytest.raises(InvalidArgument, match="keep must be 'first' or 'last', got 'best'"):
            jobs.deduplicate(rows, "id", keep="best")
        with pytest.raises(InvalidArgument, match="keys names no column"):
            jobs.deduplicate(rows, [])
        with pytest.raises(InvalidArgument, match="includeMetadata=True"):
            jobs.deduplicate(rows.drop("_time"), "id")


WORDS = [f"word{n}" for n in range(400)]


def texts(seed: int, count: int) -> list[str | None]:
    """Return texts, of which some are changed copies of others, some copies, and some null."""
    chance = random.Random(seed)
    made: list[str | None] = []
    for _ in range(count):
        earlier = [one for one in made if one]
        kind = chance.random()
        if kind < 0.05:
            made.append(None)
        elif kind < 0.15 and earlier:
            made.append(chance.choice(earlier))
        elif kind < 0.6 and earlier:
            words = chance.choice(earlier).split()
            for _ in range(chance.randint(1, 6)):
                words[chance.randrange(len(words))] = chance.choice(WORDS)
            made.append(" ".join(words))
        else:
            made.append(" ".join(chance.choices(WORDS, k=30)))
    return made


def similarity(one: str, other: str) -> float:
    a, b = (set(minhash.shingles(text, near_dedupe.SHINGLE).tolist()) for text in (one, other))
    return len(a & b) / len(a | b)


def frame(spark: SparkSession, made: list[str | None]) -> DataFrame:
    return spark.createDataFrame(list(enumerate(made)), "n int, text string")


class TestNearDuplicates:
    def test_near_duplicates_are_the_pairs_above_the_threshold(self, spark: SparkSession) -> None:
        made = texts(1, 150)
        pairs = jobs.near_duplicates(frame(spark, made), "text", 0.6, order_by="n").collect()
        found = {(row["first"]["n"], row["second"]["n"]): row["similarity"] for row in pairs}
        assert len(found) == len(pairs)
        seen: dict[str, int] = {}
        different = [n for n, text in enumerate(made) if text and seen.setdefault(text, n) == n]
        near_ones = {
            (a, b): value
            for a, b in combinations(different, 2)
            if (value := similarity(str(made[a]), str(made[b]))) >= 0.6
        }
        equal = {(seen[t], n): 1.0 for n, t in enumerate(made) if t and seen[t] != n}
        assert near_ones
        assert equal
        assert found.items() <= (near_ones | equal).items()
        assert equal.items() <= found.items()
        missed = near_ones.keys() - found.keys()
        assert len(missed) <= 0.05 * len(near_ones)

    @pytest.mark.parametrize("keep", ["first", "last"])
    def test_drop_near_duplicates_leaves_no_near_pair(self, spark: SparkSession, keep: str) -> None:
        made = texts(2, 60)
        kept = jobs.drop_near_duplicates(frame(spark, made), "text", 0.7, keep=keep, order_by="n")
        stays = {row["n"] for row in kept.collect()}
        worded = [n for n, text in enumerate(made) if text is not None]
        assert set(range(60)) - set(worded) <= stays
        assert set(worded) - stays
        for one in worded:
            beside = [n for n in worded if (n < one if keep == "first" else n > one)]
            is_near = [n for n in beside if similarity(str(made[one]), str(made[n])) >= 0.7]
            if one in stays:
                assert not stays & set(is_near)
            else:
                assert is_near

    def test_near_duplicates_are_identified_by_arrival(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        text = "the quick brown fox jumps over the lazy dog"
        put(
            tmp_path,
            [
                {"id": 1, "text": text},
                {"id": 2, "text": "nothing of the kind"},
                {"id": 3, "text": f"{text}s"},
            ],
            buckets=1,
        )
        rows = read_topic(spark, tmp_path / "t", includeMetadata=True)
        (pair,) = jobs.near_duplicates(rows, "text").collect()
        assert (pair["first"]["_offset"], pair["second"]["_offset"]) == (0, 2)
        assert 0.9 < pair["similarity"] < 1
        kept = jobs.drop_near_duplicates(rows, "text")
        assert sorted(row["id"] for row in kept.collect()) == [1, 2]

    @pytest.mark.parametrize("keep", ["first", "last"])
    def test_near_duplicates_with_equal_order_are_distinguished(
        self, spark: SparkSession, keep: str
    ) -> None:
        text = "the quick brown fox jumps over the lazy dog again and again"
        made = [
            ("mon", f"{text} a"),
            ("mon", f"{text} a"),
            ("tue", f"{text} b"),
            ("tue", "nothing of the kind, not at all"),
            ("tue", None),
            ("tue", None),
        ]
        frame = spark.createDataFrame(made, "day string, text string")
        kept = jobs.drop_near_duplicates(frame, "text", 0.7, keep=keep, order_by="day").collect()
        stays = "mon" if keep == "first" else "tue"
        assert sorted((row["day"], str(row["text"])[:3]) for row in kept) == sorted(
            [(stays, "the"), ("tue", "not"), ("tue", "Non"), ("tue", "Non")]
        )
        pairs = jobs.near_duplicates(frame, "text", 0.7, order_by="day").collect()
        assert pairs[0]["first"].asDict().keys() == {"day"}
        assert sorted((row["first"]["day"], row["second"]["day"]) for row in pairs) == [
            ("mon", "mon"),
            ("mon", "tue"),
        ]

    def test_large_groups_are_compared_with_their_first_text(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(near_dedupe, "CROWD", 3)
        common = " ".join(WORDS[:60])
        made: list[Any] = [f"{common} {WORDS[100 + n]}" for n in range(12)]
        kept = jobs.drop_near_duplicates(frame(spark, made), "text", 0.8, order_by="n")
        assert [row["n"] for row in kept.collect()] == [0]

    def test_near_duplicates_refuses_wrong_arguments_by_name(self, spark: SparkSession) -> None:
        rows = frame(spark, ["a"])
        with pytest.raises(InvalidArgument, match="threshold must be above 0"):
            jobs.near_duplicates(rows, "text", 0, order_by="n")
        with pytest.raises(InvalidArgument, match="threshold must be above 0"):
            jobs.near_duplicates(rows, "text", "0.8", order_by="n")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'n' holds int, not text"):
            jobs.near_duplicates(rows, "n", order_by="n")
        with pytest.raises(InvalidArgument, match="names 'nope'"):
            jobs.near_duplicates(rows, "nope", order_by="n")
        with pytest.raises(InvalidArgument, match="includeMetadata"):
            jobs.near_duplicates(rows, "text")


class TestMinhash:
    @pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
    def test_bands_find_a_pair_at_the_threshold(self, threshold: float) -> None:
        rows = minhash.rows_per_band(threshold)
        count = minhash.HASHES // rows
        assert 1 - (1 - threshold**rows) ** count >= 0.99

    def test_bands_are_as_long_as_the_threshold_allows(self) -> None:
        lengths = [minhash.rows_per_band(t) for t in (0.05, 0.5, 0.8, 0.95, 1.0)]
        assert lengths == sorted(lengths)
        assert (lengths[0], lengths[-1]) == (1, minhash.HASHES)

    def test_sketch_ignores_case_width_and_white_space(self) -> None:
        one = minhash.sketch("Straße  und\nＷＥＧ", 5, 8)
        assert one == minhash.sketch("strasse und weg", 5, 8)

    def test_text_is_the_set_of_its_shingles(self) -> None:
        assert len(minhash.shingles("abcdefg", 5)) == 3
        assert len(minhash.shingles("ababababab", 2)) == 2
        assert len(minhash.shingles("向量数据库检索", 5)) == 3
        assert len(minhash.shingles("ab", 5)) == len(minhash.shingles("", 5)) == 1
        assert minhash.sketch("ab", 5, 8).whole != minhash.sketch("ba", 5, 8).whole

    def test_share_of_equal_hashes_estimates_the_similarity(self) -> None:
        chance = random.Random(5)
        errors = []
        for _ in range(60):
            words = chance.choices(WORDS, k=60)
            other = [w if chance.random() < 0.8 else chance.choice(WORDS) for w in words]
            one, two = " ".join(words), " ".join(other)
            a, b = (minhash.bands(minhash.shingles(text, 5), 1) for text in (one, two))
            errors.append(np.mean(a == b) - similarity(one, two))
        assert abs(float(np.mean(errors))) < 0.03

    def test_sketch_is_the_same_on_every_machine(self) -> None:
        found = minhash.sketch("persisting", 5, 64)
        assert found.bands == GOLDEN_BANDS
        assert found.whole == GOLDEN_WHOLE


GOLDEN_WHOLE = -5939669514313669117
GOLDEN_BANDS = [5155114629388093458, -6615016196477487994]
