"""Random access: by offset, by a field's value, by an SQL condition; before and after a flush."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import math
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force import QUIET, complaint
from support.buckets import PERSISTING, Bucket

from persisting.errors import OffsetOutOfRange
from persisting.queue import InvalidArgument

UTC = dt.timezone.utc
EAST = dt.timezone(dt.timedelta(hours=9))

VALUES: dict[str, list[Any]] = {
    "str": [
        "a",
        "",
        "it's",
        'say "hi"',
        "back`tick",
        "a\\b",
        "a\nb",
        "%",
        "NULL",
        "ü😀",
        "; --",
        "A",
    ],
    "int": [0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), -(2**63) + 1],
    "float": [0.0, -1.5, 0.1, 1e300, 5e-324, -1e-300, 1 / 3, math.inf, -math.inf],
    "bool": [True, False],
    "bytes": [b"", b"\x00", b"'", b"abc", b"\xff\xfe", b"x" * 300],
    "decimal": [
        Decimal("0"),
        Decimal("1.5"),
        Decimal("-0.000000000000000001"),
        Decimal("99999999999999999999.999999999999999999"),
        Decimal("-99999999999999999999.999999999999999999"),
    ],
    "datetime": [
        dt.datetime(2024, 2, 29, 12, 30),
        dt.datetime(2024, 2, 29, 12, 30, 0, 1),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
        dt.datetime(1, 1, 1),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    ],
    "aware datetime": [
        dt.datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
        dt.datetime(2024, 2, 29, 12, 30, 0, 1, tzinfo=EAST),
        dt.datetime(1900, 1, 1, tzinfo=EAST),
        dt.datetime(9999, 1, 1, tzinfo=UTC),
    ],
    "date": [dt.date(2024, 2, 29), dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "time": [dt.time(0), dt.time(12, 30, 15, 123456), dt.time(23, 59, 59, 999999)],
    "duration": [dt.timedelta(0), dt.timedelta(microseconds=1), dt.timedelta(days=-3, seconds=5)],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1), UUID("12345678-1234-5678-1234-567812345678")],
}


def with_values(values: list[Any]) -> list[dict[str, Any]]:
    """Return each value three times and None twice, shuffled."""
    rows = [*values * 3, None, None]
    random.Random(1).shuffle(rows)
    return [{"n": n, "x": value} for n, value in enumerate(rows)]


@pytest.mark.parametrize("indexed", [False, True], ids=["plain", "indexed"])
@pytest.mark.parametrize("kind", VALUES)
async def test_lookup_finds_values_in_table_and_buffer(
    persisting: Bucket, kind: str, indexed: bool
) -> None:
    rows = with_values(VALUES[kind])
    backend = persisting.open(**QUIET)
    half = len(rows) // 2
    for part in (rows[:half], rows[half:]):
        await backend.put_batch(part)
        if indexed and part[0]["n"] == 0:
            await backend.create_index("x", "scalar")
    for _ in range(2):
        for value in [*VALUES[kind], None]:
            found = await backend.lookup("x", value)
            expected = [row for row in rows if row["x"] == value]
            assert found == expected, f"{value!r}"
        await backend.flush()


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (5, np.int64(5)),
        (5, np.uint8(5)),
        (0.5, np.float32(0.5)),
        (0.5, np.float64(0.5)),
        (2.0, 2),
        (True, np.True_),
        ("a", np.str_("a")),
        (b"a", bytearray(b"a")),
        (Decimal("1.50"), Decimal("1.5")),
        (dt.datetime(2024, 1, 1), np.datetime64("2024-01-01T00:00:00")),
        (dt.datetime(2024, 1, 1, tzinfo=UTC), dt.datetime(2024, 1, 1, 9, tzinfo=EAST)),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
async def test_lookup_treats_equal_values_of_different_types_as_equal(
    persisting: Bucket, stored: Any, value: Any
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": 0, "x": None}, {"n": 1, "x": stored}])
    for _ in range(2):
        assert [row["n"] for row in await backend.lookup("x", value)] == [1]
        await backend.flush()


async def test_lookup_of_nan_works_or_is_refused(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": 0, "x": 1.0}, {"n": 1, "x": math.nan}])
    for _ in range(2):
        try:
            assert [row["n"] for row in await backend.lookup("x", math.nan)] == [1]
        except InvalidArgument as exc:
            assert "nan" in str(exc)  # noqa: PT017
        await backend.flush()


MISFITS: list[tuple[Any, Any]] = [
    ("int", "5"),
    ("int", 1.5),
    ("int", 2**70),
    ("int", True),
    ("bool", 1),
    ("str", 5),
    ("str", b"a"),
    ("str", "\ud800"),
    ("bytes", "a"),
    ("decimal", "1.5"),
    ("decimal", Decimal("1E+30")),
    ("decimal", Decimal("NaN")),
    ("uuid", "not a uuid"),
    ("datetime", "2024-01-01"),
    ("struct", {"a": 1}),
    ("list", [1]),
    ("vector", [0.5, 1.5]),
    ("str", object()),
    ("nope", 1),
    ("", 1),
    ("str`", 1),
    ("struct.a", 1),
    ("_persisting_time", 1),
    (None, 1),
    (5, 1),
]


async def test_lookup_of_a_value_of_the_wrong_type_raises(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    row = {name: values[0] for name, values in VALUES.items()}
    await backend.put({**row, "struct": {"a": 1}, "list": [1], "vector": [0.5, 1.5]})
    for _ in range(2):
        wrong = [(c, v, await complaint(backend.lookup(c, v), "")) for c, v in MISFITS]
        assert [one for one in wrong if one[2]] == []
        await backend.flush()


async def test_lookup_never_returns_a_neighbouring_value(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put(
        {
            "float": 2.0**53,
            "decimal": Decimal("1E-18"),
            "date": dt.date(2024, 1, 1),
            "datetime": dt.datetime(2024, 1, 1),
        }
    )
    near = {
        "float": 2**53 + 1,
        "decimal": Decimal("1.4E-18"),
        "date": dt.datetime(2024, 1, 1, 12),
        "datetime": dt.datetime(2024, 1, 1, 12, tzinfo=UTC),
    }
    for _ in range(2):
        for column, value in near.items():
            with contextlib.suppress(InvalidArgument):
                assert await backend.lookup(column, value) == [], column
        await backend.flush()


@pytest.mark.parametrize("indexed", [False, True], ids=["plain", "indexed"])
async def test_lookup_works_on_a_field_with_only_none(persisting: Bucket, indexed: bool) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": 0, "x": None}, {"n": 1, "x": None}])
    await backend.flush()
    assert [row["n"] for row in await backend.lookup("x", None)] == [0, 1]
    await backend.put_batch([{"n": 2, "x": 7}, {"n": 3, "x": None}])
    if indexed:
        await backend.create_index("x")
    for _ in range(2):
        assert [row["n"] for row in await backend.lookup("x", 7)] == [2]
        assert [row["n"] for row in await backend.lookup("x", None)] == [0, 1, 3]
        await backend.flush()


async def test_lookup_sees_a_type_that_the_buffer_widened(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": n, "x": n, "meta": {"a": n}} for n in range(5)])
    await backend.flush()
    await backend.put({"n": 5, "x": 1.5, "meta": {"a": 5, "b": "new"}, "y": "extra"})
    for _ in range(2):
        assert [row["n"] for row in await backend.lookup("x", 1.5)] == [5]
        assert [row["n"] for row in await backend.lookup("x", 1)] == [1]
        assert [row["n"] for row in await backend.query("x < 1.75")] == [0, 1, 5]
        assert [row["n"] for row in await backend.query("meta.b = 'new'")] == [5]
        assert [row["n"] for row in await backend.query("meta.b IS NULL")] == [0, 1, 2, 3, 4]
        assert [row["n"] for row in await backend.lookup("y", "extra")] == [5]
        assert [row["n"] for row in await backend.lookup("y", None)] == [0, 1, 2, 3, 4]
        await backend.flush()


# Conditions


def people() -> list[dict[str, Any]]:
    return [
        {
            "id": n,
            "Name": f"N{n}",
            "a b": n % 3,
            "ünï": n % 2,
            "we'ird;": -n,
            "select": n,
            "note": None if n % 4 == 0 else f"it's {n}%",
            "ok": n % 2 == 0,
            "score": n / 4,
            "meta": {"source": "xyz"[n % 3], "Deep": {"level": n % 5}},
            "day": dt.date(2024, 1, 1) + dt.timedelta(days=n),
            "at": dt.datetime(2024, 1, 1, tzinfo=UTC) + dt.timedelta(hours=n),
            "tags": ["even" if n % 2 == 0 else "odd"],
        }
        for n in range(20)
    ]


CONDITIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "id = 3": lambda r: r["id"] == 3,
    "id <> 3": lambda r: r["id"] != 3,
    "id >= 5 AND id < 8": lambda r: 5 <= r["id"] < 8,
    "id BETWEEN 5 AND 8": lambda r: 5 <= r["id"] <= 8,
    "id = 1 OR id = 2 AND ok": lambda r: r["id"] in (1, 2),
    "(id = 1 OR id = 2) AND ok": lambda r: r["id"] == 2,
    "NOT (id < 15)": lambda r: r["id"] >= 15,
    "id IN (1, 5, 99)": lambda r: r["id"] in (1, 5),
    "id NOT IN (1, 5)": lambda r: r["id"] not in (1, 5),
    "id + 1 = 3": lambda r: r["id"] == 2,
    "id % 7 = 0": lambda r: r["id"] % 7 == 0,
    "-id = -4": lambda r: r["id"] == 4,
    "note IS NULL": lambda r: r["note"] is None,
    "note IS NOT NULL": lambda r: r["note"] is not None,
    "note LIKE '%7%'": lambda r: r["note"] is not None and "7" in r["note"],
    "note NOT LIKE '%7%'": lambda r: r["note"] is not None and "7" not in r["note"],
    "note = 'it''s 3%'": lambda r: r["note"] == "it's 3%",
    "ok": lambda r: r["ok"],
    "NOT ok": lambda r: not r["ok"],
    "ok = true": lambda r: r["ok"],
    "score > 0.25": lambda r: r["score"] > 0.25,
    "score > 1": lambda r: r["score"] > 1,
    "Name = 'N3'": lambda r: r["Name"] == "N3",
    "`Name` = 'N3'": lambda r: r["Name"] == "N3",
    "`a b` = 2": lambda r: r["a b"] == 2,
    "`ünï` = 1": lambda r: r["ünï"] == 1,
    "`we'ird;` = -3": lambda r: r["id"] == 3,
    "`select` = 3": lambda r: r["id"] == 3,
    "meta.source = 'x'": lambda r: r["meta"]["source"] == "x",
    "`meta`.`source` = 'x'": lambda r: r["meta"]["source"] == "x",
    "meta.Deep.level = 4": lambda r: r["meta"]["Deep"]["level"] == 4,
    "`meta`.`Deep`.`level` IN (0, 4)": lambda r: r["meta"]["Deep"]["level"] in (0, 4),
    "day > date '2024-01-10'": lambda r: r["id"] > 9,
    "at < timestamp '2024-01-01 05:00:00'": lambda r: r["id"] < 5,
    "length(note) > 6": lambda r: r["note"] is not None and len(r["note"]) > 6,
    "array_has(tags, 'odd')": lambda r: not r["ok"],
    "lower(Name) = 'n11'": lambda r: r["id"] == 11,
    "true": lambda r: True,
    "1 = 0": lambda r: False,
    "id = 3 -- a comment": lambda r: r["id"] == 3,
    "id = 1\n OR id = 2": lambda r: r["id"] in (1, 2),
    "_persisting_time IS NOT NULL": lambda r: True,
    "_persisting_time > timestamp '2020-01-01'": lambda r: True,
    "_persisting_time < timestamp '2020-01-01'": lambda r: False,
    " OR ".join(["id = 3"] * 300): lambda r: r["id"] == 3,
}


@pytest.mark.parametrize("place", ["buffer", "table", "both", "indexed"])
async def test_query_returns_matching_records_in_order(persisting: Bucket, place: str) -> None:
    rows = people()
    backend = persisting.open(**QUIET)
    first = 12 if place in ("both", "indexed") else 20
    await backend.put_batch(rows[:first])
    if place != "buffer":
        await backend.flush()
    if place == "indexed":
        for column in ("id", "Name", "a b", "score", "day", "at"):
            await backend.create_index(column, "scalar")
        await backend.create_index("ok", "bitmap")
    await backend.put_batch(rows[first:])
    for where, keeps in CONDITIONS.items():
        expected = [row for row in rows if keeps(row)]
        assert await backend.query(where) == expected, where
        limited = await backend.query(where, limit=3, columns=["id"])
        assert limited == [{"id": row["id"]} for row in expected[:3]], where


async def test_condition_treats_none_inside_dicts_as_null(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    rows: list[dict[str, Any]] = [
        {"n": 0, "meta": {"a": "x", "b": {"c": 1}}, "empty": {}, "items": [{"a": 1}]},
        {"n": 1, "meta": None, "empty": None, "items": None},
        {"n": 2, "meta": {"a": None, "b": None}, "empty": {}, "items": []},
        {"n": 3, "meta": {"a": "y", "b": {"c": None}}, "empty": None, "items": [None]},
    ]
    await backend.put_batch(rows)
    for _ in range(2):
        for where, expected in {
            "meta IS NULL": [1],
            "meta.a IS NULL": [1, 2],
            "meta.a = 'x'": [0],
            "meta.a <> 'x'": [3],
            "meta.b IS NULL": [1, 2],
            "meta.b.c IS NULL": [1, 2, 3],
            "empty IS NULL": [1, 3],
            "items IS NULL": [1],
            "cardinality(items) = 1": [0, 3],
        }.items():
            assert [row["n"] for row in await backend.query(where)] == expected, where
        assert [row["n"] for row in await backend.lookup("meta", None)] == [1]
        await backend.flush()


async def test_condition_on_arrival_time_separates_old_from_new_records(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"n": 0})
    await backend.flush()
    await asyncio.sleep(0.002)
    between = dt.datetime.now(UTC).replace(tzinfo=None)
    await asyncio.sleep(0.002)
    await backend.put({"n": 1})
    for _ in range(2):
        old = await backend.query(f"_persisting_time < timestamp '{between.isoformat(' ')}'")
        new = await backend.query(f"_persisting_time > timestamp '{between.isoformat(' ')}'")
        assert (old, new) == ([{"n": 0}], [{"n": 1}])
        await backend.flush()


async def test_fields_that_differ_only_in_case_are_distinct_in_conditions(
    persisting: Bucket,
) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"a": n, "A": -n} for n in range(1, 4)])
    for _ in range(2):
        assert await backend.query("`a` = 2") == await backend.query("`A` = -2")
        assert await backend.query("`a` = -2") == []
        assert await backend.lookup("A", -2) == [{"a": 2, "A": -2}]
        await backend.flush()


WRONG_CONDITIONS: list[tuple[Any, str]] = [
    ("", "where"),
    ("  \n", "where"),
    (5, "where"),
    (b"id = 1", "where"),
    (["id = 1"], "where"),
    ("id =", "id ="),
    ("id = 1)", r"id = 1\)"),
    ("(id = 1", r"\(id = 1"),
    ("id = 1) OR (1 = 1", "id = 1"),
    ("id = 1;", "id = 1;"),
    ("id = 1; DROP TABLE t", "DROP"),
    ("SELECT 1", "SELECT 1"),
    ("id = (SELECT 1)", "SELECT"),
    ("id", "id"),
    ("1", "1"),
    ("NULL", "NULL"),
    ("nope = 1", "'nope'.*did you mean 'note'"),
    ("xyz = 1", "'xyz'.*the fields are: 'id'"),
    ("`no such` = 1", "no such"),
    ("nope.deep = 1", "'nope'"),
    ("meta.nope = 1", "nope"),
    ("id = 'x'", "'x'"),
    ("note = 5", "5"),
    ("tags = 5", "5"),
    ("meta = 5", "5"),
    ("id = 99999999999999999999", "99999999999999999999"),
    ("id = 1 / 0", "1 / 0"),
    ("CAST(note AS INT) = 1", "CAST"),
    ("bloop(id) = 1", "bloop"),
    ("count(id) > 1", "count"),
    ("row_number() OVER () = 1", "row_number"),
    ("id = ?", r"\?"),
    ("id = $1", r"\$1"),
    ("id = :name", ":name"),
    ("note = N'x'", "N'x'"),
    ("note = B'01'", "B'01'"),
    ("CAST(id AS DECIMAL(99, 1)) = 1", "DECIMAL"),
    ("array_repeat(1, 9223372036854775807) IS NULL", "array_repeat"),
    ("note = 'open", "open"),
    ("`open = 1", "open"),
    ("note LIKE '%' ESCAPE 'ab'", "ESCAPE"),
    ("regexp_like(note, '(')", "regexp_like"),
    ("\x00", "where"),
    ("note = '\ud800'", "where"),
    ("(" * 5000 + "1 = 1" + ")" * 5000, "where"),
    ("id IN ()", r"IN \(\)"),
    ("id = 1 LIMIT 1", "LIMIT"),
    ("_rowid < 3", "_rowid"),
    ("_rowaddr < 3", "_rowaddr"),
    ("_distance < 3", "_distance"),
]


async def test_invalid_condition_raises_and_is_quoted(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    rows = people()
    await backend.put_batch(rows[:10])
    await backend.flush()
    await backend.put_batch(rows[10:])
    wrong = [(w, await complaint(backend.query(w), m)) for w, m in WRONG_CONDITIONS]
    assert [one for one in wrong if one[1]] == []
    assert len(await backend.query("id >= 0")) == 20


@pytest.mark.parametrize(
    "where",
    [
        None,
        "id >= 15",
        "array_has(tags, 'odd')",
        "note IS NULL",
        "`a b` = 1 AND later IS NULL",
        "id / 2 > 4.5",
        "meta.source = 'x' OR later = 7",
        "id < 0",
    ],
)
async def test_count_equals_the_number_of_records_that_a_query_returns(
    persisting: Bucket, where: str | None
) -> None:
    backend = persisting.open(**QUIET)
    rows = people()
    await backend.put_batch(rows[:10])
    await backend.flush()
    await backend.put_batch([*rows[10:], {**rows[0], "id": 2.5, "later": 7}])
    assert await backend.count(where) == len(await backend.query(where))
    await backend.flush()
    assert await backend.count(where) == len(await backend.query(where))


_TOKENS = (
    "id Name `Name` `a_b` `a note ok score meta meta.source meta.Deep.level tags day nope . , ; (",
    ") () = <> < >= + - * / % || AND OR NOT IN IS NULL LIKE ILIKE BETWEEN CASE WHEN THEN ELSE END",
    "CAST AS INT STRING DOUBLE DATE TIMESTAMP true false 0 1 -1 1.5 1e400 99999999999999999999 ''",
    "'x' 'it''s' \" \"id\" ? $1 :x @ # ~ ! ^ & | [ ] [0] { } -- /* */ SELECT FROM WHERE LIMIT ANY",
    "EXISTS ALL array_has length lower date '2024-01-01' timestamp interval X'00' x'zz' E'\\n' ::",
    "N'x' => -> struct named_struct _rowid _rowaddr _persisting_time _distance \\ ü 😀 \t",
)
WORDS = st.sampled_from(
    [word.replace("_b`", " b`") for line in _TOKENS for word in line.split(" ")]
)
FUZZED = st.one_of(
    st.lists(WORDS, min_size=1, max_size=8).map(" ".join),
    st.lists(WORDS, min_size=1, max_size=5).map("".join),
    st.text(max_size=20),
)
NAMES = st.one_of(
    st.sampled_from(["id", "Name", "a b", "meta", "meta.source", "nope", "`id`", "*", "_rowid"]),
    st.text(max_size=10),
    st.none(),
    st.integers(),
)
Step = tuple[str, tuple[Any, ...], dict[str, Any]]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("query"), st.tuples(FUZZED), st.just({})),
    st.tuples(
        st.just("lookup"), st.tuples(NAMES, st.one_of(st.text(), st.integers())), st.just({})
    ),
    st.tuples(
        st.just("query"),
        st.just(("id < 2",)),
        st.fixed_dictionaries({"columns": st.lists(NAMES, max_size=3)}),
    ),
    st.tuples(
        st.just("search"),
        st.just(()),
        st.fixed_dictionaries({"text": st.text(max_size=8), "where": FUZZED, "column": NAMES}),
    ),
)


async def outcome(backend: Any, step: Step) -> Any:
    name, args, words = step
    try:
        found = await getattr(backend, name)(*args, **words)
    except InvalidArgument:
        return "refused"
    return [{n: v for n, v in row.items() if n != "_score"} for row in found]


async def fill(backend: Any, place: str) -> None:
    rows = people()[:6]
    first = 3 if place == "both" else 6
    await backend.put_batch(rows[:first])
    if place != "buffer":
        await backend.flush()
    await backend.put_batch(rows[first:])


def fuzzing(examples: int) -> Any:
    def check(tmp_path: Path) -> None:
        """Assert the same answer or error from the buffer, from the table and from both."""
        loop = asyncio.new_event_loop()
        buckets = {p: Bucket(PERSISTING, tmp_path / p) for p in ("buffer", "table", "both")}
        backends = [bucket.open(**QUIET) for bucket in buckets.values()]
        for place, backend in zip(buckets, backends, strict=True):
            loop.run_until_complete(fill(backend, place))

        @settings(max_examples=examples, derandomize=examples < 1000, deadline=None, database=None)
        @given(step=STEPS)
        def compare(step: Step) -> None:
            outcomes = [loop.run_until_complete(outcome(one, step)) for one in backends]
            assert outcomes[0] == outcomes[1] == outcomes[2]

        try:
            compare()
        finally:
            for bucket in buckets.values():
                loop.run_until_complete(bucket.close())
            loop.close()

    return check


test_any_condition_or_name_is_answered_or_refused = fuzzing(300)
test_any_condition_or_name_is_answered_or_refused_at_length = pytest.mark.timeout(1200)(
    pytest.mark.nightly(fuzzing(20_000))
)


# Limits, columns, offsets


@pytest.mark.parametrize("index", [None, "scalar", "bitmap"])
async def test_query_limit_returns_the_first_rows_by_offset(
    persisting: Bucket, index: str | None
) -> None:
    rows = [{"n": n, "k": (n * 7919) % 5} for n in range(3000)]
    backend = persisting.open(**QUIET)
    for start in range(0, 2500, 500):
        await backend.put_batch(rows[start : start + 500])
        await backend.flush()
    if index:
        await backend.create_index("k", index)
    await backend.put_batch(rows[2500:2750])
    await backend.flush()
    await backend.put_batch(rows[2750:])
    for where, keeps in {
        "k = 3": lambda r: r["k"] == 3,
        "k IN (4, 0)": lambda r: r["k"] in (0, 4),
        "k >= 2 OR n < 5": lambda r: r["k"] >= 2 or r["n"] < 5,
    }.items():
        expected = [row for row in rows if keeps(row)]
        for limit in (0, 1, 10, 501, 2999, 5000, None):
            found = await backend.query(where, limit=limit)
            assert found == expected[:limit], (where, limit)
    assert await backend.lookup("k", 3) == [row for row in rows if row["k"] == 3]
    assert await backend.query(limit=7) == rows[:7]
    assert await backend.query() == rows


@pytest.mark.parametrize("limit", [-1, 1.5, True, "3"])
async def test_query_limit_must_be_a_whole_number(persisting: Bucket, limit: Any) -> None:
    backend = persisting.open(**QUIET)
    await backend.put({"n": 1})
    with pytest.raises(InvalidArgument, match="limit"):
        await backend.query("n = 1", limit=limit)


async def test_query_returns_columns_in_the_requested_order(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(people()[:10])
    await backend.flush()
    await backend.put_batch(people()[10:])
    wanted = ["ok", "id", "meta"]
    expected = [{name: row[name] for name in wanted} for row in people()]
    found = await backend.query("id >= 0", columns=wanted)
    assert found == expected
    assert [list(row) for row in found] == [wanted] * 20
    taken = await backend.take([3, 15], columns=wanted)
    assert taken == [expected[3], expected[15]]
    assert [list(row) for row in taken] == [wanted] * 2
    assert [list(row) for row in await backend.lookup("id", 15, columns=wanted)] == [wanted]
    assert await backend.query("id < 2", columns=[]) == [{}, {}]


@pytest.mark.parametrize(
    "columns", [["nope"], "id", [5], [None], 5, ["id", "nope"], ["meta.source"]]
)
async def test_unknown_columns_raise(persisting: Bucket, columns: Any) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch(people()[:2])
    for _ in range(2):
        for read in (
            lambda: backend.query("id = 1", columns=columns),
            lambda: backend.take([0], columns=columns),
            lambda: backend.lookup("id", 1, columns=columns),
        ):
            with pytest.raises(InvalidArgument):
                await read()
        await backend.flush()


async def test_take_returns_records_in_the_order_of_offsets(persisting: Bucket) -> None:
    rows = [{"n": n, "text": f"t{n}"} for n in range(50)]
    backend = persisting.open(**QUIET)
    for start in (0, 10, 30):
        await backend.put_batch(rows[start : {0: 10, 10: 30, 30: 50}[start]])
        if start < 30:
            await backend.flush()
    luck = random.Random(3)
    for _ in range(20):
        offsets = [luck.randrange(50) for _ in range(luck.randrange(20))]
        assert await backend.take(offsets) == [rows[offset] for offset in offsets]
    assert await backend.take([7, 7, 45, 7, 45]) == [rows[i] for i in (7, 7, 45, 7, 45)]
    assert await backend.take(range(49, -1, -1)) == rows[::-1]
    assert await backend.take([]) == []


@pytest.mark.parametrize("offsets", [np.array([3, 1]), [np.int64(3), np.int32(1)], (3, 1)])
async def test_take_accepts_any_whole_numbers(persisting: Bucket, offsets: Any) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": n} for n in range(5)])
    assert await backend.take(offsets) == [{"n": 3}, {"n": 1}]


@pytest.mark.parametrize("offsets", [[-1], [1.0], [True], ["1"], [None], "01", 5, None])
async def test_take_refuses_invalid_offsets(persisting: Bucket, offsets: Any) -> None:
    backend = persisting.open(**QUIET)
    await backend.put_batch([{"n": n} for n in range(5)])
    with pytest.raises(InvalidArgument):
        await backend.take(offsets)


async def test_take_refuses_offsets_out_of_range(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    with pytest.raises(OffsetOutOfRange, match="nothing is stored"):
        await backend.take([0])
    for start in range(0, 60, 20):
        await backend.put_batch([{"n": n} for n in range(start, start + 20)])
        await backend.flush()
    await backend.put({"n": 60})
    for offset in (61, 2**40, 2**70):
        with pytest.raises(OffsetOutOfRange, match=f"no offset {offset}; there are 0 to 60"):
            await backend.take([5, offset])
    await backend.retain(rows=30)
    with pytest.raises(OffsetOutOfRange, match="no offset 19; there are 20 to 60"):
        await backend.take([60, 19])
    assert await backend.take([60, 20]) == [{"n": 60}, {"n": 20}]


async def test_retention_does_not_change_offsets_of_found_records(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET)
    for start in range(0, 100, 20):
        await backend.put_batch(
            [{"n": n, "k": n % 2, "v": [float(n), 0.0]} for n in range(start, start + 20)]
        )
        await backend.flush()
    await backend.create_index("n", "scalar")
    await backend.retain(rows=50)
    start = (await backend.stats())["start_offset"]
    assert start == 40
    assert await backend.lookup("n", 39) == []
    assert [row["n"] for row in await backend.query("k = 0", limit=3)] == [40, 42, 44]
    (hit,) = await backend.search(vector=[0.0, 0.0], k=1)
    assert (hit["n"], hit["_offset"]) == (40, 40)


async def test_conditions_see_field_defaults(persisting: Bucket) -> None:
    backend = persisting.open(**QUIET, schema_defaults={"age": 7})
    await backend.put({"n": 0})
    await backend.flush()
    await backend.put({"n": 1})
    await backend.put({"n": 2, "age": 8})
    for _ in range(2):
        rows = await backend.get()
        assert [row["age"] for row in rows] == [7, 7, 8]
        assert await backend.query("age = 7") == rows[:2]
        assert await backend.lookup("age", 8) == rows[2:]
        await backend.flush()


async def test_condition_divides_by_the_current_type_of_a_field(tmp_path: Path) -> None:
    bucket = Bucket(PERSISTING, tmp_path / "b")
    backend = bucket.open(flush_interval=None)
    await backend.put({"x": 5})
    await backend.flush()
    assert await backend.query("x / 2 = 2") == [{"x": 5}]
    await backend.put({"x": 0.5})
    for _ in range(2):
        assert await backend.query("x / 2 = 2.5") == [{"x": 5.0}]
        assert await backend.query("x / 2 < 1") == [{"x": 0.5}]
        await backend.flush()
    await bucket.close()
