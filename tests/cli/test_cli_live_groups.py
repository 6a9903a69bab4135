"""``groups`` on a topic that is written and read while the command reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.cli_contracts import decoded
from support.cli_runner import Answer
from support.following import owner
from support.waiting import SECONDS

from persisting import fs
from persisting.queue import read_queue
from persisting.topic import group_admin
from persisting.topic.group_admin import Span


async def test_committed_offset_is_never_past_the_end(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path, buckets=2) as producer:
        await producer.does("put", 0, 50)
        await producer.does("flush")
        await producer.does("put", 50, 50)  # in the log only
        async with await read_queue("t", storage_path=str(tmp_path), group="g") as member:
            seen = 0
            while seen < 80:
                seen += len(await member.get(limit=80 - seen, wait=True, timeout=SECONDS))
            await member.commit()
            (group,) = decoded("groups", call("groups", "t", "g", "--json", "-s", tmp_path).out)
            (listed,) = decoded("topics", call("topics", "--json", "-s", tmp_path).out)
        assert sum(bucket.end_offset for bucket in group.buckets) == 100
        assert all(bucket.committed <= bucket.end_offset for bucket in group.buckets)
        assert (group.lag, listed.lag) == (20, {"g": 20})


async def test_offsets_of_a_group_are_read_before_the_ends(tmp_path: Path) -> None:
    with owner(tmp_path) as producer:
        await producer.does("put", 0, 10)
        async with await read_queue("t", storage_path=str(tmp_path), group="g") as member:
            await member.get(limit=5, wait=True, timeout=SECONDS)
            await member.commit()
    folder = tmp_path / "t"
    file = folder / "groups" / "g" / "bucket_0.json"

    def spans() -> dict[int, Span]:
        # Meanwhile, 90 records are put, and the group commits them.
        file.write_bytes(file.read_bytes().replace(b'"offset":5', b'"offset":100'))
        return {0: Span(0, 12, [])}

    assert b'"offset":5' in file.read_bytes()
    (group,) = group_admin.groups(folder, [0], spans, fs.current())
    assert (group.buckets[0].committed, group.lag) == (5, 7)


async def test_group_is_reset_to_the_end_of_the_log(
    tmp_path: Path, call: Callable[..., Answer]
) -> None:
    with owner(tmp_path) as producer:
        await producer.does("put", 0, 10)
        reset = call("groups", "t", "g", "--reset-to", "latest", "-y", "--json", "-s", tmp_path)
        (group,) = decoded("groups", reset.out)
        assert (group.buckets[0].committed, group.lag) == (10, 0)
        code, _, err = call("groups", "t", "gg", "-s", tmp_path)
        assert (code, "did you mean 'g'?" in err) == (2, True)
