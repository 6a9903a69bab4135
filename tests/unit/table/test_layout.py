"""The layout of records in a table."""

from __future__ import annotations

import pyarrow as pa
import pytest

from persisting.queue import TableError
from persisting.records import EMPTY
from persisting.records.field_names import ARRIVAL
from persisting.table import layout

SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("untyped", pa.null()),
        ("empty", pa.struct([])),
        ("v", pa.list_(pa.float64(), 2)),
        ("d", pa.struct([("t", pa.string()), ("n", pa.null())])),
        ("deep", pa.list_(pa.struct([("ll", pa.list_(pa.list_(pa.int64())))]))),
        ("u", pa.uuid()),
    ]
)
ROWS = [
    {"i": 1, "untyped": None, "empty": {}, "v": [0.5, 1.5], "d": {"t": "x", "n": None},
     "deep": [{"ll": [[1], []]}, None], "u": None},
    {"i": None, "untyped": None, "empty": None, "v": None, "d": None, "deep": None, "u": None},
]  # fmt: skip


def batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4", "snappy"])
def test_a_batch_survives_the_round_trip_to_its_physical_form(compression: str | None) -> None:
    physical = layout.physical_schema(SCHEMA, compression)
    arrival = pa.array([1, 2], pa.int64()).cast(layout.ARRIVAL_FIELD.type)
    stored = layout.to_physical(batch(), arrival, physical)
    stored.validate(full=True)
    assert "untyped" not in stored.schema.names
    assert stored.column(ARRIVAL).to_pylist() == arrival.to_pylist()
    assert layout.to_logical(stored, SCHEMA).equals(batch())


def test_records_without_fields_keep_their_number_of_rows() -> None:
    physical = layout.physical_schema(EMPTY, None)
    nothing = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    arrival = pa.array([1, 2], pa.int64()).cast(layout.ARRIVAL_FIELD.type)
    stored = layout.to_physical(nothing, arrival, physical)
    assert layout.to_logical(stored, EMPTY).num_rows == 2


def test_the_schema_of_records_is_stored_in_the_table() -> None:
    physical = layout.physical_schema(SCHEMA, "zstd")
    assert layout.logical_schema(physical, "here").equals(SCHEMA)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (None, "no Persisting backend wrote"),
        ({"other": "x"}, "no Persisting backend wrote"),
        ({layout.SCHEMA_KEY: "x"}, "no Persisting backend wrote"),
        ({layout.SCHEMA_KEY: "x", layout.FORMAT_KEY: "99"}, "format 99.*upgrade"),
        ({layout.SCHEMA_KEY: "x", layout.FORMAT_KEY: "one"}, "format one"),
        ({layout.SCHEMA_KEY: "!!", layout.FORMAT_KEY: "1"}, "cannot be read"),
        ({layout.SCHEMA_KEY: "AAAA", layout.FORMAT_KEY: "1"}, "cannot be read"),
    ],
)
def test_a_table_not_written_by_persisting_is_refused(
    metadata: dict[str, str] | None, why: str
) -> None:
    with pytest.raises(TableError, match=why):
        layout.logical_schema(pa.schema([("a", pa.int64())], metadata), "here")


def test_vector_columns_have_no_codec() -> None:
    field = layout.physical_schema(SCHEMA, "zstd").field("v")
    assert not any(k.startswith(b"lance-encoding") for k in field.metadata or {})


def test_encoding_changes_list_only_fields_that_differ() -> None:
    none, zstd = layout.physical_schema(SCHEMA, None), layout.physical_schema(SCHEMA, "zstd")
    assert layout.encoding_changes(zstd, zstd) == {}
    changes = layout.encoding_changes(none, zstd)
    assert changes["i"]["lance-encoding:compression"] == "zstd"
    assert changes["d.t"]["lance-encoding:compression"] == "zstd"
    assert "v" not in changes
    back = layout.encoding_changes(zstd, none)
    assert set(back) == set(changes)
    assert all(value is None for entry in back.values() for value in entry.values())


@pytest.mark.parametrize("name", ["zstd", "lz4", "snappy"])
def test_every_codec_has_a_documented_effect(name: str) -> None:
    field = layout.physical_schema(pa.schema([("t", pa.string())]), name).field("t")
    codec = field.metadata[b"lance-encoding:compression"].decode()
    assert layout.EFFECTIVE[name].startswith(codec)
