"""Records of every type, divided among the buckets of a topic: a bucket's part is a slice of the
list, in the buffer and in the log, and Lance must be able to write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support.compat_topic as kept
from support.comparing import equal_but_for_absent
from support.crash.topics import CrashableTopic, Parts
from support.filesystems import QuickFileSystem

from persisting import fs


def nested(number: int) -> dict[str, Any]:
    return {
        **kept.record(number),
        "deep": {"a": {"b": {"c": number, "d": [{"e": {"f": str(number)}}]}}},
        "sparse": {"a": {"b": number}} if number % 3 else None,
        "pairs": [{"x": {"y": number}}, {"x": {"y": None}}],
    }


def parts_of(first: int, counts: dict[int, int]) -> Parts:
    parts, number = {}, first
    for bucket, count in counts.items():
        parts[bucket] = [nested(number + n) for n in range(count)]
        number += count
    return parts


@pytest.mark.parametrize("how", ["flushed", "recovered"])
@pytest.mark.parametrize("counts", [{0: 1, 1: 1}, {0: 3, 1: 4, 2: 2}, {1: 40, 2: 1}])
async def test_every_type_of_record_survives_in_every_bucket_of_a_list(
    tmp_path: Path, how: str, counts: dict[int, int]
) -> None:
    with fs.use(QuickFileSystem()):
        topic = CrashableTopic(tmp_path, 3)
        parts = parts_of(0, counts)
        await topic.put(parts)
        later = parts_of(100, {0: 2, 1: 2, 2: 2})
        if how == "flushed":
            for bucket in range(3):
                await (await topic.backend(bucket)).flush()
        await topic.put(later)
        await topic.drop()
        topic = CrashableTopic(tmp_path, 3)
        found = await topic.read()
        await topic.close()
    for bucket in range(3):
        expected = [*parts.get(bucket, []), *later[bucket]]
        assert [row["id"] for row in found[bucket]] == [row["id"] for row in expected]
        for put, got in zip(expected, found[bucket], strict=True):
            assert equal_but_for_absent(put, got)
