"""The memory of a write task is bounded, however many buckets it writes to."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from support.spark.topics import ids, is_sound
from support.spark.writes import DirectStore

from persisting.spark import write_task
from persisting.topic.topic_files import TopicFolder

ROWS = 40_000


def fragments(folder: Path) -> list[int]:
    topic = TopicFolder.open(folder / "t")
    return [len(topic.view(bucket).sizes) for bucket in topic.buckets]


@pytest.mark.parametrize("bound", [None, 100_000])
def test_task_beyond_its_memory_bound_writes_the_fullest_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int | None
) -> None:
    if bound is not None:
        monkeypatch.setattr(write_task, "_TASK_BYTES", bound)
    rows = pa.table({"id": range(ROWS), "text": ["some text"] * ROWS})
    DirectStore(tmp_path).save(rows, numBuckets=4)
    assert ids(tmp_path) == list(range(ROWS))
    assert is_sound(tmp_path)
    if bound is None:
        assert fragments(tmp_path) == [1, 1, 1, 1]
    else:
        assert sum(fragments(tmp_path)) > 4
