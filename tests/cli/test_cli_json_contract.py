"""The --json output of each command matches its schema, with nothing else printed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_contracts import decoded
from support.cli_runner import Answer, filled, piped

from persisting.topic.inspect import TopicFacts


@pytest.fixture
def ask(call: Callable[..., Answer], storage: Path) -> Callable[..., object]:
    """Run a command that must succeed and return its decoded JSON."""

    def asked(command: str, *args: object, code: int = 0) -> object:
        answer = call(*command.split(), *args, "--json", "-s", storage)
        assert (answer.code, answer.err) == (code, ""), answer
        return decoded(command, answer.out)

    return asked


def test_json_of_topics_and_describe_matches_the_schema(ask: Callable[..., object]) -> None:
    (facts,) = ask("topics")
    assert isinstance(facts, TopicFacts)
    assert (facts.topic, facts.rows, facts.owners, facts.problem) == ("events", 20, [], None)
    assert facts.lag == {"trainers": 15}
    described = ask("describe", "events")
    assert [field.name for field in described.fields] == ["id", "n", "score", "text", "v"]
    assert [tag.name for tag in described.tags] == ["first"]
    assert sum(bucket.rows for bucket in described.buckets) == 20
    assert described.groups[0].lag == 15
    assert all(log.state != "damaged" for log in described.logs)


def test_json_of_commands_that_show_records_matches_the_schema(ask: Callable[..., object]) -> None:
    first, last = ask("head", "events", "-n", 3), ask("tail", "events", "-n", 3)
    assert max(one.record["n"] for one in first) < min(one.record["n"] for one in last)
    assert len(first) == len(last) == 3
    assert len(ask("get", "events", "-n", 100, "--tag", "first")) == 20
    (one,) = ask("get", "events", "-b", 1, "-o", 2, "-c", "id,n")
    assert (one.bucket, one.offset, set(one.record)) == (1, 2, {"id", "n"})
    assert [one.record["n"] for one in ask("query", "events", "n = 7")] == [7]
    hits = ask("search", "events", "--text", "green", "--column", "text", "-k", 3)
    assert all("green" in hit.record["text"] and hit.score > 0 for hit in hits)
    (near,) = ask("search", "events", "--vector", "[0.5, 0.5]", "-k", 1, "-c", "n")
    assert (near.record, near.distance) == ({"n": 10}, 0.0)
    (like,) = ask("search", "events", "--like", f"{near.bucket}:{near.offset}", "-k", 1)
    assert (like.bucket, like.offset) == (near.bucket, near.offset)


def test_json_of_commands_that_change_a_topic_matches_the_schema(
    ask: Callable[..., object], tmp_path: Path
) -> None:
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"id": "x", "n": 100}\n{"id": "y", "n": 101}\n')
    assert ask("put", "events", lines).acknowledged == 2
    assert ask("import", "other", lines, "--buckets", 1).made is True
    exported = ask("export", "events", tmp_path / "e.parquet")
    assert (exported.rows, exported.format) == (22, "parquet")
    assert exported.bytes == (tmp_path / "e.parquet").stat().st_size
    assert {tag.name for tag in ask("tag", "events", "second")} == {"second"}
    assert {tag.name: tag.rows for tag in ask("tag", "events")} == {"first": 20, "second": 22}
    assert len(ask("versions", "events")) >= 4
    assert ask("versions", "events", "-b", 1)[0].bucket == 1
    assert ask("compact", "events").fragments_after == 2
    plan = ask("restore", "events", "--tag", "first", "--dry-run")
    assert (plan.removed, plan.dry_run) == (2, True)
    done = ask("restore", "events", "--tag", "first", "--yes")
    assert (done.removed, done.dry_run) == (2, False)
    assert ask("tag", "events", "second", "--delete") == []
    plan = ask("retain", "events", "--rows", 1, "--dry-run")
    assert plan.dry_run is True
    assert ask("retain", "events", "--rows", 1, "--yes").dropped == plan.dropped > 0


def test_json_of_maintenance_commands_matches_the_schema(ask: Callable[..., object]) -> None:
    report = ask("verify", "events")
    assert (report.ok, report.rows, report.damaged) == (True, 20, [])
    assert [log.bucket for log in ask("wal inspect", "events")] == [0, 1]
    assert ask("wal repair", "events")[0].problem is None
    (group,) = ask("groups", "events", "trainers")
    assert group.lag == 15
    (reset,) = ask("groups", "events", "trainers", "--reset-to", "earliest", "--dry-run")
    assert reset.lag == 20
    assert ask("groups", "events")[0].lag == 15


def test_json_of_bench_matches_the_schema() -> None:
    code, out, err = piped("bench", "-n", 1000, "--json")
    assert (code, err) == (0, "")
    found = decoded("bench", out)
    assert found.syncs_per_second > 0
    assert all(one.records > 0 and one.per_second > 0 for one in found.measured)


def test_records_may_have_fields_named_like_metadata(
    call: Callable[..., Answer], tmp_path: Path
) -> None:
    record = {"id": "a", "_offset": 7, "_bucket": "x", "_time": 1.5, "record": {"offset": 1}}
    filled(tmp_path, "odd", [record], buckets=1)
    for command in ("head", "tail", "get"):
        (one,) = decoded(command, call(command, "odd", "--json", "-s", tmp_path).out)
        assert (one.bucket, one.offset, one.record) == (0, 0, record)
    assert json.loads(call("export", "odd", "-", "-s", tmp_path).out) == record
    refused = call("export", "odd", "-", "--metadata", "-s", tmp_path)
    assert refused.code == 2
    assert "_bucket" in refused.err or "_offset" in refused.err


def test_export_with_metadata_adds_positions_and_times(
    call: Callable[..., Answer], storage: Path
) -> None:
    rows = call("export", "events", "-", "--metadata", "-s", storage).out.splitlines()
    places = {(row["_bucket"], row["_offset"]) for row in map(json.loads, rows)}
    found = decoded("get", call("get", "events", "-n", 100, "--json", "-s", storage).out)
    assert places == {(one.bucket, one.offset) for one in found}
    assert len(rows) == 20


def test_wide_record_is_never_cut_in_a_pipe(call: Callable[..., Answer], tmp_path: Path) -> None:
    letters = random.Random(5).choices("abcdefgh ü", k=5000)
    wide = {f"field_{n:03d}": "".join(letters[n : n + 400]) for n in range(120)}
    filled(tmp_path, "wide", [{"id": "a", **wide, "numbers": list(range(300))}], buckets=1)
    shown = call("head", "wide", "-s", tmp_path).out
    assert shown.count("\n") == 1
    assert json.loads(shown.partition("  {")[2].join(["{", ""])) == {
        "id": "a",
        **wide,
        "numbers": list(range(300)),
    }
    assert all(name in call("describe", "wide", "-s", tmp_path).out for name in wide)
