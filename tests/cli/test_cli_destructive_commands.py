"""Commands that remove data: confirmation, dry runs, groups, damaged logs and files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli_contracts import decoded
from support.cli_runner import Answer, files_in, filled, in_terminal, piped, plain

from persisting.queue import read_queue

DESTRUCTIVE = [
    ["restore", "events", "--at", "2020-01-01"],
    ["restore", "events", "--version", '{"0": 1}'],
    ["retain", "events", "--rows", "1"],
    ["retain", "events", "--bytes", "1k"],
    ["retain", "events", "--age", "0s"],
    ["groups", "events", "trainers", "--reset-to", "earliest"],
    ["groups", "events", "trainers", "--delete"],
]


@pytest.mark.parametrize("words", DESTRUCTIVE, ids=" ".join)
def test_destructive_command_changes_nothing_without_yes_or_in_a_dry_run(
    words: list[str], storage: Path, call: Callable[..., Answer]
) -> None:
    before = files_in(storage)
    code, out, err = call(*words, "-s", storage)
    assert (code, out) == (2, "")
    assert "--yes" in err
    dry = call(*words, "--dry-run", "-s", storage)
    assert dry.code == 0
    assert dry.out
    assert "error" not in dry.err
    assert call(*words, "--dry-run", "--yes", "--json", "-s", storage).code == 0
    assert files_in(storage) == before


def test_restore_asks_for_confirmation_and_stops_on_no(storage: Path) -> None:
    before = files_in(storage)
    words = ("restore", "events", "--at", "2020-01-01", "-s", storage)
    refused, _ = in_terminal(*words, answer="n\n")
    assert refused.code == 130
    assert "20 records will be removed" in plain(refused.err)
    assert files_in(storage) == before
    agreed, _ = in_terminal(*words, answer="y\n")
    assert agreed.code == 0
    assert "20 records removed" in plain(agreed.out)


def test_retain_drops_what_its_dry_run_announced(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    for part in range(4):
        filled(tmp_path, "t", [{"id": "a", "n": part * 10 + n} for n in range(10)], buckets=1)
    words = ("retain", "t", "--rows", 15, "-s", tmp_path)
    plan = decoded("retain", call(*words, "--dry-run", "--json").out)
    assert (plan.dropped, plan.start_offsets) == (20, {"0": 20})
    done = call(*words, "--yes")
    assert "20 records dropped" in done.out
    assert call("export", "t", "-", "-c", "n", "-s", tmp_path).out.startswith('{"n":20}')
    assert call("retain", "t", "-s", tmp_path).code == 2
    for wrong in (["--rows", "0"], ["--bytes", "much"], ["--age", "1 year"]):
        assert call("retain", "t", *wrong, "--yes", "-s", tmp_path).code == 2


def test_tag_command_creates_lists_and_deletes_tags(
    storage: Path, call: Callable[..., Answer]
) -> None:
    assert call("tag", "events", "v1", "-s", storage).out.splitlines()[1].split()[0] == "v1"
    listed = call("tag", "events", "-s", storage).out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["first", "v1"]
    assert call("tag", "events", "v1", "--delete", "-s", storage).out == "tag v1 deleted\n"
    for words in (["v1", "--delete"], ["--delete"], ["a/b"], [""]):
        code, out, err = call("tag", "events", *words, "-s", storage)
        assert (code, out, err.count("\n")) == (2, "", 1), words


def test_restore_by_version_takes_a_version_per_bucket(
    storage: Path, call: Callable[..., Answer]
) -> None:
    listed = decoded("versions", call("versions", "events", "--json", "-s", storage).out)
    first = next(one for one in listed if one.bucket == 0)
    done = call(
        "restore", "events", "--version", json.dumps({"0": first.version}), "--yes", "-s", storage
    )
    assert done.code == 0
    now = decoded("describe", call("describe", "events", "--json", "-s", storage).out)
    assert now.buckets[0].rows == first.rows
    wrongs = ("1", '{"0": 999}', '{"9": 1}', '{"0": "x"}', "[1]", "x", "null")
    for wrong in (*wrongs, '{"0": 1.7}', '{"0": true}', '{"0": "1"}', '{"a": 1}'):
        code, out, err = call("restore", "events", "--version", wrong, "--yes", "-s", storage)
        assert (code, out, err.count("\n")) == (2, "", 1), (wrong, err)
        assert "should not happen" not in err, wrong
    both = call("restore", "events", "--version", "{}", "--tag", "first", "-s", storage)
    assert both.code == 2


# Consumer groups


async def _read(storage: Path, group: str, count: int) -> list[int]:
    reader = await read_queue(topic="events", storage_path=str(storage), group=group)
    async with reader:
        found = await reader.get(limit=count)
        await reader.commit()
        return sorted(one["n"] for one in found)


def _generations(storage: Path, group: str) -> list[int]:
    places = sorted((storage / "events" / "groups" / group).glob("*.json"))
    return [json.loads(one.read_bytes())["generation"] for one in places]


def test_reset_group_continues_at_its_new_offset_and_earlier_members_are_fenced(
    storage: Path, call: Callable[..., Answer]
) -> None:
    before = _generations(storage, "trainers")
    assert len(before) == 2

    def reset(where: str, *more: str) -> Any:
        words = ("groups", "events", "trainers", "--reset-to", where, *more, "--yes", "--json")
        answer = call(*words, "-s", storage)
        assert answer.code == 0, answer.err
        return decoded("groups", answer.out)[0]

    assert reset("earliest").lag == 20
    after = _generations(storage, "trainers")
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert asyncio.run(_read(storage, "trainers", 100)) == list(range(20))
    assert reset("latest").lag == 0
    assert asyncio.run(_read(storage, "trainers", 100)) == []
    assert reset("3").lag == 20 - 6
    assert reset("999").lag == 0
    assert reset("1h").lag == 20
    assert reset("2100-01-01").lag == 0
    only = reset("earliest", "--bucket", "1")
    assert [one.lag for one in only.buckets] == [0, only.buckets[1].end_offset]
    assert _generations(storage, "trainers") > after


def test_group_can_be_created_by_a_reset_and_deleted(
    storage: Path, call: Callable[..., Answer]
) -> None:
    words = ("groups", "events", "new", "-s", storage)
    assert call(*words).code == 2
    assert call(*words, "--reset-to", "latest", "--dry-run").code == 0
    assert call(*words).code == 2, "a dry run made it"
    assert call(*words, "--reset-to", "latest", "--yes").code == 0
    assert asyncio.run(_read(storage, "new", 100)) == []
    assert call(*words, "--delete", "--yes").code == 0
    assert call(*words).code == 2
    assert asyncio.run(_read(storage, "new", 100)) == list(range(20))
    for wrong in (["nope", "--delete"], ["new", "--reset-to", "never"], ["--delete"]):
        assert call("groups", "events", *wrong, "--yes", "-s", storage).code == 2, wrong
    for wrong in ("../events", ".", "", "a/b"):
        for change in (["--delete"], ["--reset-to", "earliest"]):
            assert call("groups", "events", wrong, *change, "--yes", "-s", storage).code == 2, wrong
    both = ("--delete", "--reset-to", "latest")
    assert call("groups", "events", "new", *both, "--yes", "-s", storage).code == 2


async def test_group_with_an_open_reader_cannot_be_changed(storage: Path) -> None:
    reader = await read_queue(topic="events", storage_path=str(storage), group="trainers")
    async with reader:
        await reader.get(limit=1)
        before = _generations(storage, "trainers")
        for change in (["--reset-to", "earliest"], ["--delete"]):
            words = ("groups", "events", "trainers", *change, "--yes", "-s", storage)
            code, out, err = await asyncio.to_thread(piped, *words)
            assert (code, out) == (4, ""), change
            assert "close its readers" in err
        assert _generations(storage, "trainers") == before
        await reader.get(limit=3)
        await reader.commit()
        shown = await asyncio.to_thread(piped, "groups", "events", "--json", "-s", storage)
        assert decoded("groups", shown.out)[0].members == 1


async def test_group_whose_reader_waits_for_a_bucket_cannot_be_changed(tmp_path: Path) -> None:
    rows = [{"id": "a", "n": n} for n in range(4)]
    await asyncio.to_thread(lambda: filled(tmp_path, "t", rows, buckets=1))
    place = {"topic": "t", "storage_path": str(tmp_path), "group": "g"}
    first, second = await read_queue(**place), await read_queue(**place)
    await first.get(limit=1)
    await second.get(limit=1)
    holder, waiting = (first, second) if first.buckets else (second, first)
    await holder.close()
    code, _, err = await asyncio.to_thread(
        piped, "groups", "t", "g", "--delete", "--yes", "-s", tmp_path
    )
    assert (code, "close its readers" in err) == (4, True)
    assert len(await waiting.get(wait=True, timeout=60)) > 0
    await waiting.close()


# Damage


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def _log(storage: Path) -> Path:
    (segment,) = (storage / "t" / "log").glob("*/*.wal")
    return segment


def test_torn_log_is_not_damage_and_needs_no_repair(
    crashed: Path, call: Callable[..., Answer]
) -> None:
    log = _log(crashed)
    log.write_bytes(log.read_bytes()[:-3])
    before = files_in(crashed)
    code, out, _ = call("wal", "inspect", "t", "--json", "-s", crashed)
    (found,) = decoded("wal inspect", out)
    assert (code, found.state, found.problem) == (0, "torn", None)
    assert found.torn_bytes > 0
    repaired = call("wal", "repair", "t", "--yes", "-s", crashed)
    assert (repaired.code, repaired.out) == (0, "no log is damaged; nothing to repair\n")
    assert files_in(crashed) == before
    assert call("head", "t", "-s", crashed).out.count("\n") == 4


def test_damaged_log_is_reported_by_every_command_and_repaired_only_with_yes(
    crashed: Path, call: Callable[..., Answer]
) -> None:
    log = _log(crashed)
    size = log.stat().st_size
    _flip(log, size * 4 // 5)
    before = files_in(crashed)
    (found,) = decoded(
        "wal inspect", _ended(call, 5, "wal", "inspect", "t", "--json", "-s", crashed)
    )
    assert (found.state, found.owned) == ("damaged", False)
    assert log.name in found.problem
    report = decoded("verify", _ended(call, 5, "verify", "t", "--json", "-s", crashed))
    assert (report.ok, report.logs[0].state) == (False, "damaged")
    assert "DAMAGE" in _ended(call, 5, "verify", "t", "-s", crashed)
    assert "damaged" in _ended(call, 0, "describe", "t", "-s", crashed)
    _ended(call, 0, "topics", "-s", crashed)
    for words in (["head", "t"], ["export", "t", "-"], ["put", "t", "/dev/null"], ["compact", "t"]):
        answer = call(*words, "-s", crashed)
        assert (answer.code, answer.err.count("error: ")) == (5, 1), (words, answer)
    assert call("wal", "repair", "t", "-s", crashed).code == 2
    plan = decoded(
        "wal repair", _ended(call, 0, "wal", "repair", "t", "--dry-run", "--json", "-s", crashed)
    )
    assert (plan[0].dry_run, plan[0].copies) == (True, [])
    changed = {n: c for n, c in files_in(crashed).items() if not n.endswith(".lock")}
    assert changed == {n: c for n, c in before.items() if not n.endswith(".lock")}
    repaired = call("wal", "repair", "t", "--yes", "--json", "-s", crashed)
    assert repaired.code == 0
    done = decoded("wal repair", repaired.out)
    assert (done[0].dry_run, done[0].cut_bytes) == (False, plan[0].cut_bytes)
    assert done[0].lost_sequences == plan[0].lost_sequences
    kept = b"".join(Path(copy).read_bytes() for copy in done[0].copies)
    assert len(kept) == done[0].cut_bytes
    assert before[str(log.relative_to(crashed))].endswith(kept)
    rows = [
        json.loads(line)["n"] for line in call("export", "t", "-", "-s", crashed).out.splitlines()
    ]
    assert rows == list(range(len(rows)))
    assert 0 < len(rows) < 5
    assert call("verify", "t", "-s", crashed).code == 0
    again = call("wal", "repair", "t", "--yes", "-s", crashed)
    assert again.out == "no log is damaged; nothing to repair\n"


def _ended(call: Callable[..., Answer], code: int, *words: object) -> str:
    answer = call(*words)
    assert (answer.code, answer.err) == (code, ""), (words, answer)
    return answer.out


def test_verify_names_a_damaged_data_file(storage: Path, call: Callable[..., Answer]) -> None:
    data = next((storage / "events" / "bucket_1" / "data.lance" / "data").iterdir())
    _flip(data, data.stat().st_size // 2)
    report = decoded("verify", _ended(call, 5, "verify", "events", "--json", "-s", storage))
    (damage,) = report.damaged
    assert (damage.bucket, data.name in damage.file, report.ok) == (1, True, False)
    assert damage.start_offset is not None
    shown = call("verify", "events", "-s", storage)
    assert data.name in shown.out
    data.unlink()
    assert call("verify", "events", "-s", storage).code == 5
    answer = call("export", "events", "-", "-s", storage)
    assert answer.code == 5
    assert "Traceback" not in answer.err
    assert "should not happen" not in answer.err


def test_verify_reports_a_lost_table_as_damage(storage: Path, call: Callable[..., Answer]) -> None:
    shutil.rmtree(storage / "events" / "bucket_0" / "data.lance" / "_versions")
    answer = call("verify", "events", "-s", storage)
    assert answer.code == 5
    assert "should not happen" not in answer.err
