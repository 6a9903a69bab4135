"""``put``, ``import`` and ``export``: acknowledged records are stored, exports can be imported."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq
import pytest
from support.cli_contracts import decoded
from support.cli_runner import (
    COMMAND,
    Answer,
    environment,
    exported_numbers,
    filled,
    line_of,
    piped,
    started,
    stopped,
)


def lines(numbers: range) -> bytes:
    return b"".join(b'{"id": "k%d", "n": %d}\n' % (n, n) for n in numbers)


def test_put_from_a_pipe_creates_a_durable_topic(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    code, out, err = piped("put", "t", "--buckets", 2, "-s", tmp_path, given=lines(range(50)))
    assert (code, err) == (0, "")
    assert out.startswith("50 records acknowledged in the new topic t (")
    assert exported_numbers(call, tmp_path) == list(range(50))
    options = decoded("describe", call("describe", "t", "--json", "-s", tmp_path).out).options
    assert (options["enable_wal"], options["wal_sync_interval"]) == (True, 0.0)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"nope", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"n": 1}', "'id'"),
        (b'{"id": "a", "n": "text"}', "'n'"),
        (b'{"id": "a", "t": "\xff"}', "utf-8"),
        (b'{"id": "a", "n": NaN}', "not a JSON object"),
        (b'{"id": "a", "": 1}', "empty field name"),
    ],
)
def test_error_in_the_input_names_its_line_and_counts_what_is_stored(
    tmp_path: Path, call: Callable[..., Answer], bad: bytes, why: str
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(lines(range(30)) + bad + b"\n" + lines(range(31, 60)))
    code, out, err = call("put", "t", given, "--buckets", 1, "--json", "-s", tmp_path / "q")
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: line 31")
    assert why in err
    stored = exported_numbers(call, tmp_path / "q")
    assert decoded("put", out).acknowledged == len(stored)
    assert set(range(30)) <= set(stored)


def test_blank_lines_and_a_byte_order_mark_are_not_records(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(b'\xef\xbb\xbf{"id": "a", "n": 1}\r\n\r\n  \n{"id": "b", "n": 2}')
    assert call("put", "t", given, "-s", tmp_path / "q").code == 0
    assert exported_numbers(call, tmp_path / "q") == [1, 2]


def test_line_of_several_megabytes_is_stored_and_printed_whole(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    text = "ü" * 3_000_000
    given = tmp_path / "given.jsonl"
    given.write_text(json.dumps({"id": "a", "text": text}) + "\n")
    assert call("put", "t", given, "-s", tmp_path / "q").code == 0
    shown = call("head", "t", "--json", "-s", tmp_path / "q").out
    assert decoded("head", shown)[0].record["text"] == text


def test_line_nested_too_deep_is_refused(tmp_path: Path) -> None:
    deep = b'{"id": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"
    code, out, err = piped("put", "t", "--json", "-s", tmp_path, given=lines(range(3)) + deep)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: line 4")
    assert decoded("put", out).acknowledged == 3


def test_ctrl_c_stops_a_waiting_put_and_prints_what_is_stored(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with started("put", "t", "--buckets", 2, "-s", tmp_path) as child:
        child.stdin.write(lines(range(500)))
        child.stdin.flush()
        _until_stored(tmp_path)
        code, out, err = stopped(child)
    assert code == 130
    assert "stopped" in err
    assert "Traceback" not in err
    count = int(out.split()[0].replace(",", ""))
    assert count == len(exported_numbers(call, tmp_path)) == 500


def test_ctrl_c_in_a_busy_put_prints_exactly_what_is_stored(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    def write(stream: IO[bytes]) -> None:
        with suppress(BrokenPipeError, ValueError):
            for first in range(0, 10**9, 1000):
                stream.write(lines(range(first, first + 1000)))

    with started("put", "t", "--buckets", 2, "-s", tmp_path) as child:
        writer = threading.Thread(target=write, args=[child.stdin], daemon=True)
        writer.start()
        _until_stored(tmp_path)
        child.send_signal(signal.SIGINT)
        code, said = child.wait(120), (child.stdout.read(), child.stderr.read())
        writer.join()
    assert code == 130
    assert b"Traceback" not in said[1]
    note, *_, stop = said[1].decode().splitlines()
    assert re.search(r"repeat the command with --write-id put-\d{8}-\d{6}-[0-9a-f]{8}; it", note)
    assert stop == "stopped"
    stored = exported_numbers(call, tmp_path)
    assert int(said[0].split()[0].replace(b",", b"")) == len(stored)
    assert len(stored) == len(set(stored))


def _until_stored(storage: Path) -> None:
    """Wait until a log contains records."""
    for _ in range(3000):
        with suppress(FileNotFoundError):
            if any(one.stat().st_size > 1000 for one in storage.glob("t/log/*/*.wal")):
                return
        time.sleep(0.01)
    raise AssertionError("nothing was stored")


def test_put_under_a_write_id_can_be_repeated_after_a_kill(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(lines(range(3000)))
    put = ("put", "t", "--buckets", 2, "--write-id", "load", "-s", tmp_path / "q")
    with started(*put) as child:
        child.stdin.write(lines(range(2500)))
        child.stdin.flush()
        _until_stored(tmp_path / "q")
        child.send_signal(signal.SIGKILL)
        child.wait(20)
    before = exported_numbers(call, tmp_path / "q")
    assert before == sorted(set(before))
    assert len(before) >= 1
    again = call("put", "t", given, "--write-id", "load", "--json", "-s", tmp_path / "q")
    result = decoded("put", again.out)
    assert (again.code, result.acknowledged, result.repeated) == (0, 3000, len(before))
    assert exported_numbers(call, tmp_path / "q") == list(range(3000))
    third = call("put", "t", given, "--write-id", "load", "--json", "-s", tmp_path / "q")
    assert decoded("put", third.out).repeated == 3000
    assert exported_numbers(call, tmp_path / "q") == list(range(3000))


@pytest.mark.parametrize("first", [1, 4, 999, 1000, 1500])
@pytest.mark.parametrize("ending", [b"", b"nope\n"], ids=["short", "broken"])
def test_repeated_put_under_a_write_id_stores_only_the_rest(
    first: int, ending: bytes, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(lines(range(first)) + ending)
    words = ("put", "t", given, "--write-id", "load", "--json", "-s", tmp_path / "q")
    begun = call(*words)
    stored = decoded("put", begun.out).acknowledged
    assert (begun.code, len(exported_numbers(call, tmp_path / "q"))) == (2 if ending else 0, stored)
    given.write_bytes(lines(range(2100)))
    again = call(*words)
    result = decoded("put", again.out)
    assert (again.code, result.acknowledged, result.repeated) == (0, 2100, stored)
    assert exported_numbers(call, tmp_path / "q") == list(range(2100))


@pytest.mark.parametrize("kind", ["parquet", "lance", "jsonl"])
def test_import_under_a_write_id_can_be_repeated_with_more_files(
    kind: str, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "one", [{"id": f"k{n}", "n": n} for n in range(30)])
    filled(tmp_path, "two", [{"id": f"k{n}", "n": n} for n in range(30, 50)])
    files = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
    for file in files:
        assert call("export", file.stem, file, "-s", tmp_path).code == 0
    words = ("--write-id", "load", "--json", "-s", tmp_path)
    assert decoded("import", call("import", "all", files[0], *words).out).acknowledged == 30
    result = decoded("import", call("import", "all", *files, *words).out)
    assert (result.acknowledged, result.repeated) == (50, 30)
    assert exported_numbers(call, tmp_path, "all") == list(range(50))


def test_put_with_a_closed_standard_input_is_refused(tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "put", "t", "-s", str(tmp_path)]
    done = subprocess.run(closed, capture_output=True, check=False, env=environment(), timeout=60)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(b"error: ")
    assert b"should not happen" not in done.stderr


def test_put_without_a_log_counts_what_closing_flushed(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(lines(range(10)) + b"nope\n")
    put = ("put", "t", given, "--set", "enable_wal=false", "--buckets", 1, "--json")
    code, out, _ = call(*put, "-s", tmp_path / "q")
    assert code == 2
    assert decoded("put", out).acknowledged == len(exported_numbers(call, tmp_path / "q")) == 10


def test_put_refuses_the_memory_backend(tmp_path: Path, call: Callable[..., Answer]) -> None:
    given = tmp_path / "given.jsonl"
    given.write_bytes(lines(range(1)))
    code, out, err = call("put", "t", given, "--backend", "memory", "-s", tmp_path / "q")
    assert (code, out) == (2, "")
    assert "memory" in err


RECORDS: list[dict[str, Any]] = [
    {
        "id": "a",
        "nan": math.nan,
        "bytes": b"\x00\xff",
        "moment": dt.datetime(2020, 1, 1, 12, 30, 1, 5, tzinfo=dt.timezone.utc),
        "decimal": decimal.Decimal("1.50"),
        "nested": {"list": [{"x": None, "y": 1}], "text": 'é\n\t"<[red]>'},
        "list": [1.0, 2.0],
        "date": dt.date(2020, 1, 2),
        "big": 2**62,
        "none": None,
        "bool": True,
    },
    {"id": "b", "nan": -math.inf, "moment": None, "nested": None, "list": [], "big": -(2**63)},
    {
        "id": "中文",
        "time": dt.time(1, 2, 3),
        "length": dt.timedelta(days=1, microseconds=3),
        "vector": [0.5] * 16,
        "control": "\x1b[31mred\x1b[0m",
    },
]


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_import_of_an_export_gives_the_same_topic(
    kind: str, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "one", RECORDS)
    assert call("export", "one", tmp_path / f"file.{kind}", "-s", tmp_path).code == 0
    done = call("import", "two", tmp_path / f"file.{kind}", "--buckets", 2, "-s", tmp_path)
    assert done.code == 0, done.err
    for name in ("one", "two"):
        assert call("export", name, tmp_path / f"{name}.parquet", "-s", tmp_path).code == 0
    one, two = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert one.schema.names == two.schema.names
    assert repr(one.to_pylist()) == repr(two.to_pylist())


def test_json_lines_survive_an_export_and_import(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "one", RECORDS)
    assert call("export", "one", tmp_path / "one.jsonl", "-s", tmp_path).code == 0
    assert call("import", "two", tmp_path / "one.jsonl", "--buckets", 2, "-s", tmp_path).code == 0
    first, second = (call("export", name, "-", "-s", tmp_path).out for name in ("one", "two"))
    assert first == second == (tmp_path / "one.jsonl").read_text()
    row = json.loads(
        first.splitlines()[0] if '"a"' in first.splitlines()[0] else first.split("\n")[1]
    )
    assert row["bytes"] == "AP8="
    assert row["moment"] == "2020-01-01T12:30:01.000005Z"
    assert decimal.Decimal(row["decimal"]) == decimal.Decimal("1.5")
    assert row["nan"] is None
    assert row["nested"]["text"] == 'é\n\t"<[red]>'
    assert "\x1b" not in first


def test_export_selects_fields_records_and_versions(
    storage: Path, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    given = tmp_path / "more.jsonl"
    given.write_bytes(lines(range(100, 103)))
    assert call("put", "events", given, "-s", storage).code == 0
    out = call("export", "events", "-", "-w", "n >= 18", "-c", "n", "-s", storage).out
    assert sorted(json.loads(line)["n"] for line in out.splitlines()) == [18, 19, 100, 101, 102]
    assert all(list(json.loads(line)) == ["n"] for line in out.splitlines())
    assert call("export", "events", "-", "--tag", "first", "-s", storage).out.count("\n") == 20
    assert call("export", "events", "-", "--at", "2020-01-01", "-s", storage).out == ""
    one, two = (call("export", "events", "-", "-b", b, "-s", storage).out for b in (0, 1))
    assert one.count("\n") + two.count("\n") == 23


def test_export_replaces_a_file_only_with_overwrite_and_never_partly(
    storage: Path, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    target = tmp_path / "out" / "e.jsonl"
    target.parent.mkdir()
    target.write_text("mine\n")
    assert call("export", "events", target, "-s", storage).code == 2
    assert (
        call("export", "events", target, "-w", "nope > 1", "--overwrite", "-s", storage).code == 2
    )
    assert target.read_text() == "mine\n"
    assert call("export", "events", target, "--overwrite", "-s", storage).code == 0
    assert target.read_text().count("\n") == 20
    assert os.listdir(target.parent) == ["e.jsonl"]
    assert call("export", "events", tmp_path / "no" / "e.jsonl", "-s", storage).code == 1
    assert call("export", "events", tmp_path / "e.xlsx", "-s", storage).code == 2
    assert call("export", "events", "-", "--format", "parquet", "-s", storage).code == 2


def test_export_of_an_unsupported_type_names_the_field_and_a_remedy(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "t", [{"id": "a", "empty": {}}, {"id": "b"}], buckets=1)
    for kind in ("parquet", "lance"):
        code, out, err = call("export", "t", tmp_path / f"t.{kind}", "-s", tmp_path)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "empty" in err
        assert "--columns" in err
        assert "should not happen" not in err
        assert not (tmp_path / f"t.{kind}").exists()
    assert call("export", "t", tmp_path / "t.parquet", "-c", "id", "-s", tmp_path).code == 0


def test_export_into_a_closed_pipe_exits_with_141_quietly(tmp_path: Path) -> None:
    filled(tmp_path, "t", [{"id": str(n), "text": "x" * 1000} for n in range(3000)], buckets=1)
    child = subprocess.Popen(
        [*COMMAND, "export", "t", "-", "-s", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert json.loads(line_of(child.stdout))["id"] == "0"
    child.stdout.close()
    assert child.wait(120) == 141
    with child.stderr as errors:
        assert errors.read() == b""
