"""Topics by their names in SQL: the catalog ``persisting``."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.spark.topics import ids, put, rows, stored, writer

from persisting.spark import jobs, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    with writer(folder, "steps") as queue:
        queue.put_batch(rows(20))
        queue.flush()
        queue.tag("twenty")
        queue.put_batch(rows(5, 20))
    (folder / "not a topic").mkdir()
    return folder


@pytest.fixture(scope="module")
def named(spark: SparkSession, home: Path) -> SparkSession:
    return session(topics=home)


def found(spark: SparkSession, statement: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in spark.sql(statement).collect()]


def test_topics_of_the_folder_are_listed_and_described(named: SparkSession) -> None:
    assert ("", "steps", False) in found(named, "SHOW TABLES IN persisting")
    assert "not a topic" not in str(found(named, "SHOW TABLES IN persisting"))
    described = [row[:2] for row in found(named, "DESCRIBE persisting.steps")]
    assert described[:2] == [("id", "bigint"), ("text", "string")]


def test_query_by_name_is_pruned_and_sees_new_rows(named: SparkSession, home: Path) -> None:
    query = named.sql("SELECT id FROM persisting.steps WHERE score > 5")
    assert "RelationV2[id#" in query._jdf.queryExecution().optimizedPlan().treeString()
    assert "text#" not in query._jdf.queryExecution().optimizedPlan().treeString()
    assert query.count() == 4
    put(home, rows(3), "grown")
    assert found(named, "SELECT count(*) FROM persisting.grown") == [(3,)]
    put(home, rows(2, 3), "grown")
    assert found(named, "SELECT count(*) FROM persisting.grown") == [(5,)]


def test_metadata_columns_are_selected_by_name(named: SparkSession) -> None:
    (row,) = named.sql(
        "SELECT id, _bucket, _offset, _time FROM persisting.steps WHERE id = 7"
    ).collect()
    assert (row["id"], row["_bucket"] in (0, 1), row["_offset"] >= 0) == (7, True, True)
    assert isinstance(row["_time"], dt.datetime)
    assert named.table("persisting.steps").columns == ["id", "text", "score", "even"]


def test_older_versions_are_read_by_tag_and_time(named: SparkSession, home: Path) -> None:
    count = "SELECT count(*) FROM persisting.steps"
    assert found(named, f"{count} VERSION AS OF 'twenty'") == [(20,)]
    now = dt.datetime.now(dt.timezone.utc).isoformat()
    assert found(named, f"{count} TIMESTAMP AS OF TIMESTAMP'{now}'") == [(25,)]


def test_tables_are_created_filled_and_replaced(named: SparkSession, home: Path) -> None:
    named.sql(
        "CREATE TABLE persisting.made (key BIGINT, name STRING) "
        "TBLPROPERTIES ('numBuckets' = '3', 'bucketColumn' = 'key')"
    )
    named.sql("INSERT INTO persisting.made VALUES (1, 'a'), (2, 'b')")
    assert sorted(found(named, "SELECT * FROM persisting.made")) == [(1, "a"), (2, "b")]
    assert len(list((home / "made").glob("bucket_*"))) == 3
    named.sql("INSERT OVERWRITE persisting.made VALUES (3, 'c')")
    assert stored(home, "made") == [{"key": 3, "name": "c"}]
    named.sql(
        "CREATE TABLE persisting.copy AS "
        "SELECT id, upper(text) AS text FROM persisting.steps WHERE even"
    )
    assert ids(home, "copy") == list(range(0, 25, 2))


def test_failed_create_as_select_leaves_no_topic(named: SparkSession, home: Path) -> None:
    with pytest.raises(Exception, match="no luck"):
        named.sql(
            "CREATE TABLE persisting.bad AS "
            "SELECT id, raise_error('no luck') AS x FROM persisting.steps"
        )
    assert not (home / "bad").exists()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("SELECT * FROM persisting.nothing", "there is no topic 'nothing' in .*SHOW TABLES"),
        ("DROP TABLE persisting.steps", "removes only empty topics"),
        ("ALTER TABLE persisting.steps ADD COLUMN x INT", "fields of a topic follow the rows"),
        ("CREATE TABLE persisting.p (id INT, d INT) PARTITIONED BY (d)", "not partitioned"),
        ("CREATE TABLE persisting.steps (id INT)", "already exists"),
        ("DELETE FROM persisting.steps WHERE id = 1", "does not support"),
    ],
)
def test_statements_that_topics_do_not_support_are_refused(
    named: SparkSession, home: Path, statement: str, words: str
) -> None:
    with pytest.raises(Exception, match=words):
        named.sql(statement).collect()
    assert len(ids(home, "steps")) == 25


def test_stream_by_name_reads_every_row(named: SparkSession, tmp_path: Path) -> None:
    query = (
        named.readStream.table("persisting.steps")
        .select("id")
        .writeStream.format("memory")
        .queryName("named_stream")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    jobs.watch(query)
    assert named.table("named_stream").count() == 25
