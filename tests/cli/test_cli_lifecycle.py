"""``create``, ``delete`` and ``index``."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_contracts import decoded
from support.cli_runner import (
    Answer,
    files_in,
    filled,
    in_terminal,
    line_of,
    owner,
    piped,
    released,
)

from persisting import fs
from persisting.queue import read_queue, write_queue
from persisting.topic import deletion


class TestCreate:
    def test_new_topic_is_durable_by_default(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        code, out, err = call("create", "t", "--json", "-s", tmp_path)
        assert (code, err) == (0, "")
        made = decoded("create", out)
        assert made.options == {"enable_wal": True, "wal_sync_interval": 0.0}
        assert (made.backend, made.num_buckets, made.bucket_column) == ("persisting", 4, "id")
        assert call("count", "t", "-s", tmp_path).out == "0\n"

    def test_settings_of_a_created_topic_are_stored(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        words = ["--buckets", 2, "--bucket-column", "user", "--set", "wal_sync_interval=1"]
        code, out, _ = call("create", "t", *words, "-s", tmp_path)
        assert (code, out) == (0, f"topic t with 2 buckets by 'user' in {tmp_path / 't'}\n")
        found = decoded("describe", call("describe", "t", "--json", "-s", tmp_path).out)
        assert found.options == {"enable_wal": True, "wal_sync_interval": 1}

    @pytest.mark.parametrize(
        "words",
        [
            ["--set", "enable_wal=false"],
            ["--set", "wal_sync_interval=1"],
            ["--backend", "lance"],
            ["--backend", "memory"],
        ],
        ids=str,
    )
    def test_durable_refuses_settings_that_contradict_it(
        self, tmp_path: Path, call: Callable[..., Answer], words: list[str]
    ) -> None:
        code, out, err = call("create", "t", "--durable", *words, "-s", tmp_path / "q")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert not (tmp_path / "q" / "t" / "topic.json").exists()

    def test_existing_topic_is_left_alone(self, storage: Path, call: Callable[..., Answer]) -> None:
        before = files_in(storage)
        code, _, err = call("create", "events", "--buckets", 9, "-s", storage)
        assert (code, "already exists" in err) == (2, True)
        assert files_in(storage) == before


class TestDelete:
    def test_dry_run_deletes_nothing(self, storage: Path, call: Callable[..., Answer]) -> None:
        before = files_in(storage)
        code, out, _ = call("delete", "events", "--dry-run", "-s", storage)
        assert code == 0
        assert out.startswith("topic events with 20 records (")
        assert out.endswith("would be deleted\n")
        assert files_in(storage) == before

    def test_deleted_topic_is_gone_and_can_be_created_again(
        self, storage: Path, call: Callable[..., Answer]
    ) -> None:
        printed = call("delete", "events", "--yes", "--json", "-s", storage).out
        assert (decoded("delete", printed).rows, decoded("delete", printed).dry_run) == (20, False)
        assert list(storage.iterdir()) == []
        assert call("count", "events", "-s", storage).code == 3
        filled(storage, "events", [{"id": 1}])
        assert call("count", "events", "-s", storage).out == "1\n"

    def test_delete_requires_confirmation(self, storage: Path, call: Callable[..., Answer]) -> None:
        code, _, err = piped("delete", "events", "-s", storage)
        assert (code, "--yes" in err) == (2, True)
        answer, _ = in_terminal("delete", "events", "-s", storage, answer="n\n")
        assert answer.code == 130
        assert call("count", "events", "-s", storage).out == "20\n"

    def test_topic_with_a_running_owner_is_refused_and_the_owner_undisturbed(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        with owner(tmp_path, "live") as child:
            for words in (["--yes"], ["--dry-run"]):
                code, _, err = call("delete", "live", *words, "-s", tmp_path)
                assert (code, f"process {child.pid}" in err) == (4, True)
            count = released(child)
        assert call("count", "live", "-s", tmp_path).out == f"{count}\n"

    async def test_topic_that_a_group_reads_is_refused(self, storage: Path) -> None:
        async with await read_queue("events", storage_path=str(storage), group="g") as member:
            await member.get(limit=1)
            answer = await asyncio.to_thread(piped, "delete", "events", "-y", "-s", storage)
        assert (answer.code, "group 'g'" in answer.err) == (4, True)
        assert (storage / "events" / "topic.json").exists()

    def test_log_of_a_crashed_owner_is_deleted_too(
        self, crashed: Path, call: Callable[..., Answer]
    ) -> None:
        assert call("delete", "t", "-y", "-s", crashed).code == 0
        assert list(crashed.iterdir()) == []

    def test_missing_topics_backups_and_links_are_refused(
        self, storage: Path, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        assert call("delete", "nope", "-y", "-s", storage).code == 3
        assert call("delete", "nope", "-y", "-s", tmp_path / "nowhere").code == 3
        backup = tmp_path / "copy"
        assert call("backup", "create", "events", backup, "-s", storage).code == 0
        assert call("delete", backup, "-y").code == 2
        (storage / "link").symlink_to(storage / "events")
        code, _, err = call("delete", "link", "-y", "-s", storage)
        assert (code, "symbolic link" in err) == (2, True)
        assert call("count", "events", "-s", storage).out == "20\n"

    def test_damaged_topic_can_be_deleted(self, storage: Path, call: Callable[..., Answer]) -> None:
        (storage / "events" / "topic.json").write_text("{")
        assert call("delete", "events", "-y", "-s", storage).code == 0
        assert list(storage.iterdir()) == []

    def test_interrupted_deletion_is_finished_by_the_next(
        self, storage: Path, call: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dies(path: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", dies)
            with pytest.raises(KeyboardInterrupt):
                deletion.delete(storage / "events")
        assert not (storage / "events").exists()
        assert len(list(storage.iterdir())) == 1
        assert call("topics", "-s", storage) == (0, "", f"no topics in {storage}\n")
        code, out, _ = call("delete", "events", "-y", "-s", storage)
        assert (code, "was interrupted, is removed" in out) == (0, True)
        assert list(storage.iterdir()) == []

    def test_failed_rename_leaves_the_topic_whole(
        self, storage: Path, call: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: fs.FileSystem, source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(fs.FileSystem, "rename", full)
            assert call("delete", "events", "-y", "-s", storage).code == 1
        assert call("verify", "events", "-s", storage).code == 0
        assert call("count", "events", "-s", storage).out == "20\n"

    def test_killed_deletion_leaves_the_topic_whole_or_deleted(
        self, tmp_path: Path, call: Callable[..., Answer]
    ) -> None:
        for number in range(8):
            filled(tmp_path / "q", "t", [{"id": n} for n in range(50)])
            with subprocess.Popen(
                [sys.executable, "-c", DELETING, str(tmp_path / "q" / "t")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as child:
                line_of(child.stdout)
                assert child.stdin is not None
                child.stdin.write(b"\n")
                child.stdin.flush()
                time.sleep(0.0004 * number)
                child.kill()
            if (tmp_path / "q" / "t").exists():
                assert call("count", "t", "-s", tmp_path / "q").out == "50\n"
            shutil.rmtree(tmp_path / "q", ignore_errors=True)

    async def test_writer_of_this_process_fences_the_deletion(self, tmp_path: Path) -> None:
        from persisting.errors import BucketLocked

        async with await write_queue("t", storage_path=str(tmp_path), durable=True) as writer:
            await writer.put({"id": 1})
            with pytest.raises(BucketLocked, match="this process"):
                deletion.delete(tmp_path / "t")
            await writer.put({"id": 2})
        deletion.delete(tmp_path / "t")
        assert os.listdir(tmp_path) == []


DELETING = """
import sys
from pathlib import Path
from persisting.topic import deletion
print("ready", flush=True)
sys.stdin.readline()
deletion.delete(Path(sys.argv[1]))
"""


class TestIndex:
    def test_indexes_are_created_listed_and_dropped(
        self, storage: Path, call: Callable[..., Answer]
    ) -> None:
        assert call("index", "list", "events", "-s", storage) == (0, "", "no indexes\n")
        code, out, err = call("index", "create", "events", "text", "--json", "-s", storage)
        assert (code, err) == (0, "")
        made = decoded("index create", out)
        assert (made.column, made.kind, made.metric) == ("text", "text", None)
        assert (made.rows, made.behind) == (20, 0)
        assert call("index", "create", "events", "n", "--kind", "bitmap", "-s", storage).code == 0
        listed = decoded("index list", call("index", "list", "events", "--json", "-s", storage).out)
        assert {(one.column, one.kind) for one in listed} == {("text", "text"), ("n", "bitmap")}
        assert call("index", "drop", "events", "n", "-s", storage).out == "1 index dropped\n"
        assert call("index", "drop", "events", "n", "-s", storage).out == "0 indexes dropped\n"
        shown = call("index", "list", "events", "-s", storage).out.splitlines()
        assert [line.split()[0] for line in shown] == ["field", "text"]

    def test_vector_index_has_a_metric(self, storage: Path, call: Callable[..., Answer]) -> None:
        words = ["index", "create", "events", "v", "--metric", "cosine", "--json", "-s", storage]
        made = decoded("index create", call(*words).out)
        assert (made.kind, made.metric) == ("ivf_flat", "cosine")

    def test_wrong_fields_and_kinds_are_refused(
        self, storage: Path, call: Callable[..., Answer]
    ) -> None:
        for words, hint in (
            (["tex"], "did you mean 'text'?"),
            (["text", "--kind", "vector"], "takes no vector index"),
            (["text", "--kind", "nope"], "kind must be"),
        ):
            code, out, err = call("index", "create", "events", *words, "-s", storage)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert hint in err
        assert call("index", "list", "events", "-s", storage).err == "no indexes\n"

    def test_index_is_created_and_dropped_through_a_running_owner(self, tmp_path: Path) -> None:
        with owner(tmp_path, "live") as child:
            assert piped("index", "create", "live", "n", "-s", tmp_path).code == 0
            listed = piped("index", "list", "live", "-s", tmp_path).out.splitlines()
            assert [line.split()[0] for line in listed] == ["field", "n"]
            assert piped("index", "drop", "live", "n", "-s", tmp_path).out == "1 index dropped\n"
            released(child)

    def test_owner_without_a_socket_refuses_an_index(self, tmp_path: Path) -> None:
        with owner(tmp_path, "live", local_socket=False) as child:
            assert piped("index", "create", "live", "n", "-s", tmp_path).code == 4
            released(child)
