"""Random SQL over two views with the same rows, and the rows that each returns."""

from __future__ import annotations

import datetime as dt
import random
import struct
import uuid
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.timezone.utc
_NEGATIVE_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
_TEXTS = ["", "a", "ab", "abc", "b'c", "50%_off", "Straße", "登录页面", "\U0010ffff", "z\\"]
_DOUBLES = [0.0, -0.0, 0.1, -1.5, 1e300, float("nan"), float("inf"), -float("inf"), _NEGATIVE_NAN]
_DAYS = [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2024, 2, 29), dt.date(9999, 12, 31)]
_TIMES = [dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(2024, 1, 1, 0, 0, 0, 1)]

COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False]),
    "i8": (pa.int8(), [-128, 0, 5, 127]),
    "i16": (pa.int16(), [-(2**15), 0, 7, 2**15 - 1]),
    "i32": (pa.int32(), [-(2**31), 0, 7, 2**31 - 1]),
    "i64": (pa.int64(), [-(2**63), -1, 0, 7, 2**63 - 1]),
    "u8": (pa.uint8(), [0, 7, 255]),
    "u16": (pa.uint16(), [0, 7, 2**16 - 1]),
    "u32": (pa.uint32(), [0, 7, 2**32 - 1]),
    "u64": (pa.uint64(), [0, 7, 2**64 - 1]),
    "f16": (pa.float16(), [np.float16(value) for value in (0.0, 0.1, -2.5)]),
    "f32": (pa.float32(), _DOUBLES[:4] + _DOUBLES[5:8]),
    "f64": (pa.float64(), _DOUBLES),
    "text": (pa.string(), _TEXTS),
    "bin": (pa.binary(), [b"", b"\x00\x01", b"x", b"\xff"]),
    "at": (pa.timestamp("us"), _TIMES),
    "at utc": (pa.timestamp("us", "UTC"), [time.replace(tzinfo=UTC) for time in _TIMES]),
    "day": (pa.date32(), _DAYS),
    "span": (pa.duration("us"), [dt.timedelta(0), dt.timedelta(days=-1, microseconds=1)]),
    "clock": (pa.time64("us"), [dt.time(0, 0), dt.time(1, 2, 3, 4), dt.time(23, 59, 59, 999999)]),
    "uid": (pa.uuid(), [uuid.UUID(int=5).bytes, uuid.UUID(int=2**127 + 1).bytes]),
    "money": (pa.decimal128(10, 2), [Decimal("0.00"), Decimal("-1.50"), Decimal("99.99")]),
    "price": (
        pa.decimal128(38, 18),
        [
            Decimal("0E-18"),
            Decimal("-1.500000000000000000"),
            Decimal("0.000000000000000001"),
            Decimal("99999999999999999999.999999999999999999"),
        ],
    ),
    "st": (
        pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.struct([("d", pa.float64())]))]),
        [
            {"a": 1, "b": "x", "c": {"d": 0.5}},
            {"a": None, "b": None, "c": None},
            {"a": 5, "b": "y", "c": {"d": None}},
            {"a": None, "b": "x", "c": {"d": float("nan")}},
        ],
    ),
    "list": (pa.list_(pa.int64()), [[1, 2], [], [None]]),
}
"""By field, its type and values; further rows are null."""

_LITERALS: dict[str, list[str]] = {
    "flag": ["true", "false"],
    "i8": ["-128Y", "5Y", "5", "300", "5.5"],
    "i16": ["7S", "0", "-40000"],
    "i32": ["7", "2147483647", "3000000000", "7.5D"],
    "i64": ["7L", "-9223372036854775808", "9223372036854775807", "0.5D", "'7'"],
    "u8": ["7S", "255S", "300", "-1"],
    "u16": ["7", "65535", "70000"],
    "u32": ["7L", "4294967295", "-1"],
    "u64": ["7", "18446744073709551615", "-1", "0.5"],
    "f16": ["0.1F", "0.0F", "0.1D"],
    "f32": ["0.1F", "0.0F", "-0.0F", "0.1D", "FLOAT('NaN')", "FLOAT('inf')"],
    "f64": ["0.1D", "0.0D", "-0.0D", "-1.5D", "DOUBLE('NaN')", "DOUBLE('-inf')", "1"],
    "text": ["''", "'a'", "'ab'", "'b\\'c'", "'登录页面'", "'50%_off'", "'z\\\\\\\\'"],
    "bin": ["X''", "X'0001'", "X'78'"],
    "at": [
        "TIMESTAMP_NTZ'2024-01-01 00:00:00.000001'",
        "TIMESTAMP_NTZ'1970-01-01'",
        "DATE'2024-01-01'",
    ],
    "at utc": ["TIMESTAMP'2024-01-01T00:00:00.000001Z'", "TIMESTAMP'1970-01-01T00:00:00Z'"],
    "day": ["DATE'2024-02-29'", "DATE'0001-01-01'", "DATE'1970-01-01'"],
    "span": ["INTERVAL '0' SECOND", "INTERVAL '-1 00:00:00.000001' DAY TO SECOND"],
    "clock": ["TIME'01:02:03.000004'", "TIME'00:00:00'"],
    "uid": ["'00000000-0000-0000-0000-000000000005'", "'nope'", "'0'"],
    "money": ["0.00BD", "-1.50BD", "99.99BD", "1.555BD", "1"],
    "price": ["0BD", "-1.5BD", "1E-18BD", "99999999999999999999.999999999999999999BD", "0.5D", "1"],
    "st.a": ["1L", "5L", "2.5D"],
    "st.b": ["'x'", "'y'"],
    "st.c.d": ["0.5D", "DOUBLE('NaN')"],
}

_WHOLE = ["id", "i8", "i16", "i32", "u8", "u16", "u32"]
_AGGREGATES = {
    "count(*)": ["id"],
    "count({})": ["id", *COLUMNS],
    "count(DISTINCT {})": ["text", "i8", "day"],
    "sum({})": [*_WHOLE, "money"],
    "round(sum({}), 3)": ["f16"],
    "avg({})": _WHOLE,
    "min({})": ["id", *(name for name in COLUMNS if name not in ("st", "list"))],
    "max({})": ["id", *(name for name in COLUMNS if name not in ("st", "list"))],
}
"""By function, the columns for which its result does not depend on the order of the rows."""

_PATTERNS = ["a%", "ab%", "%", "b\\'%", "登%", "50\\\\%%", "a_", "%c"]


def table(rows: int, seed: int = 1) -> pa.Table:
    """Return rows with every type; about a fifth of all values are null."""
    chance = random.Random(seed)
    columns: dict[str, pa.Array] = {"id": pa.array(range(rows), pa.int64())}
    for name, (dtype, values) in COLUMNS.items():
        chosen = [None if chance.random() < 0.2 else chance.choice(values) for _ in range(rows)]
        columns[name] = pa.array(chosen, dtype)
    return pa.table(columns)


def quoted(path: str) -> str:
    return ".".join(f"`{part}`" for part in path.split("."))


class Queries:
    """Makes random queries on a view ``{t}``, all with the columns ``q`` and ``row``."""

    def __init__(self, seed: int, columns: list[str] | None = None) -> None:
        self._chance = random.Random(seed)
        self._columns = columns or ["id", *COLUMNS, "st.a", "st.c.d"]

    def query(self, number: int) -> str:
        return self._chance.choice(
            [self._plain, self._plain, self._plain, self._grouped, self._joined, self._nested]
        )(number)

    def _plain(self, number: int) -> str:
        chosen = self._chance.sample(self._columns, self._chance.randint(1, 4))
        where = f"WHERE {self.condition('s')}" if self._chance.random() < 0.9 else ""
        return f"SELECT {number} AS q, {_row('s', chosen)} FROM {{t}} s {where}"

    def _grouped(self, number: int) -> str:
        """Groups, or the whole view as one group; without a condition the storage aggregates."""
        keys = ["flag", "text", "i8", "day", "u8", "i64", "uid", "f64", "money", "price"]
        by = [f"s.`{key}`" for key in self._chance.sample(keys, self._chance.choice([0, 1, 1, 2]))]
        values = [self._aggregate() for _ in range(self._chance.randint(1, 4))]
        listed = ", ".join(f"{value} AS c{n}" for n, value in enumerate([*by, *values]))
        where = f"WHERE {self.condition('s')}" if self._chance.random() < 0.4 else ""
        groups = f"GROUP BY {', '.join(by)}" if by else ""
        return (
            f"SELECT {number} AS q, CAST(struct({listed}) AS STRING) AS row "
            f"FROM {{t}} s {where} {groups}"
        )

    def _aggregate(self) -> str:
        function, names = self._chance.choice(list(_AGGREGATES.items()))
        return function.format(f"s.`{self._chance.choice(names)}`")

    def _joined(self, number: int) -> str:
        kind = self._chance.choice(["JOIN", "LEFT JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN"])
        chosen = self._chance.sample(self._columns, 2)
        right = f"(SELECT id, text FROM {{t}} s WHERE {self.condition('s')}) r"
        return (
            f"SELECT {number} AS q, {_row('l', chosen)} FROM {{t}} l {kind} {right} "
            f"ON l.id = r.id WHERE {self.condition('l')}"
        )

    def _nested(self, number: int) -> str:
        chosen = self._chance.sample(self._columns, 2)
        return (
            f"SELECT {number} AS q, {_row('s', chosen)} FROM {{t}} s WHERE s.id IN "
            f"(SELECT max(i.id) FROM {{t}} i WHERE {self.condition('i')} GROUP BY i.i8) "
            f"OR {self.condition('s')}"
        )

    def condition(self, alias: str, depth: int = 0) -> str:
        chance = self._chance.random()
        if depth < 3 and chance < 0.5:
            parts = [self.condition(alias, depth + 1) for _ in range(2)]
            return f"({self._chance.choice([' AND ', ' OR ']).join(parts)})"
        if depth < 3 and chance < 0.6:
            return f"(NOT {self.condition(alias, depth + 1)})"
        return self._test(alias)

    def _test(self, alias: str) -> str:
        path = self._chance.choice(list(_LITERALS))
        field = f"{alias}.{quoted(path)}"
        kind = self._chance.random()
        if kind < 0.15:
            whole = self._chance.choice([field, f"{alias}.`st`", f"{alias}.`list`"])
            return f"({whole} IS {self._chance.choice(['', 'NOT '])}NULL)"
        if kind < 0.3:
            values = self._chance.sample(_LITERALS[path], min(2, len(_LITERALS[path])))
            values += self._chance.choice([[], [], ["NULL"]])
            return f"({field} {self._chance.choice(['', 'NOT '])}IN ({', '.join(values)}))"
        if kind < 0.4:
            pattern = self._chance.choice(_PATTERNS)
            return f"({alias}.text LIKE '{pattern}')"
        if kind < 0.45 and path == "flag":
            return field
        op = self._chance.choice(["=", "<>", "<", "<=", ">", ">=", "<=>"])
        value = self._chance.choice([*_LITERALS[path], "NULL"])
        sides = [field, value] if self._chance.random() < 0.8 else [value, field]
        return f"({sides[0]} {op} {sides[1]})"


def _row(alias: str, paths: list[str]) -> str:
    values = ", ".join(f"{alias}.{quoted(path)} AS c{n}" for n, path in enumerate(paths))
    return f"CAST(struct({values}) AS STRING) AS row"


def answers(spark: SparkSession, queries: list[str], view: str) -> Counter[tuple[int, Any]]:
    """Run queries as one union; return how many times each row of each query occurs."""
    union = " UNION ALL ".join(f"({query.format(t=view)})" for query in queries)
    return Counter((row["q"], row["row"]) for row in spark.sql(union).collect())


def compare(
    spark: SparkSession, ours: str, theirs: str, seed: int, count: int, together: int = 10
) -> int:
    """Compare ``count`` random queries on two views, some together as one statement; return how
    many had rows."""
    made, found = Queries(seed), 0
    queries = [made.query(number) for number in range(count)]
    for first in range(0, count, together):
        some = queries[first : first + together]
        mine, other = answers(spark, some, ours), answers(spark, some, theirs)
        wrong = {q for q, _ in (mine - other) | (other - mine)}
        assert not wrong, "seed {}: {}".format(seed, "\n".join(queries[q] for q in sorted(wrong)))
        found += len({q for q, _ in mine})
    return found
