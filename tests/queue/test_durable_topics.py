"""What write_queue stores by default, with durable=True, and how it reports a missing await."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from persisting.errors import InvalidArgument
from persisting.queue import PersistingBackend, read_queue, write_queue

FORGETFUL = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    async with await write_queue("oops", storage_path=sys.argv[1]) as writer:
        await writer.put({"id": 1})

asyncio.run(main())
"""


class TestTopicInMemoryByDefault:
    def test_script_that_names_a_storage_path_sees_the_warning(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-c", FORGETFUL, str(tmp_path / "queues")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "topic 'oops' is in memory and stores nothing in" in done.stderr
        assert "durable=True" in done.stderr
        assert not (tmp_path / "queues").exists()

    async def test_warning_names_the_line_that_opened_the_topic(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="stores nothing") as caught:
            async with await write_queue("t", storage_path=str(tmp_path)):
                pass
        assert [warning.filename for warning in caught] == [__file__]

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"backend": "memory", "storage_path": "queues"},
            {"backend": "lance", "storage_path": "queues"},
            {"durable": True, "storage_path": "queues"},
        ],
        ids=str,
    )
    async def test_no_warning_if_the_caller_chose(
        self, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with await write_queue("t", **arguments) as writer:
                assert (writer.folder is None) == (
                    arguments.get("backend") in (None, "memory") and "durable" not in arguments
                )

    async def test_no_warning_for_a_topic_that_exists_on_disk(self, tmp_path: Path) -> None:
        async with await write_queue("t", storage_path=str(tmp_path), backend="lance"):
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with await write_queue("t", storage_path=str(tmp_path)) as writer:
                assert writer.folder == tmp_path / "t"


class TestDurableTopic:
    async def test_put_is_synced_before_it_is_acknowledged(self, tmp_path: Path) -> None:
        async with await write_queue("t", storage_path=str(tmp_path), durable=True) as writer:
            await writer.put({"id": 1})
            stats = await writer.stats()
        assert (stats["backend"], stats["wal_enabled"]) == ("PersistingBackend", True)
        assert stats["wal_sync_interval"] == 0.0

    async def test_topic_stays_durable_for_later_writers(self, tmp_path: Path) -> None:
        async with await write_queue("t", storage_path=str(tmp_path), durable=True):
            pass
        async with await write_queue("t", storage_path=str(tmp_path)) as writer:
            stats = await writer.stats()
        assert (stats["wal_enabled"], stats["wal_sync_interval"]) == (True, 0.0)

    async def test_durable_keeps_other_options_of_the_backend(self, tmp_path: Path) -> None:
        options = {"flush_threshold": 7, "enable_wal": True, "wal_sync_interval": 0}
        async with await write_queue(
            "t",
            storage_path=str(tmp_path),
            backend=PersistingBackend,
            backend_options=options,
            durable=True,
        ) as writer:
            assert writer._topic.config.options == options

    @pytest.mark.parametrize("before", ["lance", "persisting"])
    async def test_existing_topic_becomes_durable_with_a_warning(
        self, before: str, tmp_path: Path
    ) -> None:
        async with await write_queue("t", storage_path=str(tmp_path), backend=before) as writer:
            await writer.put({"id": 1})
        with pytest.warns(UserWarning, match="from now on"):
            writer = await write_queue("t", storage_path=str(tmp_path), durable=True)
        async with writer:
            await writer.put({"id": 2})
            assert (await writer.stats())["wal_enabled"]
        async with await read_queue("t", storage_path=str(tmp_path)) as reader:
            assert sorted(record["id"] for record in await reader.get()) == [1, 2]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"backend": "lance"}, "durable=True needs the backend 'persisting', got 'lance'"),
            ({"backend": "memory"}, "needs the backend 'persisting'"),
            ({"backend_options": {"enable_wal": False}}, "enable_wal=False: leave out one"),
            ({"backend_options": {"wal_sync_interval": 1.0}}, "wal_sync_interval=1.0"),
            ({"backend_options": [1]}, "must be a dict"),
            ({"backend": "nonsense"}, "unknown backend"),
        ],
        ids=str,
    )
    async def test_conflicting_arguments_are_refused(
        self, arguments: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(InvalidArgument, match=message):
            await write_queue("t", storage_path=str(tmp_path), durable=True, **arguments)
        assert not list(tmp_path.iterdir())

    async def test_value_that_is_not_a_boolean_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="durable must be True or False"):
            await write_queue("t", storage_path=str(tmp_path), durable="yes")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
class TestMissingAwait:
    def test_method_of_an_unawaited_reader_or_writer_says_what_to_write(self) -> None:
        with pytest.raises(AttributeError, match=r"reader = await read_queue\(…\)"):
            read_queue("t").get()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"before \.put can be used"):
            write_queue("t").put({})  # type: ignore[attr-defined]

    async def test_block_without_await_says_what_to_write(self) -> None:
        with pytest.raises(TypeError, match=r"async with await write_queue\(…\) as writer:"):
            async with write_queue("t"):  # type: ignore[attr-defined]
                pass
        message = r"async with await read_queue\(…\) as reader:"
        with pytest.raises(TypeError, match=message), read_queue("t"):  # type: ignore[attr-defined]
            pass

    def test_opening_call_can_be_passed_wherever_a_coroutine_can(self, tmp_path: Path) -> None:
        def opening() -> Any:
            return write_queue("t", storage_path=str(tmp_path), backend="lance")

        async def use() -> None:
            for opened in (
                await asyncio.create_task(opening()),
                await asyncio.wait_for(opening(), 60),
                (await asyncio.gather(opening()))[0],
                await asyncio.shield(opening()),
            ):
                await opened.close()

        asyncio.run(use())
        asyncio.run(asyncio.wait_for(_close(opening()), 60))
        loop = asyncio.new_event_loop()
        try:
            writer = loop.run_until_complete(opening())
            loop.run_until_complete(writer.close())
        finally:
            loop.close()

    async def test_cancelled_opening_is_cancelled(self, tmp_path: Path) -> None:
        task = asyncio.create_task(read_queue("t", storage_path=str(tmp_path), wait_for_topic=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def _close(opening: Any) -> None:
    await (await opening).close()
