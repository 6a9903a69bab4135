"""The payloads of log frames: what was encoded is decoded, and hostile bytes raise WALError."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparing import same

from persisting import codec
from persisting.bucket import log_records
from persisting.bucket.log_records import (
    Section,
    batch_payload,
    chunk_of_values,
    decompressed,
    read_batch,
    read_schema,
    read_sections,
    read_values,
    rows_payload,
    schema_payload,
    split_payload,
)
from persisting.errors import WALError
from persisting.records import RecordEncoder, Rules
from persisting.wal import Payload
from persisting.wal.frame import BATCH, RECORDS, SCHEMA, Frame

PLACE = Path("somewhere")
SECTIONS = [Section(3, 1, 40, 2), Section(0, 0, 7, 1, [("producer", 9)])]
CODECS = [codec.NONE, codec.ZSTD, codec.LZ4, codec.SNAPPY]

sections = st.lists(
    st.builds(
        Section,
        st.integers(0, 2**16),
        st.integers(0, 2**31),
        st.integers(0, 2**63),
        st.integers(0, 10**6),
        st.lists(st.tuples(st.text(max_size=5), st.integers(0, 2**63)), max_size=2),
    ),
    max_size=4,
)
plain_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)


def framed(payload: Payload) -> Frame:
    """Return the frame of a payload as recovery reads it."""
    data = payload.head + bytes(payload.data)
    return Frame(payload.kind, payload.codec, 0, payload.raw_length, 5, 0, 7, data)


def raw_frame(kind: int, data: bytes, codec_id: int = 0, raw_length: int | None = None) -> Frame:
    return Frame(kind, codec_id, 0, len(data) if raw_length is None else raw_length, 5, 0, 7, data)


def encoder_of(schema: pa.Schema) -> RecordEncoder:
    return RecordEncoder(schema, Rules(evolving=True))


# What was encoded is decoded


@given(sections)
def test_sections_decode_to_what_was_encoded(given_sections: list[Section]) -> None:
    frame = framed(rows_payload([], given_sections, codec.NONE))
    assert read_sections(frame, PLACE) == given_sections


@pytest.mark.parametrize("codec_id", CODECS)
@given(st.lists(st.lists(plain_values, min_size=3, max_size=3), max_size=30))
def test_plain_rows_decode_to_the_same_values(codec_id: int, rows: list[list[Any]]) -> None:
    records = [dict(zip("abc", row, strict=True)) for row in rows]
    payload = rows_payload(records, SECTIONS, codec_id)
    found, stored = split_payload(framed(payload), PLACE)
    assert found == SECTIONS
    values = read_values(decompressed(framed(payload), stored), 5, PLACE)
    assert len(values) == len(rows)
    for before, after in zip(rows, values, strict=True):
        for left, right in zip(before, after, strict=True):
            assert same(left, right)
            assert type(left) is type(right)
            if isinstance(left, float):
                assert math.copysign(1, left) == math.copysign(1, right) or math.isnan(left)


@pytest.mark.parametrize("codec_id", CODECS)
@pytest.mark.parametrize("rows", [1, 500])
def test_batch_decodes_to_the_same_rows(codec_id: int, rows: int) -> None:
    batch = pa.RecordBatch.from_pydict({"n": list(range(rows)), "t": ["x" * 50] * rows})
    payload = batch_payload(batch, SECTIONS, codec_id)
    assert payload.codec == (codec_id if rows > 1 else payload.codec)
    found, stored = split_payload(framed(payload), PLACE)
    assert found == SECTIONS
    assert read_batch(framed(payload), stored, encoder_of(batch.schema), PLACE).equals(batch)


def test_schema_decodes_to_the_same_schema() -> None:
    schema = pa.schema({"n": pa.int64(), "v": pa.list_(pa.float32(), 3)})
    assert read_schema(framed(schema_payload(schema)), PLACE).equals(schema)


def test_slice_of_a_batch_is_logged_without_the_rest() -> None:
    batch = pa.RecordBatch.from_pydict({"t": ["x" * 1000] * 100})
    part = batch_payload(batch.slice(10, 1), SECTIONS, codec.NONE)
    assert len(part.data) < 3000


def test_small_payloads_are_not_compressed() -> None:
    assert rows_payload([{"n": 1}], SECTIONS, codec.ZSTD).codec == codec.NONE
    large = [{"t": "x" * log_records.MIN_COMPRESSED_BYTES}]
    assert rows_payload(large, SECTIONS, codec.ZSTD).codec == codec.ZSTD


# Hostile bytes


@given(st.binary(max_size=80))
def test_arbitrary_bytes_decode_as_sections_or_raise(data: bytes) -> None:
    with suppress(WALError):
        found = read_sections(raw_frame(RECORDS, data), PLACE)
        assert all(isinstance(section, Section) for section in found)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\x90",
        b"\x05\x00\x00\x00\x90",
        b"\x01\x00\x00\x00\x80",
        (2).to_bytes(4, "little") + b"\x91\x90",
        (5000).to_bytes(4, "little") + b"\x91" * 5000,
    ],
)
def test_broken_list_of_sections_raises(data: bytes) -> None:
    with pytest.raises(WALError, match=f"list of sections at sequence 5 of the log in {PLACE}"):
        read_sections(raw_frame(BATCH, data), PLACE)


@pytest.mark.parametrize(
    "section",
    [
        [-1, 0, 0, 1],
        [0, -1, 0, 1],
        [0, 0, -1, 1],
        [0, 0, 0, -1],
        [0, 0, 0],
        [0, 2**32, 0, 1],
        [0, 0, 0, 2**32],
    ],
)
def test_section_with_a_negative_missing_or_huge_number_raises(section: list[int]) -> None:
    body = msgspec.msgpack.encode([section])
    data = len(body).to_bytes(4, "little") + body
    with pytest.raises(WALError, match="list of sections"):
        read_sections(raw_frame(RECORDS, data), PLACE)


@given(st.binary(max_size=80), st.sampled_from([*CODECS, 9]), st.integers(0, 2**32 - 1))
def test_arbitrary_bytes_decode_as_rows_or_raise(data: bytes, codec_id: int, length: int) -> None:
    for raw_length in (len(data), min(length, 1 << 20)):
        frame = raw_frame(RECORDS, data, codec_id, raw_length)
        try:
            rows = read_values(decompressed(frame, memoryview(data)), 5, PLACE)
            if not rows:
                continue
            chunk = chunk_of_values(encoder_of(pa.schema({"n": pa.int64()})), rows, 5, PLACE)
        except WALError:
            continue
        assert all(len(row) == 1 for row in rows)
        assert chunk.count == len(rows)


@given(st.binary(max_size=80), st.sampled_from([*CODECS, 9]))
def test_arbitrary_bytes_decode_as_a_batch_or_a_schema_or_raise(data: bytes, codec_id: int) -> None:
    encoder = encoder_of(pa.schema({"n": pa.int64()}))
    for read in (
        lambda: read_batch(raw_frame(BATCH, data, codec_id), memoryview(data), encoder, PLACE),
        lambda: read_schema(raw_frame(SCHEMA, data, codec_id), PLACE),
    ):
        with pytest.raises(WALError):
            read()


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_batch_with_a_changed_byte_decodes_or_raises(position: int) -> None:
    batch = pa.RecordBatch.from_pydict({"n": [1, 2, 3], "t": ["a", "b", "c"]})
    payload = batch_payload(batch, [], codec.NONE)
    data = bytearray(bytes(payload.data))
    data[position % len(data)] ^= 0xFF
    frame = raw_frame(BATCH, bytes(data))
    try:
        found = read_batch(frame, memoryview(frame.payload), encoder_of(batch.schema), PLACE)
    except WALError:
        return
    found.validate(full=False)


@pytest.mark.parametrize(
    "rows",
    [[["x"]], [[b"x"]], [[2**64 - 1]], [[[1]]], [[{"a": 1}]], [[msgspec.Raw(b"\xc7\0\x05")]]],
)
def test_value_of_another_type_than_its_field_raises(rows: list[Any]) -> None:
    data = msgspec.msgpack.encode(rows)
    encoder = encoder_of(pa.schema({"n": pa.int64()}))
    with pytest.raises(WALError):
        chunk_of_values(encoder, read_values(data, 5, PLACE), 5, PLACE)


@pytest.mark.parametrize("rows", [[[]], [[1], []], [[1, 2]], [[1], [1, 2]]])
def test_row_with_another_number_of_fields_raises(rows: list[Any]) -> None:
    encoder = encoder_of(pa.schema({"n": pa.int64()}))
    with pytest.raises(WALError, match="records at sequence 5"):
        chunk_of_values(encoder, rows, 5, PLACE)


def test_records_without_a_schema_before_them_raise() -> None:
    frame = framed(rows_payload([{"n": 1}], SECTIONS, codec.NONE))
    with pytest.raises(WALError, match="without a schema"):
        read_batch(frame, memoryview(b""), None, PLACE)
