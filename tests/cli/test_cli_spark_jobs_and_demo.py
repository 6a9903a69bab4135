"""The Spark jobs and the demo on the command line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli_contracts import decoded
from support.cli_runner import filled, in_terminal, line_of, piped, plain, started, stopped

from persisting.cli.commands.pipeline.incremental_run import _expressions
from persisting.spark.query_errors import _reason

LOCAL = ("--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=1")


def job(name: str, *args: object, storage: Path) -> Any:
    code, out, err = piped("pipeline", name, *args, *LOCAL, "--json", "-s", storage)
    assert code == 0, err
    return decoded(f"pipeline {name}", out)


def test_json_of_pipeline_profile_matches_the_schema(storage: Path) -> None:
    found = job("profile", "events", "--columns", "n", storage=storage)
    assert {(one.column, one.bucket) for one in found} == {("n", None), ("n", 0), ("n", 1)}
    assert next(one for one in found if one.bucket is None).facts["rows"] == 20


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_spark_job_works_and_its_json_matches_the_schema(
    storage: Path, tmp_path: Path
) -> None:
    words = ("events", "curated", "--select", "id, concat('a,b', id) AS c, n")
    assert job("run", *words, storage=storage).rows == 20
    filled(storage, "events", [{"id": "late", "n": 99, "text": "red grüße"}])
    assert job("run", *words, storage=storage).rows == 1
    assert job("run", *words, storage=storage).rows == 0
    profile = job("profile", "events", "--columns", "n,text", storage=storage)
    assert {(one.column, one.bucket) for one in profile} >= {("n", None), ("text", 0)}
    once = job("dedupe", "events", "once", "--key", "text", storage=storage)
    assert once.written == 3
    near = job(
        "near-duplicates", "events", "--column", "text", "-c", "id", "-n", 5, storage=storage
    )
    assert len(near) == 5
    assert near[0].first.keys() == {"_time", "_bucket", "_offset", "id"}
    counted = job("sql", "SELECT count(*) AS n FROM persisting.events", storage=storage)
    assert [line.row for line in counted] == [{"n": 21}]
    query = "SELECT id, n FROM persisting.events WHERE n < 3"
    (line,) = job("sql", query, "--to", "few", "--buckets", 1, storage=storage)
    assert (line.row["topic"], line.row["written"]) == ("few", 3)
    assert job("compact", "events", storage=storage).fragments_after == 2
    index = job("index", "events", "--column", "n", "--kind", "scalar", storage=storage)
    assert index.rows == 21
    split = job(
        "split", "events", "--key", "id", "--tag", "s1", "-o", tmp_path / "parts", storage=storage
    )
    assert sum(split.parts.values()) == 21
    assert set(os.listdir(tmp_path / "parts")) == set(split.parts)
    out = job("export", "events", tmp_path / "out.parquet", "--where", "n < 5", storage=storage)
    assert (out.rows, out.files > 0) == (5, True)
    back = job("ingest", "back", tmp_path / "out.parquet", "--write-id", "w", storage=storage)
    assert back.rows == 5
    job("ingest", "back", tmp_path / "out.parquet", "--write-id", "w", storage=storage)
    assert piped("export", "back", "-", "-s", storage).out.count("\n") == 5


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_spark_jobs_replace_existing_targets_only_with_mode(storage: Path, tmp_path: Path) -> None:
    def refused(words: str, *args: object) -> None:
        code, out, err = piped("pipeline", *args, *LOCAL, "-s", storage)
        assert (code, out) == (2, ""), err
        assert words in err

    dedupe = ("dedupe", "events", "once", "--key", "text")
    assert job(*dedupe, storage=storage).written == 3
    refused("pass --mode overwrite or append", *dedupe)
    assert job(*dedupe, "--mode", "overwrite", storage=storage).written == 3
    assert job(*dedupe, "--write-id", "w", storage=storage).written == 3
    assert piped("export", "once", "-", "-s", storage).out.count("\n") == 6
    split = ("split", "events", "--key", "id", "--tag", "s", "--share", "once=1", "-o")
    refused("is a topic", *split, storage, "--mode", "overwrite")
    parts = tmp_path / "parts"
    refused("begins with a dot", *split[:-2], "../x=1", "-o", parts)
    refused("shares must be numbers", *split[:-2], "a=b", "-o", parts)
    assert '"name": "s"' not in piped("tag", "events", "--json", "-s", storage).out
    assert job(*split, parts, storage=storage).parts == {"once": 20}
    refused("already exists", *split, parts)
    job(*split, parts, "--mode", "overwrite", storage=storage)
    assert piped("export", "once", "-", "-s", storage).out.count("\n") == 6


def test_select_is_split_at_top_level_commas() -> None:
    parts = ["id", r"concat('a,\', b', '\\') AS q", r"`odd,\` AS `n`", "f(a, [1, 2])"]
    assert _expressions(", ".join(parts)) == parts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("calling o1.save.\n: java.io.IOException: Mkdirs failed\n\tat x", "Mkdirs failed"),
        ("a\n: x.Y: b\n\tat z\nCaused by: java.Z: the cause\n\tat w", "the cause"),
        ("[SOME] only this\nrest", "[SOME] only this"),
    ],
)
def test_spark_error_is_reduced_to_one_line(text: str, reason: str) -> None:
    assert _reason(text) == reason


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_spark_job_prints_one_error_line_and_ctrl_c_stops_it(storage: Path) -> None:
    for words in (
        ["run", "events", "bad", "--select", "nope AS id"],
        ["run", "events", "bad", "--where", "nope > 1"],
        ["run", "events", "bad", "--select", "id AS key"],
        ["export", "events", "/proc/nowhere", "--format", "parquet"],
        ["index", "events", "--column", "nope"],
        ["ingest", "events", "/nowhere/*.parquet"],
        ["split", "events", "--key", "nope", "--tag", "s"],
        ["profile", "events", "--columns", "nope"],
    ):
        code, out, err = piped("pipeline", *words, *LOCAL, "-s", storage)
        assert code in (1, 2), (words, err)
        assert out == ""
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, err
        assert "Traceback" not in err, words
        assert "should not happen" not in errors[0], words
        assert "bucketColumn" not in err, words
    with started("pipeline", "profile", "events", *LOCAL, "-s", storage) as child:
        time.sleep(4)
        assert stopped(child).code == 130


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_demo_succeeds_and_leaves_readable_topics(tmp_path: Path) -> None:
    shown, _ = in_terminal("demo", "-o", tmp_path / "demo")
    assert shown.code == 0, shown
    text = plain(shown.out)
    assert "Every claim held" in text
    assert "✓" in text
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1000
    storage = tmp_path / "demo" / "queues"
    listed = decoded("topics", piped("topics", "--json", "-s", storage).out)
    assert len(listed) == 2
    for one in listed:
        assert one.problem is None
        assert piped("verify", one.topic, "-s", storage).code == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    refused = piped("demo", "-o", mine)
    assert (refused.code, (mine / "thesis.txt").read_text()) == (2, "x")


@pytest.mark.nightly
def test_ctrl_c_stops_the_demo_and_its_processes(tmp_path: Path) -> None:
    with started("demo", "-o", tmp_path / "demo") as child:
        while "Three agents" not in line_of(child.stdout):
            pass
        time.sleep(3)
        code, _, err = stopped(child)
    assert code == 130
    assert "Traceback" not in err
    left = [
        one
        for one in Path("/proc").iterdir()
        if one.name.isdigit() and str(tmp_path).encode() in _command_line(one)
    ]
    assert left == []


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
