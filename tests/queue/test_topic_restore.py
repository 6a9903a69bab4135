"""Restoring a topic to an older state, in this process and in others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.children import python, tell
from support.restore_contract import LoggedRestoreContract, RestoreContract, tagged
from support.topic_homes import Following, Home, home_in, taken
from support.topic_places import drained, ids, numbered

from persisting.errors import BucketLocked
from persisting.queue import LanceBackend, read_queue, write_queue
from persisting.topic.routing import route

_NIGHTLY = pytest.mark.nightly


class TestRestore(RestoreContract):
    pass


class TestLoggedRestore(LoggedRestoreContract):
    @pytest.fixture(params=["here-persisting", pytest.param("one-persisting", marks=_NIGHTLY)])
    async def home(self, request: Any, tmp_path: Path) -> AsyncIterator[Home]:
        async for made in home_in(*request.param.split("-"), tmp_path / "queues"):
            yield made


OWNER = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    options = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}
    writer = await write_queue(topic="t", storage_path=sys.argv[1], backend="persisting",
                               num_buckets=int(sys.argv[2]), backend_options=options)
    for line in sys.stdin:
        word, *rest = line.split()
        if word in ("put", "log"):
            await writer.put([{"id": n} for n in range(int(rest[0]), int(rest[1]))])
            if word == "put":
                await writer.flush()
        else:
            await getattr(writer, word)(*rest)
        print("done", flush=True)
asyncio.run(main())
"""


class TestOtherProcesses:
    """Another process owns the topic; this one reads its files."""

    async def test_readers_of_the_files_follow_a_restore_by_the_owner(self, tmp_path: Path) -> None:
        with python(OWNER, tmp_path, 2) as owner:
            tell(owner, "put 0 30")
            tell(owner, "tag t")
            tell(owner, "put 30 60")
            reader, waiting, follower = [
                await read_queue(topic="t", storage_path=str(tmp_path), local_socket=False)
                for _ in range(3)
            ]
            assert sorted(await taken(reader, 60)) == list(range(60))
            assert sorted(await taken(waiting, 60)) == list(range(60))
            member = await read_queue(
                topic="t", storage_path=str(tmp_path), local_socket=False, group="g"
            )
            assert sorted(await taken(member, 60)) == list(range(60))
            async with aclosing(Following(follower.get_stream(block=True))) as tail:
                await tail.reaches(60)
                coming = asyncio.create_task(taken(waiting, 10))
                tell(owner, "restore t")
                tell(owner, "put 100 110")
                fresh = list(range(100, 110))
                assert sorted(await coming) == fresh
                assert sorted(await taken(reader, 10)) == fresh
                assert sorted((await tail.reaches(70))[60:]) == fresh
            await member.commit()
            await member.close()
            heir = await read_queue(
                topic="t", storage_path=str(tmp_path), local_socket=False, group="g"
            )
            assert sorted(await taken(heir, 10)) == fresh
            with pytest.raises(BucketLocked, match=str(owner.pid)):
                await reader.restore("t")
            for handle in (reader, waiting, follower, heir):
                await handle.close()

    async def test_stream_of_a_topic_restored_earlier_waits_without_busy_polling(
        self, tmp_path: Path
    ) -> None:
        with python(OWNER, tmp_path, 1) as owner:
            tell(owner, "put 0 10")
            tell(owner, "tag t")
            tell(owner, "put 10 20")
            tell(owner, "restore t")
            reader = await read_queue(topic="t", storage_path=str(tmp_path), local_socket=False)
            await reader.set_offset(10)
            polls = 0
            client = reader._topic.bucket(0)
            source = client._source  # type: ignore[attr-defined]

            async def counted() -> Any:
                nonlocal polls
                polls += 1
                return await source()

            client._source = counted  # type: ignore[attr-defined]
            async with aclosing(Following(reader.get_stream(block=True))) as tail:
                await asyncio.sleep(1.0)
                # It polls every 50 ms; a loop without a pause would poll thousands of times.
                assert polls < 100
                tell(owner, "put 100 105")
                assert await tail.reaches(5) == list(range(100, 105))
            await reader.close()

    async def test_reader_restores_a_topic_without_an_owner(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("persisting")
        await tagged(home)
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        assert len(await drained(reader)) == 60
        done = await reader.restore("t")
        assert done["removed"] == 30
        writer = await write_queue(topic=home.topic, storage_path=str(tmp_path))
        await writer.put(numbered(40, 100))
        assert sorted(ids(await drained(reader))) == list(range(100, 140))
        await writer.close()
        await reader.close()

    async def test_restore_names_a_bucket_owned_elsewhere_and_can_be_repeated(
        self, tmp_path: Path, make_home: Any
    ) -> None:
        home = make_home("lance")
        await tagged(home)
        await home.close()
        reader = await read_queue(topic=home.topic, storage_path=str(tmp_path))
        stranger = LanceBackend(1, str(tmp_path / home.topic / "bucket_1"))
        with pytest.raises(BucketLocked, match="bucket_1"):
            await reader.restore("t")
        await stranger.close()
        await reader.restore("t")
        assert sorted(ids(await reader.query())) == list(range(30))
        await reader.close()

    @_NIGHTLY
    async def test_restore_survives_the_kill_of_its_owner(self, tmp_path: Path) -> None:
        with python(OWNER, tmp_path, 3) as owner:
            tell(owner, "put 0 30")
            tell(owner, "tag t")
            tell(owner, "put 30 60")
            tell(owner, "restore t")
            tell(owner, "put 100 110")
            owner.kill()
            owner.wait()
        async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
            assert sorted(ids(await writer.query())) == [*range(30), *range(100, 110)]
            assert [b["epoch"] for b in (await writer.stats())["buckets"]] == [1, 1, 1]

    async def test_log_from_before_the_restore_is_not_replayed_after_a_kill(
        self, tmp_path: Path
    ) -> None:
        with python(OWNER, tmp_path, 3) as owner:
            tell(owner, "log 0 30")
            tell(owner, "tag t")
            tell(owner, "put 30 60")
            tell(owner, "log 60 90")
            tell(owner, "restore t")
            tell(owner, "log 100 110")
            owner.kill()
            owner.wait()
        async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
            assert sorted(ids(await writer.query())) == [*range(30), *range(100, 110)]

    @pytest.mark.parametrize(
        "wait", [pytest.param(wait, marks=_NIGHTLY) for wait in (0.0, 0.01, 0.02, 0.03, 0.06)]
    )
    async def test_owner_killed_during_a_restore_leaves_each_bucket_consistent(
        self, tmp_path: Path, wait: float
    ) -> None:
        with python(OWNER, tmp_path, 3) as owner:
            tell(owner, "put 0 30")
            tell(owner, "tag t")
            tell(owner, "put 30 60")
            owner.stdin.write("restore t\n")  # type: ignore[union-attr]
            owner.stdin.flush()  # type: ignore[union-attr]
            await asyncio.sleep(wait)
            owner.kill()
            owner.wait()
        async with await write_queue(topic="t", storage_path=str(tmp_path)) as writer:
            for bucket in range(3):
                found = [r["id"] for r in await writer.query() if route(r, "id", 3) == bucket]
                whole = [n for n in range(60) if route({"id": n}, "id", 3) == bucket]
                restored = [n for n in whole if n < 30]
                assert found in (whole, restored)
            await writer.restore("t")
            assert sorted(ids(await writer.query())) == list(range(30))
            assert sorted(ids(await writer.query("id < 1000"))) == list(range(30))
