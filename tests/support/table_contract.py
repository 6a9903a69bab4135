"""A topic as a table: versions, search, random access and maintenance."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persisting.errors import BucketClosed, InvalidArgument, OffsetOutOfRange, SchemaError
from persisting.queue import QueueReader, QueueWriter
from persisting.topic.routing import route
from support.topic_homes import BUCKETS, Home, flat, with_two_flushes
from support.topic_places import drained, ids, numbered


def bucket_of(number: Any) -> int:
    return route({"id": number}, "id", BUCKETS)


def one_per_bucket(start: int = 0) -> list[int]:
    """Return ids that are routed to bucket 0, 1 and 2."""
    found: dict[int, int] = {}
    number = start
    while len(found) < BUCKETS:
        found.setdefault(bucket_of(number), number)
        number += 1
    return [found[bucket] for bucket in range(BUCKETS)]


def vectors(count: int, start: int = 0, size: int = 4) -> list[dict[str, Any]]:
    chance = np.random.default_rng(start + 1)
    return [
        {"id": start + n, "v": chance.normal(size=size).tolist(), "odd": bool((start + n) % 2)}
        for n in range(count)
    ]


def distances(records: list[dict[str, Any]], query: list[float], metric: str) -> list[float]:
    rows, asked = np.array([r["v"] for r in records]), np.array(query)
    if metric == "l2":
        found = ((rows - asked) ** 2).sum(axis=1)
    elif metric == "cosine":
        found = 1 - rows @ asked / np.linalg.norm(rows, axis=1) / np.linalg.norm(asked)
    else:
        found = 1 - rows @ asked
    return [float(one) for one in found]


def nearest(
    records: list[dict[str, Any]], query: list[float], k: int, metric: str = "l2"
) -> list[int]:
    """Return the ids of the nearest records, by brute force."""
    ranked = sorted(zip(distances(records, query, metric), ids(records), strict=True))
    return [number for _, number in ranked[:k]]


async def sound_topic(home: Home) -> tuple[QueueReader, int]:
    """Flush twice 40 records; return a reader, and the number of files that it verifies."""
    writer = await home.open()
    await writer.put(numbered(40))
    await writer.flush()
    await writer.put(numbered(40, 40))
    await writer.flush()
    reader = await home.read()
    sound = await reader.verify()
    assert (sound["ok"], sound["rows"], sound["damaged"]) == (True, 80, [])
    return reader, sound["files"]


QUERY = [0.3, -0.2, 0.9, 0.1]


class VersionContract:
    async def test_versions_of_all_buckets_are_listed_oldest_first(self, home: Home) -> None:
        writer = await home.open()
        for start in (0, 20, 40):
            await writer.put(numbered(20, start))
            await writer.flush()
        reader = await home.read()
        found = await reader.versions()
        assert found == await writer.versions()
        assert all({"bucket", "version", "timestamp", "rows", "operation"} <= set(v) for v in found)
        assert [v["timestamp"] for v in found] == sorted(v["timestamp"] for v in found)
        assert all(v["timestamp"].utcoffset() == dt.timedelta(0) for v in found)
        for bucket in range(BUCKETS):
            own = [v for v in found if v["bucket"] == bucket]
            assert [v["version"] for v in own] == sorted(v["version"] for v in own)
            rows = [v["rows"] for v in own if v["operation"] == "append"]
            expected = [sum(bucket_of(n) == bucket for n in range(end)) for end in (20, 40, 60)]
            assert rows == expected

    async def test_each_version_of_a_bucket_reads_as_it_was(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        was: list[tuple[dict[int, int], dict[int, list[Any]]]] = []
        for start in (0, 20, 40):
            await writer.put(numbered(20, start))
            await writer.flush()
            newest = {v["bucket"]: v["version"] for v in await reader.versions()}
            was.append((dict(sorted(newest.items())), await home.content()))
        await writer.compact()
        for versions, content in was:
            assert await reader.get(None, version=versions) == flat(content)
            for bucket, version in versions.items():
                assert await reader.get(None, version={bucket: version}) == content[bucket]
            table = await reader.get_arrow(version=versions)
            assert table.to_pylist() == flat(content)

    async def test_timestamp_reads_what_was_flushed_until_then(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        before = dt.datetime.now(dt.timezone.utc)
        await writer.put(numbered(20))
        await writer.flush()
        between = max(v["timestamp"] for v in await reader.versions())
        content = flat(await home.content())
        await asyncio.sleep(0.01)
        await writer.put(numbered(20, 20))
        await writer.flush()
        naive = between.astimezone().replace(tzinfo=None)
        far = dt.timezone(dt.timedelta(hours=9))
        for moment in (between, naive, between.astimezone(far)):
            assert await reader.get(None, version=moment) == content
            assert (await reader.get_arrow(version=moment)).to_pylist() == content
        assert await reader.get(None, version=before - dt.timedelta(days=1)) == []
        assert (await reader.get_arrow(version=before - dt.timedelta(days=1))).num_rows == 0
        assert len(await reader.get(None, version=between + dt.timedelta(days=1))) == 40

    async def test_offset_and_limit_apply_to_a_version(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("t")
        content = await home.content()
        await writer.put(numbered(30, 30))
        reader = await home.read()
        later = [record for bucket in range(BUCKETS) for record in content[bucket][4:]]
        assert await reader.get(None, offset=4, version="t") == later
        assert await reader.get(7, version="t") == flat(content)[:7]
        assert await reader.get(0, version="t") == []
        assert (await reader.get_arrow(limit=7, version="t")).to_pylist() == flat(content)[:7]
        assert (await reader.get_arrow(offset=4, version="t")).to_pylist() == later
        assert (await reader.get_arrow(limit=0, version="t")).num_rows == 0
        assert await reader.get(None, offset=10**6, version="t") == []

    async def test_reading_a_version_does_not_move_the_cursor(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.tag("t")
        reader = await home.read()
        await reader.get(10)
        at = reader.offsets()
        await reader.get(version="t")
        await reader.get_arrow(version="t")
        assert reader.offsets() == at
        assert len(await drained(reader)) == 20

    async def test_version_number_is_accepted_by_a_reader_of_one_bucket(self, home: Home) -> None:
        _, content = await with_two_flushes(home)
        alone = await home.read(bucket_id=1)
        first = next(v["version"] for v in await alone.versions() if v["rows"])
        assert await alone.get(None, version=first) == content[1]
        assert await alone.get(None, version=0) == []
        with pytest.raises(InvalidArgument, match="datetime"):
            await (await home.read()).get(version=first)

    async def test_invalid_version_raises_and_is_named(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(30))
        await writer.flush()
        reader = await home.read()
        wrong: list[tuple[Any, str]] = [
            ("nope", "nope"),
            ({}, "no bucket"),
            ({0: 99}, "99"),
            ({BUCKETS: 1}, str(BUCKETS)),
            (True, "True"),
            (1.5, "1.5"),
            (dt.date(2024, 1, 1), "datetime"),
            ("../escape", "letters"),
        ]
        for version, message in wrong:
            for read in (reader.get(version=version), reader.get_arrow(version=version)):
                with pytest.raises(InvalidArgument, match=message):
                    await read

    async def test_offset_without_a_version_raises(self, home: Home) -> None:
        await home.open()
        with pytest.raises(InvalidArgument, match="set_offset"):
            await (await home.read()).get(offset=3)

    async def test_writer_has_the_table_methods_of_the_reader(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(30))
        reader = await home.read()
        await writer.tag("t")
        assert await writer.tags() == await reader.tags()
        assert await writer.query("id < 5") == await reader.query("id < 5")
        assert await writer.search(vector=QUERY) == await reader.search(vector=QUERY)
        assert await writer.lookup("id", 7) == await reader.lookup("id", 7)
        assert await writer.take([(0, 0)]) == await reader.take([(0, 0)])
        assert await writer.indexes() == await reader.indexes() == []
        assert await writer.verify() == await reader.verify()


class SearchContract:
    @pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
    async def test_results_of_all_buckets_merge_into_one_exact_ranking(
        self, home: Home, metric: str
    ) -> None:
        writer = await home.open()
        await writer.put(vectors(200))
        await writer.flush()
        await writer.put(vectors(100, 200))
        records = vectors(200) + vectors(100, 200)
        reader = await home.read()
        for k in (1, 10, 300, 1000):
            found = await reader.search(vector=QUERY, k=k, metric=metric)
            assert ids(found) == nearest(records, QUERY, k, metric)
            found_distances = [hit["_distance"] for hit in found]
            assert found_distances == sorted(found_distances)
            if metric != "dot":
                by_id = {r["id"]: r for r in records}
                expected = distances([by_id[n] for n in ids(found)], QUERY, metric)
                assert found_distances == pytest.approx(expected, rel=1e-4, abs=1e-4)

    async def test_search_applies_the_condition_before_ranking(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(200))
        await writer.flush()
        await writer.put(vectors(100, 200))
        records = [r for r in vectors(200) + vectors(100, 200) if r["odd"] and r["id"] > 150]
        reader = await home.read()
        found = await reader.search(vector=QUERY, k=12, where="odd AND id > 150")
        assert ids(found) == nearest(records, QUERY, 12)
        assert await reader.search(vector=QUERY, where="id > 10000") == []

    async def test_index_changes_no_result(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        await writer.put(vectors(4000))
        made = await writer.create_index("v")
        assert (made["rows"], made["behind"], made["kind"]) == (4000, 0, "ivf_flat")
        await writer.put(vectors(60, 4000))
        await writer.flush()
        await writer.put(vectors(60, 4060))
        records = vectors(4000) + vectors(60, 4000) + vectors(60, 4060)
        (known,) = await reader.indexes()
        assert (known["column"], known["rows"]) == ("v", 4000)
        # Flushes that the first put began may end only now, and then take last records too.
        assert 60 <= known["behind"] <= 120
        for query in (QUERY, records[4007]["v"], records[4100]["v"], records[5]["v"]):
            assert ids(await reader.search(vector=query, k=20)) == nearest(records, query, 20)
        assert await writer.drop_index("v") == 1
        assert await reader.indexes() == []
        assert await writer.drop_index("v") == 0

    async def test_index_with_another_metric_replaces_the_first(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(200))
        await writer.create_index("v")
        await writer.create_index("v", metric="cosine")
        reader = await home.read()
        assert [(i["column"], i["metric"]) for i in await reader.indexes()] == [("v", "cosine")]
        found = ids(await reader.search(vector=QUERY, k=10))
        assert found == nearest(vectors(200), QUERY, 10, "cosine")

    async def test_each_hit_has_its_bucket_and_offset(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(100))
        await writer.flush()
        await writer.put(vectors(50, 100))
        reader = await home.read()
        for hit in await reader.search(vector=QUERY, k=20):
            (record,) = await reader.take([(hit["_bucket"], hit["_offset"])])
            assert {n: v for n, v in hit.items() if not n.startswith("_")} == record
            assert hit["_bucket"] == bucket_of(hit["id"])

    async def test_only_requested_fields_are_returned(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(50))
        reader = await home.read()
        found = await reader.search(vector=QUERY, k=3, columns=["odd", "id"])
        assert all(set(h) == {"odd", "id", "_distance", "_bucket", "_offset"} for h in found)
        assert await reader.query("id = 3", columns=["id"]) == [{"id": 3}]
        assert await reader.lookup("id", 3, columns=["odd"]) == [{"odd": True}]
        assert list((await reader.take([(0, 0)], columns=["odd", "id"]))[0]) == ["odd", "id"]

    async def test_text_search_covers_every_bucket_best_hit_first(self, home: Home) -> None:
        writer = await home.open()
        texts = ["red fox", "red red red", "blue whale", "fox and whale", "nothing here"]
        await writer.put([{"id": n, "text": texts[n % 5]} for n in range(50)])
        await writer.create_index("text")
        await writer.put([{"id": n, "text": texts[n % 5]} for n in range(50, 80)])
        reader = await home.read()
        for query, matching in (("red", {0, 1}), ("whale", {2, 3}), ("fox", {0, 3})):
            found = await reader.search(text=query, k=100)
            assert sorted(ids(found)) == [n for n in range(80) if n % 5 in matching]
            scores = [hit["_score"] for hit in found]
            assert scores == sorted(scores, reverse=True)
            assert all(score > 0 for score in scores)
        assert await reader.search(text="absent") == []
        assert len(await reader.search(text="red", k=7)) == 7
        few = await reader.search(text="red", k=100, where="id >= 60")
        assert sorted(ids(few)) == [n for n in range(60, 80) if n % 5 in (0, 1)]

    async def test_text_queries_give_the_same_records_before_and_after_an_index(
        self, home: Home
    ) -> None:
        writer = await home.open()
        texts = ["the red fox", "a fox, red", "打开Fox页面", "foxes and whales", "로그인을 했다"]
        await writer.put([{"id": n, "text": texts[n % 5]} for n in range(50)])
        reader = await home.read()
        expected: list[tuple[dict[str, Any], set[int]]] = [
            ({"text": "fox"}, {0, 1, 2}),
            ({"text": "red fox", "match": "all"}, {0, 1}),
            ({"text": "red fox", "match": "phrase"}, {0}),
            ({"text": "+fox -red", "match": "query"}, {2}),
            ({"text": "fox*", "match": "query"}, {0, 1, 2, 3}),
            ({"text": "whalse", "fuzziness": 2}, {3}),
            ({"text": "页面"}, {2}),
            ({"text": "로그인"}, {4}),
        ]
        for state in ("buffered", "flushed", "indexed", "later"):
            if state == "flushed":
                await writer.flush()
            elif state == "indexed":
                await writer.create_index("text")
            elif state == "later":
                await writer.put([{"id": n, "text": texts[n % 5]} for n in range(50, 80)])
            count = 80 if state == "later" else 50
            for how, matching in expected:
                found = await reader.search(k=100, **how)
                matches = [n for n in range(count) if n % 5 in matching]
                assert sorted(ids(found)) == matches, (state, how)
        await writer.create_index("text", language="english")
        found = await reader.search(text="fox whale", match="all", k=100)
        assert sorted(ids(found)) == [n for n in range(80) if n % 5 == 3]
        with pytest.raises(InvalidArgument, match="a quotation mark is missing"):
            await reader.search(text='"red', match="query")

    async def test_hybrid_search_ranks_vector_and_text_together(self, home: Home) -> None:
        writer = await home.open()
        records = [
            {**one, "text": "wanted thing" if one["id"] % 10 == 0 else "something else"}
            for one in vectors(100)
        ]
        await writer.put(records[:60])
        await writer.flush()
        await writer.put(records[60:])
        reader = await home.read()
        near = nearest([r for r in records if r["id"] % 10 == 0], QUERY, 1)[0]
        found = await reader.search(vector=QUERY, text="wanted", k=10)
        assert len(found) == 10
        assert len(set(ids(found))) == 10
        assert near in ids(found)[:5]
        assert sum(hit["id"] % 10 == 0 for hit in found) >= 4
        scores = [hit["_score"] for hit in found]
        assert scores == sorted(scores, reverse=True)
        assert all("_distance" not in hit for hit in found)

    async def test_record_is_found_as_soon_as_it_is_put(self, home: Home) -> None:
        writer = await home.open(flush_threshold=7)
        reader = await home.read()
        for number in range(40):
            far = [100.0 + number, 0.0, 0.0, 0.0]
            await writer.put({"id": number, "v": far, "odd": False})
            assert ids(await reader.search(vector=far, k=1)) == [number]
            assert ids(await reader.lookup("id", number)) == [number]
            assert ids(await reader.query(f"id = {number}")) == [number]

    async def test_search_during_writes_returns_complete_rankings(
        self, home: Home, spawned: Any
    ) -> None:
        writer = await home.open(flush_threshold=50, compaction=True)
        await writer.put(vectors(100))
        stop = asyncio.Event()

        async def produce() -> int:
            start = 100
            while not stop.is_set():
                await writer.put(vectors(25, start))
                start += 25
            return start

        producing = spawned(produce())
        reader = await home.read()
        for _ in range(15):
            found = await reader.search(vector=QUERY, k=30)
            assert len(set(ids(found))) == 30
            found_distances = [hit["_distance"] for hit in found]
            assert found_distances == sorted(found_distances)
        stop.set()
        end = await producing
        records = vectors(100)
        for start in range(100, end, 25):
            records += vectors(25, start)
        assert ids(await reader.search(vector=QUERY, k=30)) == nearest(records, QUERY, 30)

    async def test_empty_buckets_and_empty_topics_can_be_searched(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        assert await reader.query() == []
        assert await reader.versions() == []
        assert await reader.indexes() == []
        assert (await reader.verify())["ok"]
        with pytest.raises(OffsetOutOfRange):
            await reader.take([(0, 0)])
        number = one_per_bucket()[1]
        await writer.put({"id": number, "v": QUERY, "odd": True})
        assert ids(await reader.search(vector=QUERY, k=5)) == [number]
        assert ids(await reader.query("odd")) == [number]
        assert ids(await reader.lookup("odd", True)) == [number]
        for bucket in (0, 2):
            with pytest.raises(OffsetOutOfRange):
                await reader.take([(1, 0), (bucket, 0)])
        made = await writer.create_index("id")
        assert made["rows"] == 1
        others = one_per_bucket(100)
        await writer.put([{"id": n, "v": QUERY, "odd": False} for n in others])
        assert sorted(ids(await reader.query("id >= 0"))) == sorted([number, *others])

    async def test_invalid_search_raises_and_names_the_argument(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(30))
        await writer.flush()
        reader = await home.read()
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"vector": [1.0]}, "1 values"),
            ({"vector": "abc"}, "list of floats"),
            ({"vector": [float("nan"), 0.0, 0.0, 0.0]}, "finite"),
            ({"vector": QUERY, "column": "nope"}, "nope"),
            ({"vector": QUERY, "column": "id"}, "id"),
            ({"vector": QUERY, "k": 0}, "k must"),
            ({"vector": QUERY, "metric": "far"}, "metric"),
            ({"vector": QUERY, "where": "id >"}, "where"),
            ({"vector": QUERY, "where": "nope > 1"}, "nope"),
            ({"vector": QUERY, "columns": ["nope"]}, "nope"),
            ({"vector": QUERY, "columns": "id"}, "list"),
            ({"text": "words"}, "text field"),
            ({}, "vector"),
        ]
        for arguments, message in wrong:
            with pytest.raises(InvalidArgument, match=message):
                await reader.search(**arguments)

    async def test_search_accepts_any_sequence_of_numbers_as_vector(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(30))
        reader = await home.read()
        expected = nearest(vectors(30), QUERY, 5)
        for vector in (
            tuple(QUERY),
            np.array(QUERY),
            np.array(QUERY, "float32"),
            [np.float64(one) for one in QUERY],
            [np.float32(one) for one in QUERY],
        ):
            assert ids(await reader.search(vector=vector, k=5)) == expected

    async def test_invalid_index_raises_and_changes_nothing(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(30))
        for wrong in (
            {"column": "nope"},
            {"column": "v", "kind": "scalar"},
            {"column": "id", "kind": "text"},
            {"column": "id", "kind": "fast"},
            {"column": "v", "metric": "far"},
        ):
            with pytest.raises(InvalidArgument):
                await writer.create_index(**wrong)
        assert await writer.indexes() == []


class AccessContract:
    async def test_take_returns_the_records_in_the_order_of_the_offsets(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(40))
        await writer.flush()
        await writer.put(numbered(20, 40))
        content = await home.content()
        reader = await home.read()
        pairs = [(b, o) for b in range(BUCKETS) for o in range(len(content[b]))]
        pairs = pairs[::-1] + pairs[5:9] + pairs[5:9]
        assert await reader.take(pairs) == [content[b][o] for b, o in pairs]
        assert await reader.take([3, 1, 1], bucket_id=2) == [content[2][o] for o in (3, 1, 1)]
        assert await reader.take([]) == []

    async def test_take_with_invalid_offsets_raises(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(40))
        reader = await home.read()
        wrong: list[tuple[Any, type[Exception]]] = [
            ([(0, 10**6)], OffsetOutOfRange),
            ([(0, -1)], InvalidArgument),
            ([(0, 1.5)], InvalidArgument),
            ([(BUCKETS, 0)], InvalidArgument),
            ([5], InvalidArgument),
            ([(0, 1, 2)], InvalidArgument),
        ]
        for offsets, error in wrong:
            with pytest.raises(error):
                await reader.take(offsets)

    async def test_string_as_columns_is_refused(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(40))
        reader = await home.read()
        for use in (
            reader.take([(0, 0)], columns="id"),
            reader.query(columns="id"),
            reader.lookup("id", 1, columns="id"),
        ):
            with pytest.raises(InvalidArgument, match="list"):
                await use

    async def test_query_keeps_the_order_within_each_bucket(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(numbered(60))
        await writer.flush()
        await writer.put(numbered(60, 60))
        content = await home.content()
        reader = await home.read()
        assert await reader.query() == flat(content)
        kept = [r for r in flat(content) if 15 <= r["id"] < 100]
        assert await reader.query("id >= 15 AND id < 100") == kept
        assert await reader.query("id >= 15 AND id < 100", limit=7) == kept[:7]
        assert await reader.query(limit=0) == []
        for wrong in (-1, "5", 1.5):
            with pytest.raises(InvalidArgument):
                await reader.query(limit=wrong)

    async def test_lookup_finds_every_record_with_a_value(self, home: Home) -> None:
        writer = await home.open()
        day = dt.datetime(2024, 2, 29, 12, 0, 0, 5)
        records = [
            {
                "id": n,
                "name": f"o'name {n % 4}",
                "when": day + dt.timedelta(days=n % 3),
                "part": n / 4,
                "flag": n % 2 == 0,
                "raw": bytes([n % 5]),
                "maybe": None if n % 6 == 0 else n % 6,
            }
            for n in range(60)
        ]
        await writer.put(records[:40])
        await writer.create_index("name", "scalar")
        await writer.put(records[40:])
        reader = await home.read()
        for column, value in (
            ("id", 17),
            ("name", "o'name 3"),
            ("when", day + dt.timedelta(days=2)),
            ("part", 2.25),
            ("flag", True),
            ("raw", b"\x03"),
            ("maybe", None),
            ("maybe", 4),
            ("id", 999),
        ):
            expected = sorted(r["id"] for r in records if r[column] == value)
            assert sorted(ids(await reader.lookup(column, value))) == expected, (column, value)
        with pytest.raises(InvalidArgument, match="nope"):
            await reader.lookup("nope", 1)
        with pytest.raises(InvalidArgument, match="query"):
            await reader.lookup("id", [1])

    async def test_lookup_by_the_bucket_column_finds_text_keys(self, home: Home) -> None:
        writer = await home.open()
        await writer.put([{"id": f"key {n % 20}", "n": n} for n in range(60)])
        reader = await home.read()
        for key in range(20):
            found = await reader.lookup("id", f"key {key}")
            assert [r["n"] for r in found] == [key, key + 20, key + 40]
        assert await reader.lookup("id", "absent") == []

    async def test_table_methods_of_a_partial_reader_cover_its_buckets_only(
        self, home: Home
    ) -> None:
        writer = await home.open()
        await writer.put(vectors(60))
        await writer.flush()
        content = await home.content()
        reader = await home.read(bucket_ids=[0, 2])
        own = content[0] + content[2]
        assert await reader.query() == own
        assert ids(await reader.search(vector=QUERY, k=8)) == nearest(own, QUERY, 8)
        assert {v["bucket"] for v in await reader.versions()} == {0, 2}
        missing = content[1][0]["id"]
        assert await reader.lookup("id", missing) == []
        with pytest.raises(InvalidArgument, match="bucket 1"):
            await reader.take([(1, 0)])
        with pytest.raises(InvalidArgument, match="bucket 1"):
            await reader.get(version={1: 1})
        for whole in (
            reader.tag("t"),
            reader.delete_tag("t"),
            reader.restore({0: 1}),
            reader.create_index("id"),
            reader.drop_index("id"),
        ):
            with pytest.raises(InvalidArgument, match="whole topic"):
                await whole
        await writer.tag("t")
        assert await reader.get(None, version="t") == own


async def with_a_field_of_one_bucket(home: Home) -> tuple[QueueWriter, list[int]]:
    """Put a record with the field "a" to a bucket, and one with "b" to another.

    Returns an id for each bucket, those of the two records first.
    """
    writer = await home.open()
    numbers = one_per_bucket()
    await writer.put({"id": numbers[0], "a": 1})
    await writer.put({"id": numbers[1], "b": "x"})
    return writer, numbers


class EvolvingContract:
    """Fields that only some buckets know."""

    async def test_vectors_of_all_buckets_refuse_another_length(self, evolving_home: Home) -> None:
        writer = await evolving_home.open()
        await writer.put([{"id": n, "v": [float(n), 1.0]} for n in range(400)])
        await writer.flush()
        for number in one_per_bucket():
            with pytest.raises(SchemaError, match="'v' holds vectors of 2 floats, got 3 floats"):
                await writer.put({"id": number, "v": [1.0, 2.0, 3.0]})
        assert len(await writer.search(vector=[1.0, 1.0], k=1000)) == 400

    async def test_field_known_only_to_another_bucket_reads_as_none(
        self, evolving_home: Home
    ) -> None:
        home = evolving_home
        writer = await home.open()
        first, second, third = one_per_bucket()
        await writer.put({"id": first, "a": 1})
        await writer.flush()
        await writer.put({"id": second, "b": "x", "c": [0.5, 1.5]})
        reader = await home.read()
        for state in ("buffered", "flushed", "reopened"):
            if state == "flushed":
                await writer.flush()
            elif state == "reopened":
                writer = await home.reopen()
                reader = await home.read()
            assert ids(await reader.query("b = 'x'")) == [second], state
            assert ids(await reader.query("b IS NULL")) == [first], state
            assert ids(await reader.query("a = 1 OR b = 'x'")) == [first, second], state
            assert ids(await reader.query("a = 1 AND b IS NULL")) == [first], state
            assert ids(await reader.lookup("b", "x")) == [second], state
            assert ids(await reader.lookup("b", None)) == [first], state
            assert await reader.query(columns=["id", "b"]) == [
                {"id": first, "b": None},
                {"id": second, "b": "x"},
            ], state
            found = await reader.search(vector=[0.5, 1.5], where="b = 'x'", columns=["a", "id"])
            assert [(h["id"], h["a"], h["_distance"]) for h in found] == [(second, None, 0.0)]
            taken = await reader.take([(0, 0), (1, 0)], columns=["b"])
            assert [record["b"] for record in taken] == [None, "x"], state
        await writer.put({"id": third, "a": 7, "b": "z"})
        assert ids(await reader.query("b = 'z' AND a > 5")) == [third]

    async def test_unknown_field_raises_even_with_a_field_only_some_buckets_know(
        self, evolving_home: Home
    ) -> None:
        writer, _ = await with_a_field_of_one_bucket(evolving_home)
        await writer.flush()
        reader = await evolving_home.read()
        for where in ("nope = 1", "b = 'x' AND nope = 1", "nope = 1 OR a = 1"):
            with pytest.raises(InvalidArgument, match="nope"):
                await reader.query(where)

    async def test_index_on_a_field_of_one_bucket_covers_all_buckets(
        self, evolving_home: Home
    ) -> None:
        writer, numbers = await with_a_field_of_one_bucket(evolving_home)
        assert (await writer.create_index("b", "scalar"))["column"] == "b"
        await writer.put([{"id": n, "b": f"b{n}"} for n in numbers])
        await writer.flush()
        reader = await evolving_home.read()
        for number in numbers:
            assert ids(await reader.lookup("b", f"b{number}")) == [number]

    async def test_version_before_a_new_field_reads_without_it(self, evolving_home: Home) -> None:
        home = evolving_home
        writer = await home.open()
        await writer.put([{"id": n, "v": n} for n in range(30)])
        await writer.tag("ints")
        content = flat(await home.content())
        await writer.put([{"id": n, "v": n + 0.5, "more": "m"} for n in range(30, 60)])
        await writer.flush()
        reader = await home.read()
        assert await reader.get(None, version="ints") == content
        assert [type(r["v"]) for r in await reader.get(None, version="ints")] == [int] * 30
        table = await reader.get_arrow(version="ints")
        assert table.column_names == ["id", "v"]
        assert table.schema.field("v").type == pa.int64()
        await writer.compact()
        assert await reader.get(None, version="ints") == content


class MaintenanceContract:
    async def test_compaction_changes_no_offset_order_or_record(self, home: Home) -> None:
        writer = await home.open()
        for start in range(0, 120, 20):
            await writer.put(vectors(20, start))
            await writer.flush()
        await writer.create_index("id")
        for start in range(120, 160, 20):
            await writer.put(vectors(20, start))
            await writer.flush()
        content = await home.content()
        reader = await home.read()
        pairs = [(b, o) for b in range(BUCKETS) for o in range(len(content[b]))]
        before = await reader.take(pairs)
        done = await writer.compact()
        assert done["fragments_before"] > done["fragments_after"] >= BUCKETS
        assert await home.content() == content
        assert await reader.take(pairs) == before == flat(content)
        assert ids(await reader.search(vector=QUERY, k=9)) == nearest(flat(content), QUERY, 9)
        stats = await reader.stats()
        assert sum(b["fragments"] for b in stats["buckets"]) == done["fragments_after"]
        again = await writer.compact()
        assert again["fragments_before"] == done["fragments_after"] >= again["fragments_after"]
        assert await home.content() == content

    async def test_verify_names_the_bucket_the_file_and_the_offsets(self, home: Home) -> None:
        reader, files = await sound_topic(home)
        assert files >= 2 * BUCKETS
        content = await home.content()
        folder = home.folder / home.topic / "bucket_1" / "data.lance" / "data"
        path = max(folder.glob("*.lance"), key=lambda one: one.stat().st_mtime_ns)
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
        found = await reader.verify()
        assert found["ok"] is False
        (damage,) = found["damaged"]
        assert (damage["bucket"], damage["file"]) == (1, f"data/{path.name}")
        first = sum(bucket_of(n) == 1 for n in range(40))
        assert damage["offsets"] == [first, len(content[1])]

    async def test_synchronous_code_uses_the_table(self, home: Home) -> None:
        writer = await home.open()
        reader = await home.read()
        content = vectors(40)

        def work() -> None:
            put, get = writer.sync(), reader.sync()
            put.put(content)
            tagged = put.tag("t")
            assert tagged["rows"] == 40
            assert [t["name"] for t in get.tags()] == ["t"]
            put.put(vectors(20, 40))
            put.flush()
            assert len(get.get(None, version="t")) == 40
            assert get.get_arrow(version="t").num_rows == 40
            assert ids(get.search(vector=QUERY, k=3, where="id < 40")) == nearest(content, QUERY, 3)
            assert put.create_index("id")["rows"] == 60
            assert [one["column"] for one in get.indexes()] == ["id"]
            assert ids(get.lookup("id", 41)) == [41]
            assert ids(get.query("id = 42")) == [42]
            assert len(get.take([(0, 0), (1, 0)])) == 2
            assert put.compact()["fragments_after"] == BUCKETS
            assert get.verify()["ok"]
            assert put.restore("t")["removed"] == 20
            assert put.retain(rows=10**6)["dropped"] == 0
            assert put.drop_index("id") == 1
            assert {v["bucket"] for v in get.versions()} == set(range(BUCKETS))
            assert put.delete_tag("t") is True

        await asyncio.to_thread(work)

    async def test_table_methods_of_a_closed_handle_raise(self, home: Home) -> None:
        writer = await home.open()
        await writer.put(vectors(20))
        await writer.tag("t")
        other = await home.write(backend_options={})
        reader = await home.read()
        await reader.close()
        await other.close()
        for handle in (reader, other):
            for use in (
                handle.versions(),
                handle.tag("u"),
                handle.tags(),
                handle.delete_tag("t"),
                handle.restore("t"),
                handle.search(vector=QUERY),
                handle.create_index("id"),
                handle.drop_index("id"),
                handle.indexes(),
                handle.take([(0, 0)]),
                handle.query(),
                handle.lookup("id", 1),
                handle.compact(),
                handle.retain(rows=1),
                handle.verify(),
            ):
                with pytest.raises(BucketClosed):
                    await use
        for use in (reader.get(version="t"), reader.get_arrow(version="t")):
            with pytest.raises(BucketClosed):
                await use
        assert [t["name"] for t in await writer.tags()] == ["t"]
        assert (await writer.stats())["total_count"] == 20


class TableContract:
    """The whole contract: pytest collects these classes in each test class that inherits them."""

    TestVersions = VersionContract
    TestSearch = SearchContract
    TestAccess = AccessContract
    TestEvolving = EvolvingContract
    TestMaintenance = MaintenanceContract
