"""The index of a dead log finds the rows of each bucket, however they were logged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.filesystems import QuickFileSystem
from support.log_builder import new_log, segments_in, start_of

from persisting import codec
from persisting.bucket import log_index
from persisting.bucket.log_follower import stored_rows
from persisting.bucket.log_index import LogIndex, PlainRows
from persisting.bucket.log_records import (
    Section,
    batch_payload,
    rows_payload,
    schema_payload,
)
from persisting.errors import WALError
from persisting.records import RecordEncoder, Rules
from persisting.wal import Payload

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
WIDE = pa.schema([(f"f{n}", pa.int64()) for n in range(20)])
BUCKETS = 3


class BuiltLog:
    """A log on disk, and the rows of each bucket in it with the sequence of their frame."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.log = folder, new_log(folder)
        self.rows: dict[int, list[tuple[int, Any]]] = {bucket: [] for bucket in range(BUCKETS)}
        self._number = 0

    def add(self, *payloads: Payload) -> int:
        return self.log.append(
            [list(payloads)],
            lambda: [start_of(self.log.last_written, {}), schema_payload(SCHEMA)],
            7,
        )[-1]

    def put(self, kind: str, *parts: tuple[int, int]) -> None:
        """Log a frame with rows for these buckets: ``parts`` are buckets and row counts."""
        records, sections = [], []
        for bucket, count in parts:
            taken = sum(section.rows for section in sections if section.bucket == bucket)
            sections.append(Section(bucket, 0, len(self.rows[bucket]) + taken, count))
            for _ in range(count):
                records.append({"id": self._number, "text": "é" * (self._number % 40)})
                self._number += 1
        if kind == "batch":
            batch = pa.RecordBatch.from_pylist(records, SCHEMA)
            sequence = self.add(batch_payload(batch, sections, codec.NONE))
        else:
            used = codec.ZSTD if kind == "packed" else codec.NONE
            sequence = self.add(rows_payload(records, sections, used))
        for section in sections:
            mine, records = records[: section.rows], records[section.rows :]
            self.rows[section.bucket] += [(sequence, row) for row in mine]


def read(index: LogIndex, bucket: int, after: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a bucket, and check that their offsets follow each other."""
    found: list[dict[str, Any]] = []
    place: tuple[int, int] | None = None
    for block in index.blocks(bucket, after):
        encoder = RecordEncoder(block.schema, Rules(evolving=True))
        for rows in stored_rows(block, bucket, encoder, index.folder):
            assert place in (None, rows.place)
            chunk = rows.chunk()
            place = rows.place[0], rows.place[1] + chunk.count
            found += chunk.batch.to_pylist()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_each_bucket_are_found_in_order_in_any_mixture_of_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("persisting.wal.frame_run._RUN_FRAMES", 50)
    rng, log = random.Random(seed), BuiltLog(tmp_path / "log")
    for number in range(300):
        kind = rng.choices(["plain", "packed", "batch"], weights=[20, 1, 1])[0]
        parts = [(rng.randrange(BUCKETS), rng.choice([1, 1, 1, 2, 15, 16, 40]))]
        if rng.random() < 0.2:
            parts += [
                (rng.randrange(BUCKETS), rng.randint(1, 20)) for _ in range(rng.choice([1, 2, 20]))
            ]
        log.put(kind, *parts)
        if number % 120 == 119:
            log.log.seal()
    log.log.close()
    index = LogIndex(log.folder, QuickFileSystem())
    for bucket, expected in log.rows.items():
        middle = expected[len(expected) // 2][0]
        for after in (0, middle, expected[-1][0]):
            assert read(index, bucket, after) == [row for at, row in expected if at > after]
    assert not index.is_damaged


def test_single_rows_are_read_together(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    for _ in range(2500):
        log.put("plain", (0, 1))
    log.log.close()
    blocks = list(LogIndex(log.folder, QuickFileSystem()).blocks(0, 0))
    assert all(isinstance(block, PlainRows) for block in blocks)
    assert [len(block.arrivals) for block in blocks] == [1000, 1000, 500]


@pytest.mark.parametrize(
    "section",
    [
        *(Section(1, 0, offset, 1) for n in (7, 8, 16, 32, 64) for offset in (2**n - 1, 2**n - 2)),
        *(Section(1, 0, offset, 1) for offset in (0, 128, 256, 65536, 2**32)),
        Section(127, 127, 5, 1),
        Section(128, 0, 5, 1),
        Section(1, 128, 5, 1),
        Section(2**40, 2**32 - 1, 2**63, 1),
        Section(1, 0, 5, 1, [("w", 3)]),
        Section(1, 0, 5, 16),
        Section(1, 0, 5, 200),
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [0, 2])
def test_section_of_any_size_is_found(tmp_path: Path, section: Section, others: int) -> None:
    log = BuiltLog(tmp_path / "log")
    rows = [{"id": number, "text": "x"} for number in range(section.rows)]
    for _ in range(others):
        log.add(rows_payload(rows[:1], [Section(0, 0, 0, 1)], codec.NONE))
    log.add(rows_payload(rows, [section], codec.NONE))
    log.log.close()
    (block,) = LogIndex(log.folder, QuickFileSystem()).blocks(section.bucket, 0)
    assert isinstance(block, PlainRows)
    assert block.place == (section.epoch, section.offset)
    assert list(block.producers) == section.producers
    assert read(LogIndex(log.folder, QuickFileSystem()), section.bucket) == rows


def test_rows_of_many_fields_are_read(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    rows = [dict.fromkeys(WIDE.names, row * 100) for row in range(5)]
    log.add(schema_payload(WIDE))
    for offset, row in enumerate(rows):
        log.add(rows_payload([row], [Section(0, 0, offset, 1)], codec.NONE))
    log.log.close()
    assert read(LogIndex(log.folder, QuickFileSystem()), 0) == rows


def test_producers_of_rows_that_are_read_together_are_kept(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    for offset in range(4):
        section = Section(0, 0, offset, 1, [("w", offset)] if offset % 2 else [])
        log.add(rows_payload([{"id": offset, "text": ""}], [section], codec.NONE))
    log.log.close()
    (block,) = LogIndex(log.folder, QuickFileSystem()).blocks(0, 0)
    assert list(block.producers) == [("w", 1), ("w", 3)]


@pytest.mark.parametrize(
    ("sections", "rows"),
    [
        ([Section(0, 0, 0, 3)], 2),
        ([Section(0, 0, 0, 2), Section(1, 0, 0, 2)], 3),
        ([Section(0, 0, 0, (1 << 32) - 1), Section(0, 0, 0, (1 << 32) - 1)], 1),
    ],
)
def test_sections_with_more_rows_than_their_frame_are_refused(
    tmp_path: Path, sections: list[Section], rows: int
) -> None:
    log = BuiltLog(tmp_path / "log")
    log.add(rows_payload([{"id": 1, "text": "x"}] * rows, sections, codec.NONE))
    log.log.close()
    index = LogIndex(log.folder, QuickFileSystem())
    with pytest.raises(WALError, match="its sections need"):
        read(index, 0)


def test_row_with_another_number_of_fields_is_refused(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    for offset, row in enumerate([{"id": 1, "text": "x"}, {"id": 2}]):
        log.add(rows_payload([row], [Section(0, 0, offset, 1)], codec.NONE))
    log.log.close()
    with pytest.raises(WALError, match="cannot be read"):
        read(LogIndex(log.folder, QuickFileSystem()), 0)


def test_frame_without_sections_is_skipped(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    log.put("plain", (0, 2))
    log.add(rows_payload([], [], codec.NONE))
    log.log.close()
    index = LogIndex(log.folder, QuickFileSystem())
    assert read(index, 0) == [row for _, row in log.rows[0]]


def test_segment_that_was_cut_after_it_was_indexed_is_refused(tmp_path: Path) -> None:
    log = BuiltLog(tmp_path / "log")
    log.put("plain", (0, 1))
    log.log.close()
    index = LogIndex(log.folder, QuickFileSystem())
    (segment,) = segments_in(log.folder)
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(WALError, match="has changed"):
        read(index, 0)
    log_index.forget(log.folder)
