"""Commands that read, on a terminal and in a pipe."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli_contracts import decoded
from support.cli_runner import (
    Answer,
    files_in,
    filled,
    in_terminal,
    line_of,
    piped,
    plain,
    started,
    stopped,
)

from persisting.queue import read_queue, write_queue


@pytest.mark.parametrize("width", [80, 60])
def test_table_shows_whole_names_and_numbers_at_any_terminal_width(
    tmp_path: Path, width: int
) -> None:
    place = tmp_path / "queues"
    for name in ("trajectories", "curated-again"):
        filled(place, name, [{"id": "a"}])
    answer, _ = in_terminal("topics", "-s", place, width=width)
    shown = plain(answer.out)
    for word in ("trajectories", "curated-again", "persisting", "buckets", "owner"):
        assert word in shown
    lines = piped("topics", "-s", place).out.splitlines()
    drawn = [line.rstrip() for line in shown.splitlines() if not line.startswith("─")]
    assert drawn == lines


def test_table_is_plain_in_a_pipe_and_coloured_on_a_terminal(storage: Path) -> None:
    code, out, err = piped("topics", "-s", storage)
    assert (code, err) == (0, "")
    names, row = out.splitlines()
    assert names.split() == ["topic", "rows", "size", "log", "buckets", "backend", "owner", "lag"]
    assert re.fullmatch(r"events +20 +[\d.]+ kB +0 B +2 +persisting +- +trainers 15", row)
    shown, _ = in_terminal("topics", "-s", storage)
    assert (shown.code, shown.err) == (0, "")
    assert "\x1b[1m" in shown.out
    assert "─" in shown.out
    assert "trainers 15" in plain(shown.out)


def test_narrow_terminal_folds_text_without_losing_letters(storage: Path) -> None:
    shown, _ = in_terminal("describe", "events", "-s", storage, width=40)
    assert shown.code == 0
    text = "".join(plain(shown.out).split())
    for word in ("persisting", "bucket", "trainers", "first", "double"):
        assert word in text


def test_progress_is_shown_only_on_a_terminal_and_on_stderr(tmp_path: Path) -> None:
    filled(tmp_path, "t", [{"id": str(n), "n": n} for n in range(20_000)], buckets=1)
    shown, _ = in_terminal("export", "t", "-", "-s", tmp_path, both=False)
    assert shown.code == 0
    assert "from t" in plain(shown.err)
    assert [json.loads(line)["n"] for line in shown.out.splitlines()] == list(range(20_000))
    code, out, err = piped("export", "t", tmp_path / "t.parquet", "-s", tmp_path)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"20,000 records to \S+ \([\d.]+ kB, [\d.]+ m?s\)\n", out)


def test_head_and_tail_order_records_of_all_buckets_by_arrival(
    storage: Path, call: Callable[..., Answer]
) -> None:
    places = [
        line.split()[0] for line in call("head", "events", "-n", 20, "-s", storage).out.splitlines()
    ]
    assert len({place.split(":")[0] for place in places}) == 2
    found = decoded("head", call("head", "events", "-n", 20, "--json", "-s", storage).out)
    assert [f"{one.bucket}:{one.offset}" for one in found] == places
    assert [one.time for one in found] == sorted(one.time for one in found)
    last = decoded("tail", call("tail", "events", "-n", 20, "--json", "-s", storage).out)
    assert last == found
    assert call("head", "events", "-n", 0, "-s", storage).out == ""
    assert call("tail", "events", "-n", 0, "-s", storage).out == ""
    assert call("tail", "events", "--since", "2100-01-01", "-s", storage).out == ""
    assert call("tail", "events", "--since", "1h", "-n", 99, "-s", storage).out.count("\n") == 20
    assert dt.datetime.fromisoformat(found[0].time).tzinfo is not None


def test_tail_follow_shows_new_records_until_ctrl_c(storage: Path) -> None:
    with started("tail", "events", "-f", "-n", 1, "--json", "-c", "id", "-s", storage) as child:
        line_of(child.stdout)
        assert piped("put", "events", "-s", storage, given=b'{"id": "new"}\n').code == 0
        assert json.loads(line_of(child.stdout))["record"] == {"id": "new"}
        begun = time.monotonic()
        code, out, err = stopped(child)
    assert (code, out) == (130, "")
    assert err.strip() == "stopped"
    assert time.monotonic() - begun < 60


def test_output_is_utf8_whatever_the_encoding_of_the_locale(storage: Path) -> None:
    code, out, err = piped("head", "events", "-s", storage, env={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, "")
    assert "gr" in out
    json.loads(out.splitlines()[0].partition("  {")[2].join(["{", ""]))


def test_read_commands_change_no_file(storage: Path, call: Callable[..., Answer]) -> None:
    before = files_in(storage)
    for words in (
        ["topics"],
        ["describe", "events"],
        ["head", "events"],
        ["tail", "events"],
        ["get", "events"],
        ["query", "events", "n > 3"],
        ["search", "events", "--text", "red", "-f", "text"],
        ["export", "events", "-"],
        ["versions", "events"],
        ["tag", "events"],
        ["groups", "events"],
        ["verify", "events"],
        ["wal", "inspect", "events"],
    ):
        assert call(*words, "-s", storage).code == 0, words
    assert files_in(storage) == before


def test_topic_can_be_given_as_a_path(storage: Path, call: Callable[..., Answer]) -> None:
    assert (
        call("head", storage / "events", "-n", 1).out
        == call("head", "events", "-n", 1, "-s", storage).out
    )


def test_every_command_works_on_an_empty_topic(tmp_path: Path, call: Callable[..., Answer]) -> None:
    filled(tmp_path, "none", [])
    for words in (
        ["topics"],
        ["describe", "none"],
        ["head", "none"],
        ["tail", "none"],
        ["get", "none"],
        ["query", "none"],
        ["versions", "none"],
        ["tag", "none"],
        ["groups", "none"],
        ["verify", "none"],
        ["wal", "inspect", "none"],
        ["wal", "repair", "none"],
        ["compact", "none"],
        ["retain", "none", "--rows", "1", "--yes"],
        ["tag", "none", "start"],
        ["restore", "none", "--tag", "start", "--yes"],
        ["export", "none", "-"],
        ["export", "none", str(tmp_path / "none.parquet")],
        ["export", "none", str(tmp_path / "none.lance")],
        ["import", "again", str(tmp_path / "none.parquet")],
        ["import", "again", str(tmp_path / "none.lance")],
    ):
        code, _, err = call(*words, "-s", tmp_path)
        assert code == 0, (words, err)
    assert call("search", "none", "--text", "x", "-s", tmp_path).code == 2


def test_old_records_are_shown_with_later_fields_and_defaults(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "t", [{"id": "a", "n": 1}], buckets=1)
    defaults = {"schema_defaults": {"later": "unknown"}}
    filled(tmp_path, "t", [{"id": "b", "n": 2.5, "later": "x", "más": None}], buckets=1, **defaults)
    expected = [
        {"id": "a", "n": 1.0, "later": "unknown", "más": None},
        {"id": "b", "n": 2.5, "later": "x", "más": None},
    ]
    brief = [{"id": "a", "n": 1.0, "later": "unknown"}, {"id": "b", "n": 2.5, "later": "x"}]
    for command in ("head", "tail", "get", "query"):
        words = [command, "t", "--json", "-s", tmp_path, *(["-n", 9] if command == "get" else [])]
        assert [one.record for one in decoded(command, call(*words).out)] == brief
        with_nulls = decoded(command, call(*words, "--nulls").out)
        assert [one.record for one in with_nulls] == expected
    exported = call("export", "t", "-", "-s", tmp_path).out.splitlines()
    assert [json.loads(line) for line in exported] == expected
    for command in ("query", "export"):
        extra = ["-", "-w", "later = 'x'"] if command == "export" else ["later = 'x'"]
        assert call(command, "t", *extra, "-s", tmp_path).out.count("\n") == 1


def test_get_reports_offsets_that_retention_removed(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    for part in range(3):
        filled(tmp_path, "t", [{"id": "a", "n": part * 10 + n} for n in range(10)], buckets=1)
    assert call("retain", "t", "--rows", 10, "--yes", "-s", tmp_path).code == 0
    (first, *_) = decoded("head", call("head", "t", "--json", "-s", tmp_path).out)
    assert (first.offset, first.record["n"]) == (20, 20)
    (got,) = decoded("get", call("get", "t", "--json", "-s", tmp_path).out)
    assert got.offset == 20
    for offset in (0, 5):
        code, out, err = call("get", "t", "-o", offset, "-s", tmp_path)
        assert (code, out) == (1, "")
        assert "retention" in err
        assert "20" in err
    assert call("get", "t", "-o", 99, "-s", tmp_path).out == ""
    assert call("export", "t", "-", "-s", tmp_path).out.count("\n") == 10
    described = decoded("describe", call("describe", "t", "--json", "-s", tmp_path).out)
    (bucket,) = described.buckets
    assert (bucket.start_offset, bucket.end_offset, described.rows) == (20, 30, 10)
    assert call("verify", "t", "-s", tmp_path).code == 0


@pytest.mark.parametrize("command", ["head", "tail", "get", "query", "export", "groups"])
def test_read_commands_show_what_a_crashed_owner_left_in_its_log(
    command: str, crashed: Path, call: Callable[..., Answer]
) -> None:
    inspected = decoded("wal inspect", call("wal", "inspect", "t", "--json", "-s", crashed).out)
    assert (inspected[0].state, inspected[0].pending_frames > 0) == ("whole", True)
    assert "frames to flush" in call("describe", "t", "-s", crashed).out
    words = {"export": ["-"], "get": ["-n", "9"], "groups": []}.get(command, [])
    answer = call(command, "t", *words, "-s", crashed)
    assert answer.code == 0
    if command != "groups":
        assert answer.out.count("\n") == 5
    # Commands that read only tables recover the log; the others leave it alone.
    recovered = "5" if command == "export" else "0"
    assert call("topics", "-s", crashed).out.splitlines()[1].split()[1] == recovered


def test_search_understands_a_query_and_ways_to_match(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    texts = ["red fox", "fox, red", "foxes", "打开登录页面"]
    records = [{"id": n, "text": text} for n, text in enumerate(texts)]

    async def fill() -> None:
        async with await write_queue("t", storage_path=str(tmp_path), backend="lance") as writer:
            await writer.put(records)

    asyncio.run(fill())

    def found(*options: object) -> list[int]:
        answer = call("search", "t", "--json", "-s", tmp_path, *options)
        assert answer.code == 0, answer.err
        return sorted(json.loads(line)["record"]["id"] for line in answer.out.splitlines())

    assert found("-t", "red fox") == [0, 1]
    assert found("-t", '"red fox"') == [0]
    assert found("-t", '"red fox"', "--match", "any") == [0, 1]
    assert found("-t", "red fox", "--match", "phrase") == [0]
    assert found("-t", "fox* -red") == [2]
    assert found("-t", "foxen", "--fuzziness", 1) == [2]
    assert found("-t", "登录") == [3]
    wrong = call("search", "t", "-t", "-red", "-s", tmp_path)
    assert wrong.code == 2
    assert "only excludes words" in wrong.err


def test_search_reads_its_vector_from_a_file(
    storage: Path, tmp_path: Path, call: Callable[..., Answer]
) -> None:
    (tmp_path / "v.json").write_text("[0.5, 0.5]")
    found = call("search", "events", "-v", f"@{tmp_path / 'v.json'}", "-k", 1, "-s", storage)
    assert found.code == 0
    assert '"n":10' in found.out
    for wrong in ("[1", "{}", '["a"]', "[true]", "@/nowhere"):
        code, out, err = call("search", "events", "-v", wrong, "-s", storage)
        assert code in (1, 2), wrong
        assert (out, err.count("\n")) == ("", 1)
        assert "should not happen" not in err, wrong


def test_restore_moves_groups_back_and_later_records_follow(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "t", [{"id": "a", "n": n} for n in range(5)], buckets=1)
    assert call("tag", "t", "five", "-s", tmp_path).code == 0
    filled(tmp_path, "t", [{"id": "a", "n": n} for n in range(5, 9)], buckets=1)

    async def read(count: int) -> list[Any]:
        reader = await read_queue(topic="t", storage_path=str(tmp_path), group="g")
        async with reader:
            found = await reader.get(limit=count)
            await reader.commit()
            return [one["n"] for one in found]

    assert asyncio.run(read(8)) == list(range(8))
    done = call("restore", "t", "--tag", "five", "--yes", "-s", tmp_path)
    assert done.code == 0
    assert "group g continues at 5 instead of 8" in done.out
    assert "4 records removed" in done.out
    (group,) = decoded("groups", call("groups", "t", "g", "--json", "-s", tmp_path).out)
    assert (group.lag, group.buckets[0].committed) == (0, 5)
    filled(tmp_path, "t", [{"id": "a", "n": 50}], buckets=1)
    assert asyncio.run(read(8)) == [50]
    shown = decoded("tail", call("tail", "t", "-n", 2, "--json", "-s", tmp_path).out)
    assert [(one.offset, one.record["n"]) for one in shown] == [(4, 4), (5, 50)]
    assert call("export", "t", "-", "-s", tmp_path).out.count("\n") == 6
    assert call("verify", "t", "-s", tmp_path).code == 0


def test_topics_lists_a_damaged_topic_with_its_problem(
    storage: Path, call: Callable[..., Answer]
) -> None:
    (storage / "broken").mkdir()
    (storage / "broken" / "topic.json").write_text("{")
    (storage / "a file").write_text("no topic")
    (storage / "a folder").mkdir()
    found = decoded("topics", call("topics", "--json", "-s", storage).out)
    assert [(one.topic, one.problem is None) for one in found] == [
        ("broken", False),
        ("events", True),
    ]
    assert "topic.json" in found[0].problem


def test_describe_shows_a_damaged_bucket_and_the_sound_ones(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    filled(tmp_path, "t", [{"id": str(n), "n": n} for n in range(40)], buckets=2)

    async def read() -> None:
        reader = await read_queue(topic="t", storage_path=str(tmp_path), group="g")
        async with reader:
            await reader.get(limit=40)
            await reader.commit()

    asyncio.run(read())
    for manifest in (tmp_path / "t" / "bucket_0").rglob("*.manifest"):
        manifest.write_bytes(b"")
    done = call("describe", "t", "--json", "-s", tmp_path)
    assert done.code == 0, done.err
    found = decoded("describe", done.out)
    damaged, sound = found.buckets
    assert "bucket_0" in damaged.problem
    assert (sound.problem, sound.rows) == (None, found.rows)
    assert found.rows > 0
    assert [one.name for one in found.fields] == ["id", "n"]
    assert [(one.group, [b.bucket for b in one.buckets]) for one in found.groups] == [("g", [1])]
    assert "bucket_0" in call("describe", "t", "-s", tmp_path).out


def test_topic_of_the_lance_backend_is_listed_and_readable(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    async def make() -> None:
        writer = await write_queue(
            topic="lance", storage_path=str(tmp_path), backend="lance", num_buckets=1
        )
        async with writer:
            await writer.put({"id": "a"})

    asyncio.run(make())
    (facts,) = decoded("topics", call("topics", "--json", "-s", tmp_path).out)
    assert (facts.backend, facts.rows, facts.problem) == ("lance", 1, None)
    assert call("verify", "lance", "-s", tmp_path).code == 0
    assert call("wal", "inspect", "lance", "-s", tmp_path).code == 0
    assert call("head", "lance", "-s", tmp_path).out.count("\n") == 1
