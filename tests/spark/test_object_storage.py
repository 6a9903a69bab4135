"""Spark with topics in an object store: a real session, and a real server on loopback.

Credentials are in the environment of Spark's processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.object_stores import (
    SECRET,
    SeaweedFS,
    environment_of,
    fresh_prefix,
    running_seaweedfs,
    url,
)
from support.spark.drivers import driver

from persisting.cli.exit_codes import USAGE
from persisting.errors import InvalidArgument
from persisting.queue import read_queue, write_queue
from persisting.spark import jobs, read_topic, session
from persisting.spark.source import PersistingSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture(scope="module")
def at_store(server: SeaweedFS, spark: SparkSession) -> Iterator[SparkSession]:
    """The session, with credentials in the environment of this process and of all others."""
    environment = environment_of(server.options())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # A worker gets the environment of its session when it starts, and a source when it is
        # registered.
        before = dict(spark.sparkContext.environment)
        spark.sparkContext.environment.update(environment)
        spark.dataSource.register(PersistingSource)
        yield spark
        spark.sparkContext.environment.clear()
        spark.sparkContext.environment.update(before)
        spark.dataSource.register(PersistingSource)


@pytest.fixture
def root(at_store: SparkSession) -> str:
    return url(fresh_prefix())


def numbers(spark: SparkSession, count: int, first: int = 0) -> DataFrame:
    df = spark.range(first, first + count, numPartitions=2)
    return df.selectExpr("id", "concat('row ', id) text")


def save(df: DataFrame, place: str, mode: str = "append", **options: Any) -> None:
    df.write.format("persisting").mode(mode).options(**options).save(place)


def ids(root: str, topic: str) -> list[int]:
    async def read() -> list[int]:
        async with await read_queue(topic=topic, storage_path=root) as reader:
            return sorted(record["id"] for record in await reader.get(limit=10_000))

    return asyncio.run(read())


def test_spark_writes_reads_and_streams_a_topic_as_in_a_folder(
    at_store: SparkSession, root: str, tmp_path: Path
) -> None:
    spark = at_store
    save(numbers(spark, 30), f"{root}/raw", numBuckets=2, writeId="first")
    save(numbers(spark, 30), f"{root}/raw", writeId="first")
    assert ids(root, "raw") == list(range(30))
    checkpoint = tmp_path / "progress"

    def run() -> int:
        done = jobs.incremental(
            spark,
            f"{root}/raw",
            f"{root}/even",
            lambda df: df.where("id % 2 = 0"),
            num_buckets=2,
            max_rows_per_batch=20,
            checkpoint=checkpoint,
            quiet=True,
        )
        return done.rows

    assert run() == 30
    assert run() == 0
    save(numbers(spark, 10, 30), f"{root}/raw")
    assert run() == 10
    assert ids(root, "even") == list(range(0, 40, 2))
    even = read_topic(spark, root, "even", includeMetadata=True)
    assert even.where("id >= 30").count() == 5
    assert even.select("_bucket").distinct().count() == 2


def test_secrets_are_in_no_plan_and_in_no_error(at_store: SparkSession, root: str) -> None:
    spark = at_store
    reader = spark.read.format("persisting").option("aws_secret_access_key", "do-not-show-this")
    with pytest.raises(Exception, match="are not options") as refused:
        reader.load(f"{root}/raw").count()
    assert "do-not-show-this" not in str(refused.value)
    save(numbers(spark, 2), f"{root}/raw", numBuckets=1)
    df = spark.read.format("persisting").load(f"{root}/raw")
    assert SECRET not in df._jdf.queryExecution().toString()

    with pytest.raises(Exception, match="'text'") as unfit:
        save(numbers(spark, 2).selectExpr("id", "array(id) text"), f"{root}/raw")
    assert SECRET not in str(unfit.value)


def test_spark_writes_and_reads_beside_a_queue_that_has_the_topic_open(
    at_store: SparkSession, root: str
) -> None:
    """Spark plans and commits in processes of its own, so owner and driver meet in the store."""
    spark, place = at_store, f"{root}/live"

    async def live() -> list[int]:
        options = {"lease": 1.0, "flush_interval": None}
        where: dict[str, Any] = {"topic": "live", "storage_path": root, "num_buckets": 2}
        async with await write_queue(**where, durable=True, backend_options=options) as writer:
            await writer.put([{"id": n, "text": f"row {n}"} for n in range(10)])
            before = read_topic(spark, root, "live").count()
            flushed = read_topic(spark, root, "live", flush=True).count()
            for _ in range(2):
                save(numbers(spark, 20, 10), place, writeId="beside")
            await writer.put({"id": 30, "text": "row 30"})
            return [before, flushed, read_topic(spark, root, "live", flush=True).count()]

    assert asyncio.run(live()) == [0, 10, 31]
    assert ids(root, "live") == list(range(31))


def test_jobs_work_on_the_store(at_store: SparkSession, root: str) -> None:
    spark, place = at_store, f"{root}/raw"
    for first in range(0, 40, 10):
        save(numbers(spark, 10, first), place, numBuckets=1)
    assert jobs.build_index(spark, place, column="id")["rows"] == 40
    done = jobs.compact(spark, place)
    assert (done["fragments_before"], done["fragments_after"], done["rows"]) == (8, 1, 40)
    assert ids(root, "raw") == list(range(40))
    parts = jobs.split_topic(spark, place, key="id", tag="v1", shares={"a": 0.5, "b": 0.5})
    save(numbers(spark, 10, 40), place)
    assert sum(part.count() for part in parts.values()) == 40


def test_topics_of_the_store_have_names_in_sql(at_store: SparkSession, root: str) -> None:
    save(numbers(at_store, 10), f"{root}/raw", numBuckets=2)
    spark = session(topics=root)

    def sql(statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in spark.sql(statement).collect()]

    assert sql("SELECT count(*), max(id) FROM persisting.raw WHERE id > 3") == [(6, 9)]
    with pytest.raises(Exception, match="there is no topic 'none' in s3://"):
        sql("SELECT * FROM persisting.none")
    sql("CREATE TABLE persisting.kept (id BIGINT, text STRING) TBLPROPERTIES ('numBuckets' = '1')")
    assert sql("SHOW TABLES IN persisting") == [("", "kept", False), ("", "raw", False)]
    sql("INSERT INTO persisting.kept SELECT * FROM persisting.raw WHERE id < 3")
    sql("ALTER TABLE persisting.kept ADD COLUMN score DOUBLE")
    assert sql("SELECT id, score FROM persisting.kept ORDER BY id") == [(n, None) for n in range(3)]
    with pytest.raises(Exception, match="remove only empty topics"):
        sql("DROP TABLE persisting.kept")
    sql("CREATE TABLE persisting.empty (id BIGINT)")
    sql("DROP TABLE persisting.empty")
    spark.conf.set("spark.sql.catalog.persisting.dropTable", "true")
    sql("DROP TABLE persisting.raw")
    spark.conf.unset("spark.sql.catalog.persisting.dropTable")
    assert sql("SHOW TABLES IN persisting") == [("", "kept", False)]
    assert ids(root, "kept") == [0, 1, 2]


@pytest.fixture
def pipeline(at_store: SparkSession, root: str, run_pipeline: Any) -> Any:
    """Run a pipeline command on the topics of the store."""
    return partial(run_pipeline, root)


def test_pipeline_commands_copy_topics_of_the_store(
    at_store: SparkSession,
    root: str,
    pipeline: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spark = at_store
    save(numbers(spark, 10).union(numbers(spark, 5)), f"{root}/raw", numBuckets=2)
    assert pipeline("dedupe", "raw", "once", "--key", "id") == 0
    assert ids(root, "once") == list(range(10))
    assert pipeline("dedupe", "raw", "once", "--key", "id") == USAGE
    assert "has records; pass --mode" in capsys.readouterr().err
    assert pipeline("dedupe", "once", f"{root}/once", "--key", "id") == USAGE
    assert "the same topic" in capsys.readouterr().err
    assert pipeline("run", "once", "copy") == USAGE
    assert "pass --checkpoint" in capsys.readouterr().err
    for _ in range(2):
        assert pipeline("run", "once", "copy", "--checkpoint", tmp_path / "progress") == 0
    assert ids(root, "copy") == list(range(10))


@pytest.mark.nightly
def test_every_pipeline_command_works_on_the_store(
    at_store: SparkSession,
    root: str,
    pipeline: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(numbers(at_store, 10), f"{root}/once", numBuckets=2)
    assert pipeline("export", "once", tmp_path / "out", "--where", "id < 4") == 0
    assert pipeline("ingest", "back", tmp_path / "out") == 0
    assert ids(root, "back") == list(range(4))
    assert f"{root}/back" in capsys.readouterr().out
    for words in (
        ["compact", "once"],
        ["index", "once", "--column", "id"],
        ["profile", "once"],
        ["near-duplicates", "once", "--column", "text"],
        ["split", "once", "--key", "id", "--tag", "v1"],
        ["sql", "SELECT id, text FROM persisting.once WHERE id > 7", "--to", "late"],
    ):
        assert pipeline(*words) == 0, words
    assert ids(root, "late") == [8, 9]
    assert pipeline("sql", "SELECT 1 AS id", "--to", "late") == USAGE
    assert "exists; name a new one" in capsys.readouterr().err


def test_incremental_job_in_a_store_requires_a_local_checkpoint(
    at_store: SparkSession, root: str
) -> None:
    spark = at_store
    save(numbers(spark, 2), f"{root}/raw", numBuckets=1)
    with pytest.raises(InvalidArgument, match="pass checkpoint="):
        jobs.incremental(spark, f"{root}/raw", f"{root}/copy")
    with pytest.raises(InvalidArgument, match="a folder of the driver's machine"):
        jobs.incremental(spark, f"{root}/raw", f"{root}/copy", checkpoint=f"{root}/progress")


STREAM = """
import sys
from persisting.spark import jobs, session

folder, root = sys.argv[1:]
spark = session(master="local[2]", conf={"spark.sql.shuffle.partitions": 2})
jobs.incremental(
    spark, root + "/raw", root + "/out", max_rows_per_batch=40, num_buckets=2,
    checkpoint=folder + "/progress", quiet=True,
)
print("done", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", ["written", "commit0", "commit1"])
def test_stream_whose_driver_is_killed_stores_every_row_once(
    server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    environment = environment_of(server.options())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    root = url(fresh_prefix())

    async def put() -> None:
        where: dict[str, Any] = {"topic": "raw", "storage_path": root, "num_buckets": 2}
        async with await write_queue(**where, durable=True) as writer:
            await writer.put([{"id": n, "text": f"row {n}"} for n in range(100)])

    asyncio.run(put())
    with driver(tmp_path, STREAM, root, hold=step, **environment) as killed:
        killed.until_held(step)
    with driver(tmp_path, STREAM, root, **environment) as again:
        again.finish()
    assert ids(root, "out") == list(range(100))
