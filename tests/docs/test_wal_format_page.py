"""docs/reference/wal-format.md describes the bytes that the code writes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support.doc_pages import blocks, both, code, tables

from persisting import codec
from persisting.bucket import log_note, log_positions, log_records
from persisting.bucket.log_records import Section, read_values, rows_payload, split_payload
from persisting.lock import LOCK_FILE
from persisting.wal import frame, log, recovery
from persisting.wal.frame import SegmentStart
from persisting.wal.segment import SegmentName, parse_name

PAGES = both("reference/wal-format.md")
pages = pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])

EXAMPLE = SegmentName(first_sequence=418, salt=0x0C9A41F7)
START = SegmentStart(417, {0: 417, 3: 398})
SECTIONS = [Section(0, 0, 40, 1), Section(3, 1, 7, 1)]
RECORDS = [{"id": "1", "amount": 42}, {"id": "2", "amount": 7}]


def layouts(page: Path) -> list[list[list[str]]]:
    """Return the two tables of offsets: segment header and frame."""
    return [table[1:] for table in tables(page) if table[1][0] == "0" and len(table[0]) == 4]


def sizes(form: str) -> list[int]:
    """Return the sizes of a struct's items, in order."""
    found, digits = [], ""
    for sign in form.lstrip("<"):
        if sign.isdigit():
            digits += sign
            continue
        found.append(struct.calcsize(f"<{digits}{sign}"))
        digits = ""
    return found


@pages
def test_wal_format_page_states_the_offsets_and_sizes_of_the_code(page: Path):
    segment, frames = layouts(page)
    assert [int(row[1]) for row in segment] == [*sizes(frame._SEGMENT.format), 4]
    assert [int(row[1]) for row in frames[:-1]] == [*sizes(frame._FRAME.format), 4]
    for rows in (segment, frames):
        at = 0
        for row in rows:
            assert int(row[0]) == at
            at += int(row[1]) if row[1].isdigit() else 0
    assert int(frames[-1][0]) == frame.FRAME_HEADER_SIZE
    text = page.read_text("utf-8")
    assert f"{frame.SEGMENT_HEADER_SIZE}" in segment[2][3]
    assert f" {frame.SEGMENT_HEADER_SIZE} " in text
    assert f" {frame.FRAME_HEADER_SIZE} " in text
    assert code(segment[0][3]) == frame.SEGMENT_MAGIC.hex(" ")
    assert code(frames[0][3]) == frame.FRAME_MAGIC.hex(" ")


@pages
def test_wal_format_page_states_the_ids_of_the_code(page: Path):
    found = {row[0].strip("`"): row[1] for table in tables(page) for row in table if len(row) == 3}
    names = ("SCHEMA", "ROWS", "MARK", "BATCH", "RECORDS", "START")
    kinds = {name: getattr(frame, name) for name in names}
    codecs = {"zstd": codec.ZSTD, "lz4": codec.LZ4, "snappy": codec.SNAPPY}
    for name, number in {**kinds, **codecs}.items():
        assert found[name] == str(number)
    assert len(codec._IDS) == len(codecs) + 1
    text = page.read_text("utf-8")
    assert f"{log_records.MIN_COMPRESSED_BYTES}" in text
    assert f" {log.SEGMENT_BYTES >> 20} MiB" in text
    assert frame.FORMAT_VERSION == 2
    assert recovery.TRIMMED == "trimmed"


@pages
def test_wal_format_page_lists_the_elements_of_sections_and_starts(page: Path):
    pairs = [[row[0] for row in table[1:]] for table in tables(page) if len(table[0]) == 2]
    sections = next(rows for rows in pairs if rows[0] == "bucket")
    assert sections[:4] == ["bucket", "epoch", "offset", "rows"]
    assert len(sections) == len(Section.__struct_fields__)
    assert list(SegmentStart.__struct_fields__) in pairs


def example() -> bytes:
    header = frame.SegmentHeader(EXAMPLE.first_sequence, EXAMPLE.salt)
    payload = frame.encode_start(START)
    start = frame.Frame(
        kind=frame.START,
        codec=codec.NONE,
        flags=frame.MORE,
        raw_length=len(payload),
        sequence=418,
        synced=417,
        arrival=1_700_000_000_000_000,
        payload=payload,
    )
    rows = rows_payload(RECORDS, SECTIONS, codec.NONE)
    records = start._replace(
        kind=rows.kind, flags=0, raw_length=rows.raw_length, sequence=420, payload=rows.data
    )
    parts = [frame.encode_segment_header(header)]
    parts += frame.encode_frame(start, EXAMPLE.salt)
    parts += frame.encode_frame(records, EXAMPLE.salt, rows.head)
    return b"".join(parts)


def dumped(page: Path) -> bytes:
    dump = next(b.text for b in blocks(page) if b.text.startswith("00000000"))
    lines = [line.split("  ", 1) for line in dump.splitlines()]
    assert [int(at, 16) for at, _ in lines] == list(range(0, 16 * len(lines), 16))
    return bytes.fromhex("".join(text for _, text in lines))


@pages
def test_worked_example_has_the_bytes_that_the_code_writes(page: Path):
    assert dumped(page) == example()
    assert str(EXAMPLE) in page.read_text("utf-8")


def test_worked_example_is_read_by_the_code():
    data = memoryview(dumped(PAGES[0]))
    header = frame.decode_segment_header(data)
    assert (header.first_sequence, header.salt) == EXAMPLE
    assert frame.first_frame_start(data, header) == START
    start, end = frame.decode_frame(data, frame.SEGMENT_HEADER_SIZE, header.salt)
    assert (start.sequence, start.flags) == (418, frame.MORE)
    records, end = frame.decode_frame(data, end, header.salt)
    assert (records.sequence, records.flags, end) == (420, 0, len(data))
    sections, stored = split_payload(records, "the example")
    assert sections == SECTIONS
    assert read_values(stored, 420, "the example") == [["1", 42], ["2", 7]]


@pages
def test_wal_format_page_shows_valid_segment_names(page: Path):
    listing = next(b.text for b in blocks(page) if ".wal\n" in b.text)
    names = [line.strip() for line in listing.splitlines() if line.strip().endswith(".wal")]
    assert len(names) == 2
    assert all(parse_name(name) is not None for name in names)
    assert str(EXAMPLE) in names
    lines = {line.strip().rstrip("/") for line in listing.splitlines()}
    assert {log_note.LOGS_FOLDER, log_note.FILE, LOCK_FILE} <= lines
    assert log_positions.POSITIONS_FILE in lines
    assert sum(map(log_note.is_log_name, lines)) == 1
    assert log_positions.POSITIONS.size == 16
