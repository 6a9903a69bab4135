"""docs/reference/wal-format.md says what the code writes, byte for byte."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.doc_pages import blocks, both, code, tables

from persisting import codec
from persisting.bucket import group_commit
from persisting.errors import StorageError, WALError
from persisting.queue import PersistingBackend
from persisting.wal import frame, recovery
from persisting.wal.segment import SegmentName, parse_name

PAGES = both("reference/wal-format.md")
pages = pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])

EXAMPLE = SegmentName(first_sequence=1, salt=0x5EED1234)


def layouts(page: Path) -> list[list[list[str]]]:
    """The two tables of offsets: segment header and frame."""
    return [table[1:] for table in tables(page) if table[1][0] == "0" and len(table[0]) == 4]


def sizes(form: str) -> list[int]:
    """The sizes of a struct's items, in order."""
    found, digits = [], ""
    for sign in form.lstrip("<"):
        if sign.isdigit():
            digits += sign
            continue
        found.append(struct.calcsize(f"<{digits}{sign}"))
        digits = ""
    return found


@pages
def test_the_offsets_and_sizes_are_those_of_the_code(page: Path):
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
def test_the_ids_are_those_of_the_code(page: Path):
    found = {row[0].strip("`"): row[1] for table in tables(page) for row in table if len(row) == 3}
    kinds = {"SCHEMA": frame.SCHEMA, "ROWS": frame.ROWS, "MARK": frame.MARK}
    codecs = {"zstd": codec.ZSTD, "lz4": codec.LZ4, "snappy": codec.SNAPPY}
    for name, number in {**kinds, **codecs}.items():
        assert found[name] == str(number)
    assert len(codec._IDS) == len(codecs) + 1
    assert f"{group_commit._WORTH_COMPRESSING}" in page.read_text("utf-8")
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
def test_the_worked_example_has_the_bytes_that_the_code_writes(page: Path):
    assert dumped(page) == example()
    assert str(EXAMPLE) in page.read_text("utf-8")


def test_the_worked_example_is_read_by_the_code():
    data = memoryview(dumped(PAGES[0]))
    header = frame.decode_segment_header(data)
    assert (header.first_sequence, header.salt) == EXAMPLE
    decoded, end = frame.decode_frame(data, frame.SEGMENT_HEADER_SIZE, header.salt)
    assert (decoded.sequence, decoded.flags, end) == (2, frame.MORE, len(data))


@pages
def test_the_file_names_of_the_page_are_names_of_segments(page: Path):
    listing = next(b.text for b in blocks(page) if b.text.startswith("wal/"))
    names = [line.strip() for line in listing.splitlines() if line.strip().endswith(".wal")]
    assert len(names) == 2
    assert all(parse_name(name) is not None for name in names)


def opened(path: Path) -> PersistingBackend:
    options: dict[str, Any] = {"enable_wal": True, "wal_sync_interval": 0.0}
    return PersistingBackend(0, str(path), flush_interval=None, **options)


@pytest.fixture
async def left(tmp_path: Path, faults) -> Path:
    """A bucket whose log has three segments of one record each, as a killed process leaves it."""
    async with opened(tmp_path / "live") as backend:
        for n in range(3):
            await backend.put({"n": n})
            faults.fail_always("sync_file")
            with pytest.raises(StorageError):
                await backend.flush()
            faults.heal()
            backend._bucket.flush_error = None
        shutil.copytree(tmp_path / "live", tmp_path / "left")
    return tmp_path / "left"


def segments(path: Path) -> list[Path]:
    return sorted((path / "wal").glob("*.wal"))


async def values(path: Path) -> list[int]:
    async with opened(path) as backend:
        return [record["n"] for record in await backend.get()]


async def test_segments_are_read_in_the_order_of_their_names(left: Path):
    assert len(segments(left)) == 3
    assert await values(left) == [0, 1, 2]
    assert segments(left) == []


def test_a_name_that_is_no_segments_raises(left: Path):
    (left / "wal" / "copy.wal").write_bytes(b"")
    with pytest.raises(WALError, match="is not named as a log segment"):
        opened(left)


def test_a_renamed_segment_raises(left: Path):
    first = segments(left)[0]
    first.rename(first.with_name(str(SegmentName(1, 0xABCD))))
    with pytest.raises(WALError, match="copied or renamed"):
        opened(left)


def test_a_newer_version_raises(left: Path):
    first = segments(left)[0]
    name = parse_name(first.name)
    assert name is not None
    header = frame.SegmentHeader(name.first_sequence, name.salt, version=2)
    first.write_bytes(frame.encode_segment_header(header))
    with pytest.raises(WALError, match="upgrade persisting"):
        opened(left)


def test_a_missing_segment_raises(left: Path):
    segments(left)[1].unlink()
    with pytest.raises(WALError, match="a segment is missing"):
        opened(left)


async def test_what_nobody_was_promised_is_cut_where_the_next_segment_goes_on(left: Path):
    middle = segments(left)[1]
    with middle.open("ab") as file:
        file.write(b"half a frame")
    assert await values(left) == [0, 1, 2]
    (copy,) = (left / "wal" / recovery.TRIMMED).iterdir()
    assert copy.read_bytes() == b"half a frame"


def test_damage_in_an_early_segment_raises_and_changes_nothing(left: Path):
    first = segments(left)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    before = {path: path.read_bytes() for path in segments(left)}
    with pytest.raises(WALError, match=f"{first.name} is damaged"):
        opened(left)
    assert {path: path.read_bytes() for path in segments(left)} == before


async def test_a_torn_end_is_cut_to_the_last_whole_entry(left: Path):
    last = segments(left)[-1]
    last.write_bytes(last.read_bytes()[:-3])
    assert await values(left) == [0, 1]
    assert len(list((left / "wal" / recovery.TRIMMED).iterdir())) == 1
