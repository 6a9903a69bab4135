"""Inputs with bad lines are repeated exactly or skipped; compressed files, CSV and TSV."""

from __future__ import annotations

import gzip
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.cli_contracts import decoded
from support.cli_runner import Answer, exported_numbers, line_of, piped, started

from persisting.cli.formats import decompressed


def records(numbers: range) -> list[bytes]:
    return [b'{"id": "k%d", "n": %d}' % (n, n) for n in numbers]


def test_reading_of_a_closed_file_does_not_consume_the_next_file(tmp_path: Path) -> None:
    """A command that failed leaves a thread behind that may read once more."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with (tmp_path / "a").open("rb") as file, decompressed(file, None) as read:
        number = file.fileno()
    with (tmp_path / "b").open("rb") as file:
        assert file.fileno() == number
        assert read(10) == b"a"
        assert file.read() == b"b"


class TestGeneratedWriteId:
    @pytest.mark.parametrize("bad", [b'{"id": "k700", "n": "text"}', b"nope", b'{"n": 700}'])
    def test_input_repaired_in_place_is_repeated_exactly(
        self, tmp_path: Path, call: Callable[..., Answer], bad: bytes
    ) -> None:
        good = records(range(1000))
        given = tmp_path / "given.jsonl"
        given.write_bytes(b"\n".join([*good[:700], bad, *good[701:]]))
        put = ("put", "t", given, "--json", "-s", tmp_path / "q")
        code, out, err = call(*put)
        stopped = decoded("put", out)
        assert (code, err.count("\n")) == (2, 1)
        assert f"--write-id {stopped.write_id}" in err
        assert re.fullmatch(r"put-\d{8}-\d{6}-[0-9a-f]{8}", stopped.write_id)
        assert stopped.acknowledged == len(exported_numbers(call, tmp_path / "q")) >= 700
        given.write_bytes(b"\n".join(good))
        again = decoded("put", call(*put, "--write-id", stopped.write_id).out)
        assert (again.acknowledged, again.repeated) == (1000, stopped.acknowledged)
        assert exported_numbers(call, tmp_path / "q") == list(range(1000))

    def test_bad_line_may_be_emptied_before_the_put_is_repeated(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        good = records(range(100))
        given = tmp_path / "given.jsonl"
        given.write_bytes(b"\n".join([*good[:50], b"nope", *good[51:]]))
        put = ("put", "t", given, "--json", "-s", tmp_path / "q")
        name = decoded("put", call(*put).out).write_id
        given.write_bytes(b"\n".join([*good[:50], b"", *good[51:]]))
        assert call(*put, "--write-id", name).code == 0
        assert exported_numbers(call, tmp_path / "q") == [n for n in range(100) if n != 50]

    def test_error_before_anything_is_stored_names_no_write_id(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given = tmp_path / "given.jsonl"
        given.write_bytes(b"nope\n")
        code, _, err = call("put", "t", given, "-s", tmp_path / "q")
        assert (code, "--write-id" in err) == (2, False)

    def test_generated_ids_do_not_displace_names_that_users_chose(self) -> None:
        from persisting.bucket.producer_sequences import ANONYMOUS, GENERATED

        assert GENERATED.startswith(ANONYMOUS), "anonymous producers are forgotten first"


class TestSkippedLines:
    def test_bad_lines_are_set_aside_and_everything_else_is_stored(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given, aside = tmp_path / "given.jsonl", tmp_path / "bad.jsonl"
        bad = [b"nope", b'{"id": "x", "n": "text"}', b'{"n": 5}', b'{"id": "y", "n": [1]}']
        good = records(range(2000))
        given.write_bytes(
            b"\n".join([*good[:500], bad[0], bad[1], *good[500:1500], *bad[2:], *good[1500:]])
        )
        put = ("put", "t", given, "--skip-bad", aside, "-s", tmp_path / "q")
        code, out, err = call(*put)
        assert code == 0
        assert "2,000 records acknowledged" in out
        assert f"4 lines could not be stored: see {aside}" in out
        assert err.count("skipped: line ") == 4
        assert "line 501 is not a JSON object" in err
        assert "line 502: field 'n'" in err
        assert sorted(aside.read_bytes().splitlines()) == sorted(bad)
        assert exported_numbers(call, tmp_path / "q") == list(range(2000))

    def test_repetition_under_a_write_id_stores_and_sets_aside_nothing_twice(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given, aside = tmp_path / "given.jsonl", tmp_path / "bad.jsonl"
        good = records(range(300))
        bad = [b"nope", b'{"id": "x", "n": "text"}']
        given.write_bytes(b"\n".join([*good[:100], *bad, *good[100:]]))
        put = ("put", "t", given, "--skip-bad", aside, "--write-id", "w", "--json")
        first = decoded("put", call(*put, "-s", tmp_path / "q").out)
        again = decoded("put", call(*put, "-s", tmp_path / "q").out)
        assert (first.acknowledged, first.repeated, first.skipped) == (300, 0, 2)
        assert (again.acknowledged, again.repeated, again.skipped) == (300, 300, 2)
        assert sorted(aside.read_bytes().splitlines()) == sorted(bad)
        assert exported_numbers(call, tmp_path / "q") == list(range(300))

    def test_killed_command_is_repeated_exactly(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given, aside = tmp_path / "given.jsonl", tmp_path / "bad.jsonl"
        good = records(range(600))
        bad = [b'{"id": "k%d", "n": "text %d"}' % (n, n) for n in range(20)]
        mixed = [line for n in range(20) for line in (*good[n * 30 : n * 30 + 30], bad[n])]
        given.write_bytes(b"\n".join(mixed) + b"\n")
        put = ("put", "t", "-", "--skip-bad", aside, "--write-id", "w", "-s", tmp_path / "q")
        with started(*put) as child:
            child.stdin.write(b"\n".join(mixed[:400]) + b"\n")
            child.stdin.flush()
            line_of(child.stderr)
            child.send_signal(signal.SIGKILL)
            child.wait(20)
        code, _, err = piped(*put, given=given.read_bytes())
        assert code == 0, err
        assert exported_numbers(call, tmp_path / "q") == list(range(600))
        assert sorted(aside.read_bytes().splitlines()) == sorted(bad)

    def test_many_bad_lines_are_counted_after_the_first(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given = tmp_path / "given.jsonl"
        given.write_bytes(b"\n".join([*records(range(3)), *[b"no"] * 25]))
        _, _, err = call("put", "t", given, "--skip-bad", tmp_path / "bad", "-s", tmp_path / "q")
        assert err.count("is not a JSON object") == 10
        assert err.endswith("skipped: 15 more\n")

    def test_file_that_cannot_be_written_is_an_error_before_anything_is_stored(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given = tmp_path / "given.jsonl"
        given.write_bytes(b"\n".join(records(range(3))))
        aside = tmp_path / "missing" / "bad"
        code, _, err = call("put", "t", given, "--skip-bad", aside, "-s", tmp_path / "q")
        assert (code, err.count("\n")) == (1, 1)
        assert not (tmp_path / "q").exists()


class TestCompressedFiles:
    @pytest.mark.parametrize("command", ["put", "import"])
    @pytest.mark.parametrize("extension", ["gz", "zst"])
    def test_json_lines_are_decompressed(
        self, tmp_path: Path, call: Callable[..., Answer], command: str, extension: str
    ) -> None:
        parts = [b"\n".join(records(part)) + b"\n" for part in (range(500), range(500, 900))]
        packed = {
            "gz": lambda data: gzip.compress(data),
            "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
        }[extension]
        given = tmp_path / f"given.jsonl.{extension}"
        given.write_bytes(b"".join(map(packed, parts)))
        assert call(command, "t", given, "-s", tmp_path / "q").code == 0
        assert exported_numbers(call, tmp_path / "q") == list(range(900))

    def test_truncated_file_is_an_error_that_names_it(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given = tmp_path / "given.jsonl.gz"
        given.write_bytes(gzip.compress(b"\n".join(records(range(5000))))[:-500])
        code, _, err = call("import", "t", given, "-s", tmp_path / "q")
        assert code == 1
        assert f"cannot read {given} as gzip" in err
        assert "should not happen" not in err

    def test_compressed_parquet_is_refused(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        (tmp_path / "x.parquet.gz").write_bytes(b"")
        code, _, err = call("import", "t", tmp_path / "x.parquet.gz", "-s", tmp_path / "q")
        assert (code, "unknown extension" in err) == (2, True)


class TestCsv:
    TEXT = 'id,name,size,zip,note\n1,NA,2.5,007,"a, ""b""\nc"\n2,,3,010,\n3,x,,,""\n'
    ROWS = (
        {"id": 1, "name": "NA", "size": 2.5, "zip": "007", "note": 'a, "b"\nc'},
        {"id": 2, "name": None, "size": 3.0, "zip": "010", "note": None},
        {"id": 3, "name": "x", "size": None, "zip": None, "note": ""},
    )

    @pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.gz"])
    def test_columns_of_csv_get_types_and_only_empty_values_are_null(
        self, tmp_path: Path, call: Callable[..., Answer], name: str
    ) -> None:
        text = self.TEXT
        if ".tsv" in name:
            text = text.replace(",", "\t").replace('"a\t ', '"a, ')
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        done = call("import", "t", tmp_path / name, "--text", "zip", "-s", tmp_path / "q")
        assert done.code == 0, done.err
        shown = decoded("query", call("query", "t", "--nulls", "--json", "-s", tmp_path / "q").out)
        assert sorted((one.record for one in shown), key=lambda row: row["id"]) == list(self.ROWS)

    def test_row_with_a_wrong_number_of_values_is_an_error_or_set_aside(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given, aside = tmp_path / "a.csv", tmp_path / "bad.csv"
        given.write_text("id,n\n1,1\n2\n3,3\n")
        code, _, err = call("import", "t", given, "-s", tmp_path / "q")
        assert (code, f"cannot read {given} as csv" in err) == (1, True)
        code, out, err = call("import", "t", given, "--skip-bad", aside, "-s", tmp_path / "q")
        assert code == 0
        assert "2 records acknowledged" in out
        assert f"{given}, row 3: wrong number of values" in err
        assert aside.read_text() == "2\n"

    def test_interrupted_import_is_repeated_without_duplicates(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        given = tmp_path / "a.csv"
        given.write_text("id,n\n" + "".join(f"{n},{n}\n" for n in range(100)))
        for _ in range(2):
            done = call("import", "t", given, "--write-id", "w", "-s", tmp_path / "q")
            assert done.code == 0
        assert exported_numbers(call, tmp_path / "q") == list(range(100))

    def test_options_for_other_formats_are_refused(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n')
        (tmp_path / "a.csv").write_bytes(b"id\n1\n")
        (tmp_path / "a.parquet").write_bytes(b"")
        for words in (
            ["a.jsonl", "--text", "id"],
            ["a.parquet", "--skip-bad", tmp_path / "bad"],
            ["a.csv", "--text", "nope"],
        ):
            code, _, err = call("import", "t", tmp_path / words[0], *words[1:], "-s", tmp_path)
            assert (code, err.count("\n")) == (2, 1), words

    def test_value_that_contradicts_the_inferred_type_names_its_row_and_a_way_out(
        self, tmp_path: Path, call: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("persisting.cli.formats._INFERRED_BYTES", 1000)
        given = tmp_path / "a.csv"
        given.write_text("id,n\n" + "".join(f"k{n},{n}\n" for n in range(500)) + "x,many\n")
        code, _, err = call("import", "t", given, "-s", tmp_path / "q")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{given}, row 502: column 'n' is int64 by its first values, but has 'many'" in err
        code, out, _ = call("import", "t2", given, "--text", "n", "-s", tmp_path / "q")
        assert (code, out.startswith("501 records")) == (0, True)

    @pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.parquet"])
    def test_put_points_to_import(
        self, tmp_path: Path, call: Callable[..., Answer], name: str
    ) -> None:
        (tmp_path / name).write_bytes(b"")
        code, _, err = call("put", "t", tmp_path / name, "-s", tmp_path / "q")
        assert (code, "use 'persisting import'" in err) == (2, True)

    def test_empty_file_stores_nothing(self, tmp_path: Path, call: Callable[..., Answer]) -> None:
        (tmp_path / "a.csv").write_bytes(b"")
        assert call("import", "t", tmp_path / "a.csv", "-s", tmp_path / "q").code == 0
