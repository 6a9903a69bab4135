"""Batch reads and writes, compared with Spark's own Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkbench.rows import COLUMNS, VALUE_OF_A_ROW, Bench, append_to_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def reading(bench: Bench) -> None:
    """Nothing is named by hand: Spark finds out which columns and rows a query needs."""
    from persisting.spark import jobs

    for column in ("id", "value"):
        jobs.build_index(bench.spark, bench.topic, column=column, kind="scalar")
    for name, query, at_most in (
        ("sums of one column by another", aggregated, 1.3),
        ("sums of 2 of 6 columns", summed, 1.3),
        ("count of all rows", counted, None),
        ("condition that keeps 0.1 %", selected, 1.0),
        ("one key by index, keys in order", found_by_key, 0.2),
        ("one key by index, keys in no order", found_by_value, 0.2),
        ("all columns, into nothing", into_nothing, 1.5),
        ("all columns, hash of every row", hashed, 1.5),
    ):
        bench.compare(
            "read",
            name,
            lambda _, query=query: query(bench.topic_rows()),
            lambda _, query=query: query(bench.parquet_rows()),
            at_most=at_most,
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


def counted(rows: DataFrame) -> int:
    return int(rows.count())


def selected(rows: DataFrame) -> list[tuple[str, int]]:
    return aggregated(rows.where("score < 0.001"))


def found_by_key(rows: DataFrame) -> list[tuple[int, str]]:
    key = rows.where("id = 'record-000000417'").select("value", "text")
    return [(int(row[0]), str(row[1])) for row in key.collect()]


def found_by_value(rows: DataFrame) -> list[tuple[str, str]]:
    """Parquet's statistics help only where the keys of each file are in a range of their own."""
    key = rows.where(f"value = {VALUE_OF_A_ROW}").select("id", "text")
    return sorted((str(row[0]), str(row[1])) for row in key.collect())


def hashed(rows: DataFrame) -> int:
    from pyspark.sql import functions

    return int(rows.select(functions.bit_xor(functions.xxhash64(*COLUMNS))).collect()[0][0])


def into_nothing(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def append_to_parquet(rows: DataFrame, path: str) -> None:
    rows.write.mode("append").parquet(path)
