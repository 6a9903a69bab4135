"""An error is one line that says what to do next; its exit code tells its kind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cli_runner import COMMAND, Answer, environment, files_in, piped

READING = [
    ["describe"],
    ["head"],
    ["tail"],
    ["get"],
    ["query"],
    ["search", "--text", "x"],
    ["versions"],
    ["tag"],
    ["groups"],
    ["verify"],
    ["compact"],
    ["retain", "--rows", "1", "--yes"],
    ["restore", "--tag", "x", "--yes"],
    ["wal inspect"],
    ["wal repair", "--yes"],
]


@pytest.fixture
def fails(call: Callable[..., Answer]) -> Callable[..., str]:
    """Run a command that must fail with one line, and return the line."""

    def failing(code: int, *words: object) -> str:
        answer = call(*words)
        assert answer.code == code, (words, answer)
        assert answer.out == "", words
        assert answer.err.startswith("error: "), words
        assert answer.err.count("\n") == 1, (words, answer.err)
        assert "Traceback" not in answer.err
        assert "should not happen" not in answer.err, (words, answer.err)
        return answer.err

    return failing


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_every_command_reports_a_missing_topic(
    words: list[str], storage: Path, fails: Callable[..., str]
) -> None:
    command, *options = words
    before = files_in(storage)
    for name in ("missing", "../missing", "a/b", "./x", "/", "Events", "évents", "x" * 200):
        text = fails(3, *command.split(), name, *options, "-s", storage)
        assert "no topic" in text
    fails(3, *command.split(), "events", *options, "-s", storage / "nowhere")
    for name in ("", ".hidden", "a\x00b", "a\nb"):
        code = 2
        fails(code, *command.split(), name, *options, "-s", storage)
    assert files_in(storage) == before
    assert not (storage.parent / "missing").exists()


def test_export_and_spark_jobs_check_the_topic_first(
    storage: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    fails(3, "export", "missing", "-", "-s", storage)
    for words in (["profile"], ["compact"], ["split", "--key", "id", "--tag", "x"]):
        fails(3, "pipeline", words[0], "missing", *words[1:], "-s", storage)
    fails(2, "pipeline", "dedupe", "events", "other", "-s", storage)


def test_missing_storage_folder_is_reported(
    tmp_path: Path, fails: Callable[..., str], call: Callable[..., Answer]
) -> None:
    assert "no folder" in fails(1, "topics", "-s", tmp_path / "nowhere")
    assert "no folder" in fails(1, "metrics", "serve", "-s", tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    fails(2, "topics", "-s", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    code, out, err = call("topics", "-s", tmp_path / "empty")
    assert (code, out) == (0, "")
    assert "no topics" in err


@pytest.mark.parametrize("root", ["s3://bucket", "file:///tmp", "~/queues"])
def test_url_or_tilde_is_not_accepted_as_a_folder(
    root: str,
    storage: Path,
    tmp_path: Path,
    fails: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "a"}\n')
    monkeypatch.chdir(tmp_path)
    before = files_in(tmp_path)
    in_stores = [
        ["topics", "-s", root],
        ["describe", "events", "-s", root],
        ["head", f"{root}/events"],
        ["put", "events", "x.jsonl", "-s", root],
        ["put", f"{root}/events", "x.jsonl"],
        ["backup", "create", "events", f"{root}/copy", "-s", storage],
        ["backup", "verify", f"{root}/copy"],
        ["backup", "restore", f"{root}/copy", "again", "-s", storage],
        ["metrics", "serve", "-s", root],
    ]
    for words in (
        *(() if root == "s3://bucket" else in_stores),  # tests/store has those that work there
        ["export", "events", f"{root}/x.lance", "-s", storage],
        ["demo", "-o", root],
    ):
        text = fails(2, *words)
        assert any(hint in text for hint in ("address", "whole path", "object store")), words
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"topic": 1}', b'{"topic": "events"}']
)
def test_error_names_a_damaged_topic_file(
    content: bytes, storage: Path, fails: Callable[..., str], call: Callable[..., Answer]
) -> None:
    (storage / "events" / "topic.json").write_bytes(content)
    for words in (["describe", "events"], ["head", "events"], ["put", "events", "/dev/null"]):
        answer = call(*words, "-s", storage)
        assert answer.code in (1, 2, 5), (words, answer)
        assert answer.err.count("\n") == 1
        assert "topic.json" in answer.err
        assert "should not happen" not in answer.err, words
    assert "topic.json" in call("topics", "-s", storage).out


def test_error_about_an_unknown_field_lists_the_existing_fields(
    storage: Path, fails: Callable[..., str]
) -> None:
    for words in (
        ["head", "events", "-c", "nope"],
        ["tail", "events", "-c", "id,nope"],
        ["get", "events", "-c", "nope"],
        ["query", "events", "-c", "nope"],
        ["query", "events", "nope > 1"],
        ["export", "events", "-", "-c", "nope"],
        ["export", "events", "-", "-w", "nope > 1"],
        ["search", "events", "--text", "x", "-f", "text", "-c", "nope"],
        ["search", "events", "--text", "x", "-f", "text", "-w", "nope > 1"],
        ["search", "events", "--text", "x", "-f", "nope"],
    ):
        text = fails(2, *words, "-s", storage)
        assert "'nope'" in text
        assert "score" in text
    for words in (
        ["query", "events", "n >"],
        ["query", "events", "n > 'a' AND"],
        ["export", "events", "-", "-w", "1; DROP TABLE x"],
        ["query", "events", "n"],
        ["head", "events", "-c", ""],
        ["head", "events", "-c", "id,,n"],
        ["search", "events"],
        ["search", "events", "--text", "x", "-f", "n"],
        ["search", "events", "-v", "[1, 2, 3]"],
        ["search", "events", "-v", "[]"],
        ["search", "events", "-v", "[1, 2]", "--like", "0:1"],
        ["search", "events", "--like", "99:0"],
        ["search", "events", "--like", "x"],
    ):
        fails(2, *words, "-s", storage)
    assert "99999" in fails(1, "search", "events", "--like", "0:99999", "-s", storage)


def test_numbers_and_times_out_of_range_are_usage_errors(
    storage: Path, fails: Callable[..., str]
) -> None:
    for words in (
        ["head", "events", "-n", "-1"],
        ["head", "events", "-n", "x"],
        ["head", "events", "-b", "2"],
        ["get", "events", "-b", "-1"],
        ["get", "events", "-b", "99"],
        ["get", "events", "--tag", "nope"],
        ["get", "events", "--tag", "first", "--at", "1h"],
        ["get", "events", "--at", "yesterday"],
        ["get", "events", "--at", "99999999999d"],
        ["tail", "events", "--since", "2026-13-45"],
        ["query", "events", "-b", "7"],
        ["versions", "events", "-b", "7"],
        ["export", "events", "-", "-b", "7"],
        ["export", "events", "-", "--tag", "nope"],
        ["wal", "inspect", "events", "-b", "7"],
        ["wal", "repair", "events", "-b", "7"],
        ["groups", "events", "trainers", "--reset-to", "latest", "-b", "7", "--yes"],
        ["retain", "events", "--age", "99999999999999w", "--rows", "x", "--yes"],
        ["restore", "events", "--yes"],
        ["restore", "events", "--tag", "nope", "--yes"],
        ["metrics", "serve", "--port", "70000"],
        ["bench", "-n", "1"],
    ):
        fails(2, *words, *([] if words[0] == "bench" else ["-s", storage]))


def test_offset_or_limit_far_beyond_the_end_is_accepted(
    storage: Path, call: Callable[..., Answer]
) -> None:
    for words in (["get", "events", "-o", 10**15], ["get", "events", "-o", 10**25]):
        answer = call(*words, "-s", storage)
        assert (answer.code, answer.out) == (0, ""), answer
    assert call("head", "events", "-n", 10**12, "-s", storage).out.count("\n") == 20
    assert call("tail", "events", "-n", 10**12, "-s", storage).out.count("\n") == 20
    assert call("get", "events", "-n", 10**20, "-s", storage).out.count("\n") == 20
    assert call("query", "events", "-n", 10**12, "-s", storage).out.count("\n") == 20


def test_error_of_an_import_names_the_unreadable_file(
    storage: Path, tmp_path: Path, call: Callable[..., Answer], fails: Callable[..., str]
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    (tmp_path / "x.lance").mkdir()
    (tmp_path / "x.txt").write_text("{}")
    (tmp_path / "x.jsonl").mkdir()
    fails(2, "import", "events", tmp_path / "missing.parquet", "-s", storage)
    fails(2, "import", "events", tmp_path / "x.txt", "-s", storage)
    fails(2, "put", "events", tmp_path / "missing", "-s", storage)
    fails(2, "put", "events", tmp_path / "x.lance", "-s", storage)
    for name in ("x.parquet", "x.lance", "x.jsonl"):
        code, out, err = call("import", "events", tmp_path / name, "-s", storage)
        assert code in (1, 2)
        assert err.count("\n") == 1
        assert name in err
        assert "rust" not in err
        assert out == "" or out.startswith("0 records acknowledged")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_import_without_the_bucket_column_creates_no_topic(
    storage: Path, tmp_path: Path, fails: Callable[..., str], call: Callable[..., Answer], name: str
) -> None:
    given = tmp_path / name
    if name == "x.jsonl":
        given.write_text('{"key": "a"}\n{"key": "b"}\n')
    else:
        pq.write_table(pa.table({"key": ["a", "b"]}), given)
    before = files_in(storage)
    for words in (["--bucket-column", "nope"], []):
        text = fails(2, "import", "new", given, *words, "-s", storage)
        assert "--bucket-column" in text
        assert "key" in text
    assert files_in(storage) == before
    answer = call("import", "new", given, "--bucket-column", "key", "-s", storage)
    assert answer.out.startswith("2 records acknowledged in the new topic new"), answer


@pytest.mark.parametrize("text", ["no json\n", '{"key": 1}\n', "[1]\n"])
def test_put_with_a_bad_first_line_creates_no_topic(storage: Path, text: str) -> None:
    before = files_in(storage)
    code, out, err = piped("put", "new", "-s", storage, given=text.encode())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "line 1" in err
    assert files_in(storage) == before


def test_put_cannot_change_fixed_properties_of_a_topic(
    storage: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    given = tmp_path / "x.jsonl"
    given.write_text('{"id": "a"}\n')
    before = files_in(storage)
    fails(2, "put", "events", given, "--buckets", 7, "-s", storage)
    fails(2, "put", "events", given, "--bucket-column", "n", "-s", storage)
    fails(2, "put", "events", given, "--backend", "lance", "-s", storage)
    fails(2, "put", "other", given, "--backend", "nope", "-s", storage)
    fails(2, "put", "events", given, "--set", "novalue", "-s", storage)
    fails(2, "put", "events", given, "--set", "read_only=true", "-s", storage)
    fails(2, "put", "events", given, "--set", "batch_size=10", "-s", storage)
    fails(2, "put", "", given, "-s", storage)
    fails(2, "put", "..", given, "-s", storage)
    assert files_in(storage) == before
    fails(2, "put", "new", given, "--set", "wal_sync_interval=-1", "-s", storage)


def test_error_about_a_port_in_use_suggests_another_port(
    storage: Path, fails: Callable[..., str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port" in fails(1, "metrics", "serve", "--port", port, "-s", storage)


def test_traceback_is_shown_only_with_debug(storage: Path) -> None:
    code, out, err = piped("head", "missing", "--debug", "-s", storage)
    assert (code, out) == (1, "")
    assert "Traceback" in err
    code, out, err = piped("head", "missing", "-s", storage)
    assert (code, out, err.count("\n")) == (3, "", 1)


@pytest.fixture
def unwritable(storage: Path) -> Iterator[list[str]]:
    """Make the storage folder read-only; yield the prefix that a command needs to see it so."""
    if os.geteuid():
        for one in [storage, *storage.rglob("*")]:
            os.chmod(one, 0o555 if one.is_dir() else 0o444)
        yield []
        for one in [storage, *storage.rglob("*")]:
            os.chmod(one, 0o755)
        return
    mounting = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", mounting, str(storage)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("root may write everywhere, and this machine cannot mount a folder read-only")
    yield prefix


def test_read_only_folder_can_be_read_and_a_put_is_refused(
    storage: Path, unwritable: list[str]
) -> None:
    def run(*words: object) -> Answer:
        command = [*unwritable, *COMMAND, *map(str, words), "-s", str(storage)]
        given = {"input": b'{"id": "a"}\n', "capture_output": True, "env": environment()}
        done = subprocess.run(command, check=False, **given)
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    for words in (["topics"], ["verify", "events"]):
        answer = run(*words)
        assert (answer.code, answer.err) == (0, ""), answer
    for words in (["put", "events"], ["put", "new"]):
        code, _, err = run(*words)
        assert code == 1, (words, err)
        assert err.count("\n") == 1
        assert "ermission" in err or "ead-only" in err
        assert "should not happen" not in err
