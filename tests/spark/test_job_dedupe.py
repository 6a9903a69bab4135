"""Duplicates: rows with equal keys, and texts that are nearly the same."""

from __future__ import annotations

import io
import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.spark.topics import put, writer

from persisting.errors import InvalidArgument
from persisting.spark import jobs, read_topic
from persisting.spark.jobs import minhash, near_dedupe
from persisting.spark.jobs.near_pairs import find_pairs
from persisting.spark.jobs.status_line import StatusLine

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
    a, b = (shingles(text, near_dedupe.SHINGLE) for text in (one, other))
    return len(a & b) / len(a | b)


@cache
def shingles(text: str, size: int) -> frozenset[int]:
    return frozenset(minhash.sketch([text], size, 8).shingles.tolist())


def frame(spark: SparkSession, made: list[str | None]) -> DataFrame:
    return spark.createDataFrame(list(enumerate(made)), "n int, text string")


@pytest.fixture(params=["in memory", "by spark"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pair the texts in this process, or by joins of Spark."""
    if request.param == "by spark":
        monkeypatch.setattr(near_dedupe, "LOCAL_CHARACTERS", 0)
    return str(request.param)


class TestNearDuplicates:
    @pytest.mark.usefixtures("way")
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

    @pytest.mark.usefixtures("way")
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

    @pytest.mark.usefixtures("way")
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

    @pytest.mark.usefixtures("way")
    def test_pairs_of_near_duplicates_have_the_requested_columns(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        text = "the quick brown fox jumps over the lazy dog"
        put(
            tmp_path,
            [{"id": 1, "text": text}, {"id": 2, "text": None}, {"id": 3, "text": f"{text}s"}],
            buckets=2,
        )
        rows = read_topic(spark, tmp_path / "t", includeMetadata=True)
        found = jobs.near_duplicates(rows, "text", columns=["id", "text", "_offset"])
        names = ["_time", "_bucket", "_offset", "id", "text"]
        assert found.schema["first"].dataType.names == names  # type: ignore[attr-defined]
        (pair,) = found.collect()
        sides = sorted([pair["first"], pair["second"]], key=lambda side: side["id"])
        assert [(side["id"], side["text"]) for side in sides] == [(1, text), (3, f"{text}s")]
        times = {row["id"]: row["_time"] for row in rows.collect()}
        assert [side["_time"] for side in sides] == [times[1], times[3]]

    def test_local_and_distributed_search_find_the_same_near_duplicates(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = frame(spark, texts(4, 200))
        found = []
        for limit in (near_dedupe.LOCAL_CHARACTERS, 0):
            monkeypatch.setattr(near_dedupe, "LOCAL_CHARACTERS", limit)
            pairs = jobs.near_duplicates(rows, "text", 0.5, order_by="n").collect()
            found.append({(p["first"]["n"], p["second"]["n"], p["similarity"]) for p in pairs})
        assert found[0] == found[1]
        assert len(found[0]) > 20

    @pytest.mark.usefixtures("way")
    def test_rows_with_a_null_sort_key_come_first(self, spark: SparkSession) -> None:
        made = [("b", 1, "a text of some length"), (None, 2, "a text of some length")]
        rows = spark.createDataFrame(made, "key string, n int, text string")
        (pair,) = jobs.near_duplicates(rows, "text", order_by=["key", "n"]).collect()
        assert (pair["first"]["n"], pair["second"]["n"]) == (2, 1)

    def test_progress_is_shown_on_a_terminal_or_on_request(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        shown, hidden, plain = Terminal(), Terminal(), io.StringIO()
        for out, quiet in ((shown, None), (hidden, True), (plain, None)):
            with StatusLine(quiet, out) as status:
                find_pairs(["one text", "another text"] * 3, 0.8, 5, 100, status.show)
        assert hidden.getvalue() == plain.getvalue() == ""
        lines = shown.getvalue().split("\r\x1b[K")
        assert "sketched 6 of 6 texts" in lines
        assert lines[-1] == ""

    @pytest.mark.usefixtures("way")
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
        with pytest.raises(InvalidArgument, match="column names 'nope'"):
            jobs.near_duplicates(rows, "nope", order_by="n")
        with pytest.raises(InvalidArgument, match="columns names 'nope'"):
            jobs.near_duplicates(rows, "text", order_by="n", columns=["nope"])
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
        sketches = minhash.sketch(["Straße  und\nＷＥＧ", "strasse und weg"], 5, 8)
        assert sketches.whole[0] == sketches.whole[1]
        assert (sketches.bands[0] == sketches.bands[1]).all()

    def test_text_is_compared_by_the_set_of_its_shingles(self) -> None:
        assert len(shingles("abcdefg", 5)) == 3
        assert len(shingles("ababababab", 2)) == 2
        assert len(shingles("向量数据库检索", 5)) == 3
        assert len(shingles("ab", 5)) == len(shingles("", 5)) == 1
        assert shingles("ab", 5) != shingles("ba", 5)

    def test_sketch_of_a_text_does_not_depend_on_its_neighbours(self) -> None:
        made = [str(text) for text in texts(3, 50)]
        together = minhash.sketch(made, 5, 6)
        for number, text in enumerate(made):
            alone = minhash.sketch([text], 5, 6)
            start, end = together.starts[number : number + 2]
            assert together.shingles[start:end].tolist() == alone.shingles.tolist()
            assert together.whole[number] == alone.whole[0]
            assert together.bands[number].tolist() == alone.bands[0].tolist()
        assert len(minhash.sketch([], 5, 6).whole) == 0

    def test_share_of_equal_hashes_estimates_the_similarity(self) -> None:
        chance = random.Random(5)
        errors = []
        for _ in range(60):
            words = chance.choices(WORDS, k=60)
            other = [w if chance.random() < 0.8 else chance.choice(WORDS) for w in words]
            one, two = " ".join(words), " ".join(other)
            a, b = minhash.sketch([one, two], 5, 1).bands
            errors.append(np.mean(a == b) - similarity(one, two))
        assert abs(float(np.mean(errors))) < 0.03

    def test_sketch_is_the_same_on_every_machine(self) -> None:
        sketches = minhash.sketch(["persisting"], 5, 64)
        assert sketches.bands[0].tolist() == GOLDEN_BANDS
        assert sketches.whole[0] == GOLDEN_WHOLE


GOLDEN_WHOLE = 16966602389493791575
GOLDEN_BANDS = [5155114629388093458, 11831727877232063622]
