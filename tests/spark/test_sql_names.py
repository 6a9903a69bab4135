"""Topics by their names in SQL: the catalog ``persisting``."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.spark.pruning import catalog_of
from support.spark.topics import ids, put, rows, stored, writer

from persisting.cli.exit_codes import USAGE
from persisting.spark import jobs, session
from persisting.topic.topic_files import open_stored

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


def test_older_versions_are_read_by_tag(named: SparkSession) -> None:
    count = "SELECT count(*) FROM persisting.steps"
    assert found(named, count) == [(25,)]
    assert found(named, f"{count} VERSION AS OF 'twenty'") == [(20,)]


def test_older_rows_are_read_by_a_time_between_two_flushes(named: SparkSession, home: Path) -> None:
    put(home, rows(3), "dated")
    between = dt.datetime.now(dt.timezone.utc).isoformat()
    put(home, rows(2, 3), "dated")
    after = dt.datetime.now(dt.timezone.utc).isoformat()
    query = "SELECT id FROM persisting.dated TIMESTAMP AS OF"
    for moment, count in ((between, 3), (after, 5)):
        for written in (f"TIMESTAMP'{moment}'", f"'{moment}'"):
            assert sorted(found(named, f"{query} {written}")) == [(n,) for n in range(count)]


def test_number_is_a_version_of_a_topic_with_one_bucket(named: SparkSession, home: Path) -> None:
    with writer(home, "numbered", buckets=1) as queue:
        queue.put_batch(rows(4))
        queue.flush()
        first = queue.versions()[-1]["version"]
        queue.put_batch(rows(3, 4))
    count = "SELECT count(*) FROM persisting.numbered"
    assert found(named, count) == [(7,)]
    for written in (first, f"'{first}'"):
        assert found(named, f"{count} VERSION AS OF {written}") == [(4,)]
    with pytest.raises(Exception, match="version=1: the topic has 2 buckets"):
        named.sql("SELECT count(*) FROM persisting.steps VERSION AS OF 1")


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
    named.sql("INSERT OVERWRITE persisting.copy SELECT * FROM persisting.copy WHERE false")
    assert ids(home, "copy") == []
    named.sql("CREATE TABLE persisting.empty AS SELECT * FROM persisting.steps WHERE false")
    assert named.table("persisting.empty").columns == ["id", "text", "score", "even"]
    assert found(named, "SELECT count(*) FROM persisting.empty") == [(0,)]


def test_compression_and_vectors_are_properties_of_a_new_table(
    named: SparkSession, home: Path
) -> None:
    named.sql(
        "CREATE TABLE persisting.packed (id BIGINT, v ARRAY<FLOAT>, w ARRAY<FLOAT>) "
        "TBLPROPERTIES ('numBuckets' = '1', 'compression' = 'zstd', 'vectors' = 'v:2')"
    )
    packed = "array(CAST(0.5 AS FLOAT), CAST(1.5 AS FLOAT)), array(CAST(2.5 AS FLOAT))"
    named.sql(f"INSERT INTO persisting.packed SELECT 1L, {packed}")
    assert found(named, "SELECT * FROM persisting.packed") == [(1, [0.5, 1.5], [2.5])]
    with writer(home, "packed") as queue:
        assert queue.stats()["buckets"][0]["compression"] == "zstd"
        queue.put({"id": 2, "v": [0.0, 1.0], "w": [0.5, 1.5]})
        assert [row["id"] for row in queue.search(vector=[0.5, 1.25], k=1)] == [1]
    assert ids(home, "packed") == [1, 2]
    types = open_stored(home / "packed").schema()
    assert types.field("v").type == pa.list_(pa.float32(), 2)
    assert pa.types.is_list(types.field("w").type)


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
        ("DROP TABLE persisting.steps", "remove only empty topics .*catalog.persisting.dropTable"),
        (
            "CREATE OR REPLACE TABLE persisting.steps AS SELECT 1L AS id",
            "INSERT OVERWRITE replaces",
        ),
        ("SELECT * FROM persisting.steps VERSION AS OF 'none'", "^persisting.errors.*'none'"),
        ("ALTER TABLE persisting.steps ADD COLUMN x INT FIRST", "can only add columns"),
        ("ALTER TABLE persisting.steps DROP COLUMN text", "can only add columns"),
        ("ALTER TABLE persisting.steps RENAME COLUMN text TO words", "can only add columns"),
        ("ALTER TABLE persisting.steps SET TBLPROPERTIES ('a' = 'b')", "can only add columns"),
        ("ALTER TABLE persisting.steps RENAME TO persisting.walk", "CREATE TABLE AS SELECT"),
        ("CREATE TABLE persisting.p (id INT) TBLPROPERTIES ('numBucket' = '2')", "'numBucket'"),
        ("CREATE TABLE persisting.p (id INT) USING parquet", r"'provider' \(parquet\)"),
        ("CREATE TABLE persisting.p (id INT) LOCATION '/tmp/p'", "'location'"),
        ("CREATE TABLE persisting.p (id INT) COMMENT 'words'", "'comment'"),
        ("CREATE TABLE persisting.p LIKE persisting.steps", "does not support CREATE TABLE LIKE"),
        ("CREATE VIEW persisting.v AS SELECT 1 AS id", "does not support views"),
        ("CREATE NAMESPACE persisting.n", "does not support namespaces"),
        ("TRUNCATE TABLE persisting.steps", "does not support truncates"),
        (
            "INSERT INTO persisting.steps REPLACE WHERE id = 1 SELECT * FROM persisting.steps",
            "does not support overwrite by filter",
        ),
        ("ANALYZE TABLE persisting.steps COMPUTE STATISTICS", "NOT_SUPPORTED_COMMAND_FOR_V2_TABLE"),
        (
            "MERGE INTO persisting.steps t USING (SELECT 1L AS id) s ON t.id = s.id "
            "WHEN MATCHED THEN DELETE",
            "does not support MERGE INTO",
        ),
        ("UPDATE persisting.steps SET text = ''", "does not support UPDATE"),
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
    assert not (home / "p").exists()


def test_columns_are_added_even_while_a_queue_has_the_topic_open(
    named: SparkSession, home: Path
) -> None:
    put(home, [{"id": 1}], "widened", buckets=2)
    named.sql("ALTER TABLE persisting.widened ADD COLUMN note STRING")
    with writer(home, "widened") as queue:
        queue.put({"id": 2})
        named.sql("ALTER TABLE persisting.widened ADD COLUMNS (score DOUBLE, st STRUCT<a: INT>)")
        named.sql("INSERT INTO persisting.widened VALUES (3, 'x', 0.5, struct(7))")
        with pytest.raises(Exception, match="already exists"):
            named.sql("ALTER TABLE persisting.widened ADD COLUMN note STRING")
    described = found(named, "DESCRIBE persisting.widened")
    assert [row[0] for row in described] == ["id", "note", "score", "st"]
    assert sorted(found(named, "SELECT id, note, score, st.a FROM persisting.widened")) == [
        (1, None, None, None),
        (2, None, None, None),
        (3, "x", 0.5, 7),
    ]


def test_views_of_topics_see_new_rows_and_are_pruned(named: SparkSession, home: Path) -> None:
    put(home, rows(5), "viewed")
    named.sql("CREATE VIEW kept AS SELECT id, text FROM persisting.viewed WHERE score >= 0")
    named.sql("CREATE GLOBAL TEMPORARY VIEW shared AS SELECT * FROM persisting.viewed")
    try:
        put(home, rows(5, 5), "viewed")
        for view in ("kept", "global_temp.shared"):
            query = named.sql(f"SELECT id FROM {view} WHERE id > 7")
            assert sorted(row["id"] for row in query.collect()) == [8, 9]
            plan = query._jdf.queryExecution().optimizedPlan().treeString()
            assert "text#" not in plan
    finally:
        named.sql("DROP VIEW kept")
        named.sql("DROP VIEW global_temp.shared")


def test_tables_are_dropped_with_an_explicit_setting(named: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, rows(3), "steps")
    name = "spark.sql.catalog.dropping"
    named.conf.set(name, "persisting.spark.TopicCatalog")
    named.conf.set(f"{name}.path", str(tmp_path))
    named.conf.set(f"{name}.dropTable", "true")
    with writer(tmp_path, "steps") as queue:
        queue.put_batch(rows(3, 3))
        with pytest.raises(Exception, match="open for writing"):
            named.sql("DROP TABLE dropping.steps")
    assert len(ids(tmp_path, "steps")) == 6
    named.sql("DROP TABLE dropping.steps")
    assert not (tmp_path / "steps").exists()
    named.sql("DROP TABLE IF EXISTS dropping.steps")
    with pytest.raises(Exception, match="steps"):
        named.sql("DROP TABLE dropping.steps")


def test_tables_are_replaced_with_the_setting_that_lets_them_be_dropped(
    named: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(3), "steps")
    catalog = catalog_of(named, tmp_path)
    replaced = f"CREATE OR REPLACE TABLE {catalog}.steps AS SELECT 7L AS id, 'new' AS word"
    with pytest.raises(Exception, match="DROP TABLE and REPLACE TABLE remove only empty topics"):
        named.sql(replaced)
    assert ids(tmp_path, "steps") == [0, 1, 2]
    named.conf.set(f"spark.sql.catalog.{catalog}.dropTable", "true")
    named.sql(replaced)
    assert stored(tmp_path, "steps") == [{"id": 7, "word": "new"}]
    assert found(named, f"SELECT * FROM {catalog}.steps") == [(7, "new")]


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


def test_session_with_another_folder_reads_its_topics(
    named: SparkSession, home: Path, tmp_path: Path
) -> None:
    put(tmp_path, rows(3), "steps")
    count = "SELECT count(*) FROM persisting.steps"
    assert found(session(topics=tmp_path), count) == [(3,)]
    assert found(session(topics=home), count) == [(25,)]


class TestPipelineSql:
    """``persisting pipeline sql``, in this process and in its Spark session."""

    @pytest.fixture
    def sql(self, run_pipeline: Any, tmp_path: Path) -> Any:
        put(tmp_path, rows(5), "steps")
        return lambda *words: run_pipeline(tmp_path, "sql", *words)

    def test_rows_are_shown_as_a_table_or_as_json(
        self, sql: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        query = "SELECT id, text FROM persisting.steps WHERE id > 0 ORDER BY id"
        assert sql(query, "--limit", 2) == 0
        shown = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert shown == [["id", "text"], ["1", "row", "1"], ["2", "row", "2"]]
        assert sql(query, "--limit", 3, "--json") == 0
        lines = [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"id": n, "text": f"row {n}"} for n in (1, 2, 3)]

    def test_rows_are_written_to_a_new_topic(
        self, sql: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        query = "SELECT id FROM persisting.steps WHERE even"
        assert sql(query, "--to", "even", "--buckets", 1, "--json") == 0
        written = json.loads(capsys.readouterr().out)["row"]
        assert (written["topic"], written["written"]) == ("even", 3)
        assert stored(tmp_path, "even") == [{"id": n} for n in (0, 2, 4)]
        assert sql(query, "--to", "even") == USAGE
        assert capsys.readouterr().err == (
            "error: the topic 'even' exists; name a new one with --to\n"
        )
        assert ids(tmp_path, "even") == [0, 2, 4]

    @pytest.mark.parametrize(
        ("statement", "words"),
        [
            ("SELEC 1", "PARSE_SYNTAX_ERROR"),
            ("SELECT nothing FROM persisting.steps", "'nothing'|`nothing`"),
            ("SELECT * FROM persisting.nothing", "there is no topic 'nothing'"),
        ],
    )
    def test_wrong_sql_is_reported_in_one_line(
        self, sql: Any, capsys: pytest.CaptureFixture[str], statement: str, words: str
    ) -> None:
        assert sql(statement) != 0
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(words, err)
