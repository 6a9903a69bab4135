"""docs/reference/wal-format.md describes the bytes that the code writes."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from support.doc_pages import blocks, both, code, tables

from persisting import codec
from persisting.bucket import group_commit
from persisting.wal import frame, recovery
from persisting.wal.segment import SegmentName, parse_name

PAGES = both("reference/wal-format.md")
pages = pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])

EXAMPLE = SegmentName(first_sequence=1, salt=0x5EED1234)


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
    kinds = {"SCHEMA": frame.SCHEMA, "ROWS": frame.ROWS, "MARK": frame.MARK}
    codecs = {"zstd": codec.ZSTD, "lz4": codec.LZ4, "snappy": codec.SNAPPY}
    for name, number in {**kinds, **codecs}.items():
        assert found[name] == str(number)
    assert len(codec._IDS) == len(codecs) + 1
    assert f"{group_commit._MIN_COMPRESSED_BYTES}" in page.read_text("utf-8")
    assert frame.FORMAT_VERSION == 1
    assert recovery.TRIMMED == "trimmed"


def example() -> bytes:
    payload = msgspec.msgpack.encode(("loader", 7))
    header = frame.SegmentHeader(EXAMPLE.first_sequence, EXAMPLE.salt)
    mark = frame.Frame(
        kind=frame.MARK,
        codec=codec.NONE,
        flags=frame.MORE,
        raw_length=len(payload),
        sequence=2,
        synced=0,
        arrival=1_700_000_000_000_000,
        payload=payload,
    )
    return b"".join((frame.encode_segment_header(header), *frame.encode_frame(mark, EXAMPLE.salt)))


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
    decoded, end = frame.decode_frame(data, frame.SEGMENT_HEADER_SIZE, header.salt)
    assert (decoded.sequence, decoded.flags, end) == (2, frame.MORE, len(data))


@pages
def test_wal_format_page_shows_valid_segment_names(page: Path):
    listing = next(b.text for b in blocks(page) if b.text.startswith("wal/"))
    names = [line.strip() for line in listing.splitlines() if line.strip().endswith(".wal")]
    assert len(names) == 2
    assert all(parse_name(name) is not None for name in names)
