"""Batch reads and writes, compared with Spark's own Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkbench.rows import COLUMNS, NUMBERS, PRUNED, Bench, append_to_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def reading(bench: Bench) -> None:
    bench.compare(
        "read",
        "sums of one column by another",
        lambda _: aggregated(bench.topic_rows(PRUNED)),
        lambda _: aggregated(bench.parquet_rows()),
        at_most=1.3,
    )
    bench.compare(
        "read",
        "sums of 2 of 6 columns",
        lambda _: summed(bench.topic_rows(NUMBERS)),
        lambda _: summed(bench.parquet_rows()),
        at_most=1.3,
    )
    bench.compare(
        "read",
        "aggregate, columns not named",
        lambda _: aggregated(bench.topic_rows()),
        lambda _: aggregated(bench.parquet_rows()),
    )
    bench.compare(
        "read",
        "all columns, into nothing",
        lambda _: into_nothing(bench.topic_rows()),
        lambda _: into_nothing(bench.parquet_rows()),
        at_most=2.5,
    )
    bench.compare(
        "read",
        "all columns, hash of every row",
        lambda _: hashed(bench.topic_rows()),
        lambda _: hashed(bench.parquet_rows()),
        at_most=2.5,
    )


def writing(bench: Bench) -> None:
    cached = bench.parquet_rows().cache()
    cached.count()
    for name, rows in (("cached rows", cached), ("rows of Parquet", bench.parquet_rows())):
        with bench.run.scratch() as folder:
            ours, theirs = str(folder / "topic"), str(folder / "beside.parquet")
            bench.compare(
                "write",
                f"append of {name}, {bench.buckets} buckets",
                lambda _, rows=rows, ours=ours: append_to_topic(bench, rows, ours),
                lambda _, rows=rows, theirs=theirs: append_to_parquet(rows, theirs),
                at_most=3.5,
            )
    cached.unpersist()


def aggregated(rows: DataFrame) -> list[tuple[str, int]]:
    by_kind = rows.groupBy("kind").sum("tokens")
    return sorted((str(row[0]), int(row[1])) for row in by_kind.collect())


def summed(rows: DataFrame) -> tuple[int, int]:
    found = rows.selectExpr("sum(value)", "cast(round(sum(score)) AS bigint)").collect()[0]
    return int(found[0]), int(found[1])


def hashed(rows: DataFrame) -> int:
    from pyspark.sql import functions

    return int(rows.select(functions.bit_xor(functions.xxhash64(*COLUMNS))).collect()[0][0])


def into_nothing(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def append_to_parquet(rows: DataFrame, path: str) -> None:
    rows.write.mode("append").parquet(path)
