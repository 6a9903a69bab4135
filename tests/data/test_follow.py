"""TopicStream(follow=True): a topic as it grows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import children
from support.training_topics import add_rows, ids, make_topic, record

from persisting.data import TopicStream
from persisting.errors import InvalidArgument, OffsetOutOfRange, StorageError
from persisting.queue import write_queue


def followed(folder: Path, **arguments: Any) -> TopicStream:
    return TopicStream(folder, follow=True, **{"idle_timeout": 0.0, **arguments})


def test_following_stream_yields_every_record_once(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 500)
    stream = followed(folder, batch_size=64)
    batches = list(stream)
    assert sorted(ids(batches)) == list(range(500))
    assert max(batch.num_rows for batch in batches) == 64
    add_rows(folder, range(500, 600))
    assert sorted(ids(stream)) == list(range(500, 600)), "the next iteration continues"


def test_topic_without_records_is_followed(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 0, tag=None)
    stream = followed(folder, columns=["id"])
    assert list(stream) == []
    add_rows(folder, range(5))
    assert sorted(ids(stream)) == [0, 1, 2, 3, 4]


def test_following_stream_waits_for_records(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 10)
    stream = TopicStream(folder, follow=True)
    found: list[int] = []

    def read() -> None:
        for batch in stream:
            found.extend(batch.column("id").to_pylist())
            if len(found) == 30:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    add_rows(folder, range(10, 20))
    add_rows(folder, range(20, 30))
    reader.join(60)
    assert sorted(found) == list(range(30))


async def test_records_are_seen_before_they_are_flushed(tmp_path: Path) -> None:
    for backend_options in ({"enable_wal": True}, {"enable_wal": False}):
        name = f"wal_{backend_options['enable_wal']}"
        async with await write_queue(
            topic=name,
            storage_path=str(tmp_path),
            backend="persisting",
            backend_options={**backend_options, "flush_interval": None},
        ) as writer:
            await writer.put([record(n) for n in range(20)])
            found = await asyncio.to_thread(lambda: ids(followed(tmp_path / name)))  # noqa: B023
            assert sorted(found) == list(range(20))


PRODUCER = """
import asyncio, sys
from persisting.queue import write_queue
async def main():
    writer = await write_queue(topic=sys.argv[2], storage_path=sys.argv[1], num_buckets=4,
        backend="persisting", backend_options={"enable_wal": True, "wal_sync_interval": 0.0,
        "flush_threshold": 50, "flush_interval": None})
    for n in range(0, 2000, 10):
        await writer.put([{"id": i} for i in range(n, n + 10)])
        if n % 100 == 0:
            print(n, flush=True)
    await writer.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("world_size", [1, 3])
def test_restarts_during_growth_lose_and_repeat_nothing(tmp_path: Path, world_size: int) -> None:
    with children.python(PRODUCER, tmp_path, "live") as producer:
        children.wait_for_line(producer)
        folder = tmp_path / "live"
        found: Counter[int] = Counter()
        states: list[Any] | None = None
        restarts = 0
        while sum(found.values()) < 2000 and restarts < 5000:
            restarts += 1
            following = []
            for rank in range(world_size):
                stream = followed(folder, batch_size=7, rank=rank, world_size=world_size)
                if states is not None:
                    stream.load_state_dict(states)
                for _, batch in zip(range(1 + restarts % 5), stream, strict=False):
                    found.update(batch.column("id").to_pylist())
                following.append(json.loads(json.dumps(stream.state_dict())))
            states = following
    assert found == Counter(range(2000))


def test_states_of_all_ranks_continue_with_another_world_size(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 300, buckets=4)
    found: list[int] = []
    states = []
    for rank in range(4):
        stream = followed(folder, rank=rank, world_size=4, batch_size=20)
        found += ids([next(iter(stream))])
        states.append(stream.state_dict())
    for rank in range(2):
        stream = followed(folder, rank=rank, world_size=2)
        stream.load_state_dict(states)
        found += ids(stream)
    assert sorted(found) == list(range(300))
    lonely = followed(folder, world_size=2)
    lonely.load_state_dict(states[0])
    with pytest.raises(InvalidArgument, match="no offset for bucket 2, which is read here"):
        iter(lonely)


def test_condition_and_columns_apply_to_a_following_stream(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    stream = followed(folder, where="`group` = 2", columns=["id", "text"])
    batches = list(stream)
    assert sorted(ids(batches)) == [n for n in range(100) if n % 7 == 2]
    assert {tuple(batch.schema.names) for batch in batches} == {("id", "text")}
    assert sum(stream.state_dict()["offsets"].values()) == 100
    with pytest.raises(InvalidArgument, match="where='nope = 1' names 'nope'"):
        list(followed(folder, where="nope = 1"))
    with pytest.raises(InvalidArgument, match="columns names 'nope'"):
        list(followed(folder, columns=["nope"]))


def test_more_ranks_than_buckets_are_refused(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 10, buckets=2)
    with pytest.raises(InvalidArgument, match="world_size=3 needs a topic of as many buckets"):
        followed(folder, world_size=3)


def test_state_of_another_topic_or_filter_is_refused(tmp_path: Path) -> None:
    first, second = make_topic(tmp_path, 10, name="a"), make_topic(tmp_path, 10, name="b")
    state = followed(first).state_dict()
    with pytest.raises(InvalidArgument, match="the state is of another topic"):
        followed(second).load_state_dict(state)
    with pytest.raises(InvalidArgument, match="this stream has where='id > 1'"):
        followed(first, where="id > 1").load_state_dict(state)
    with pytest.raises(InvalidArgument, match="not the state of such a stream"):
        followed(first).load_state_dict(TopicStream(first).state_dict())
    with pytest.raises(InvalidArgument, match="impossible offsets"):
        followed(first).load_state_dict({**state, "offsets": {"x": 1}})
    with pytest.raises(InvalidArgument, match=r"state_dict\(batches=…\) needs a tag"):
        followed(first).state_dict(batches=1)


def test_state_of_a_rank_that_did_not_read_has_only_its_own_buckets(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 300, buckets=4)
    first = followed(folder, batch_size=20)
    found = ids([next(iter(first))])
    ranks = [followed(folder, rank=rank, world_size=2, batch_size=20) for rank in range(2)]
    for stream in ranks:
        stream.load_state_dict(first.state_dict())
    found += ids([next(iter(ranks[1]))])
    last = followed(folder)
    last.load_state_dict([ranks[1].state_dict(), ranks[0].state_dict()])
    assert sorted(found + ids(last)) == list(range(300))


def test_states_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 300, buckets=2)
    stream = followed(folder, batch_size=20)
    before = stream.state_dict()
    next(iter(stream))
    for states in ([before, stream.state_dict()], [stream.state_dict(), before]):
        with pytest.raises(InvalidArgument, match="two of the states have bucket 0, at offsets"):
            followed(folder).load_state_dict(states)


async def _change(folder: Path, what: str) -> None:
    async with await write_queue(topic=folder.name, storage_path=str(folder.parent)) as writer:
        if what == "restore":
            await writer.restore("v1")
        else:
            await writer.retain(rows=1)


def test_restore_to_an_older_version_is_reported(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    add_rows(folder, range(100, 200))
    stream = followed(folder)
    list(stream)
    state = stream.state_dict()
    asyncio.run(_change(folder, "restore"))
    resumed = followed(folder)
    resumed.load_state_dict(state)
    with pytest.raises(StorageError, match="was restored to an older version"):
        list(resumed)


def test_restore_that_removes_nothing_that_was_read_is_survived(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    stream = followed(folder)
    found = ids(stream)
    state = stream.state_dict()
    add_rows(folder, range(100, 200))
    asyncio.run(_change(folder, "restore"))
    add_rows(folder, range(300, 350))
    resumed = followed(folder)
    resumed.load_state_dict(state)
    assert sorted(found + ids(resumed)) == [*range(100), *range(300, 350)]
    assert sorted(ids(stream)) == list(range(300, 350))


def test_bucket_that_was_restored_before_the_stream_began_is_resumed(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100)
    add_rows(folder, range(100, 200))
    asyncio.run(_change(folder, "restore"))
    stream = followed(folder, batch_size=10)
    first = ids([next(iter(stream))])  # of one bucket; the others have not been read
    resumed = followed(folder, batch_size=10)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert sorted(first + ids(resumed)) == list(range(100))


def test_records_that_retention_removed_are_reported(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, 100, buckets=1)
    stream = followed(folder, batch_size=10)
    next(iter(stream))
    state = stream.state_dict()
    add_rows(folder, range(100, 200))
    asyncio.run(_change(folder, "retain"))
    resumed = followed(folder)
    resumed.load_state_dict(state)
    with pytest.raises(OffsetOutOfRange, match=r"offsets 10 to 99 .* were removed by retention"):
        list(resumed)
    assert sorted(ids(followed(folder))) == list(range(100, 200)), "a new stream begins after them"
