"""Indexes: a small file lists the requested ones, and maintenance builds them.

A row that an index does not cover yet is found all the same: Lance scans such rows in addition to
the index. So an index may be built late, be rebuilt, or be lost with an old version, and only speed
changes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from persisting import json_files
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import FileSystem
from persisting.records.evolution import is_vector
from persisting.suggestions import choices
from persisting.table import text_analysis
from persisting.table.lance_errors import indices_of

log = logging.getLogger("persisting")

FILE = "indexes.json"

VECTOR_KINDS = {"ivf_flat": "IVF_FLAT", "ivf_rq": "IVF_RQ", "ivf_hnsw_sq": "IVF_HNSW_SQ"}
SCALAR_KINDS = {"btree": "BTREE", "bitmap": "BITMAP"}
KINDS = ("vector", "text", "scalar", *VECTOR_KINDS, *SCALAR_KINDS)
"""``vector`` stands for IVF_FLAT (exact distances; measured: recall 1.00 at a twentieth of the
build time of HNSW), ``scalar`` for BTREE."""

METRICS = ("l2", "cosine", "dot")

LEAST_VECTORS = 1024
"""With fewer rows a scan is as fast as an index, and exact."""

_PARTITION_ROWS = 1024
_TEXT_VERSION = 2
_TEXT_VERSION_1 = "persisting_text_text_l2_"
"""The prefix of names of text indexes that split text differently and kept no positions."""
_RETRAIN = 8


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A requested index."""

    column: str
    kind: str
    metric: str = "l2"
    language: str | None = None
    """For text: words with the same stem in this language match each other."""

    @property
    def family(self) -> str:
        """vector, text or scalar: a column has at most one index of each."""
        if self.kind in VECTOR_KINDS:
            return "vector"
        return "scalar" if self.kind in SCALAR_KINDS else self.kind

    @property
    def name(self) -> str:
        """Its name in the table; contains all settings, so other settings mean another name."""
        if self.family == "text":
            return f"persisting_text_{_TEXT_VERSION}_{self.language or 'words'}_{self.column}"
        return f"persisting_{self.family}_{self.kind}_{self.metric}_{self.column}"


def spec_for(
    schema: pa.Schema, column: Any, kind: Any, metric: Any, language: Any = None
) -> IndexSpec:
    """The index of a field with these settings; raises if the field cannot have it."""
    if kind is not None and kind not in KINDS:
        raise InvalidArgument(f"kind must be None or one of {', '.join(KINDS)}, got {kind!r}")
    if metric not in METRICS:
        raise InvalidArgument(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if language is not None and language not in text_analysis.LANGUAGES:
        raise InvalidArgument(
            f"language must be None or one of {', '.join(text_analysis.LANGUAGES)}, "
            f"got {language!r}"
        )
    dtype = field_of(schema, column).type
    if kind is None:
        kind = _natural_kind(dtype)
    spec = IndexSpec(column=column, kind=_specific(kind), metric=metric)
    if not fits(spec.family, dtype):
        raise InvalidArgument(
            f"field {column!r} is {dtype}, which takes no {spec.family} index"
            + ("; vectors are lists of floats of one length" if spec.family == "vector" else "")
        )
    if language is not None and spec.family != "text":
        raise InvalidArgument(
            f"language={language!r} is for text indexes; the index of field {column!r} would be "
            f"a {spec.family} index"
        )
    if spec.family == "vector":
        return spec
    return msgspec.structs.replace(spec, metric="l2", language=language)


def _specific(kind: str) -> str:
    return {"vector": "ivf_flat", "scalar": "btree"}.get(kind, kind)


def _natural_kind(dtype: pa.DataType) -> str:
    if is_vector(dtype):
        return "vector"
    return "text" if is_text(dtype) else "scalar"


def field_of(schema: pa.Schema, column: Any) -> pa.Field:
    """Return the field of that name, or raise."""
    if not isinstance(column, str) or column not in schema.names:
        hint = choices(str(column), schema.names)
        raise InvalidArgument(f"there is no field {column!r}; {hint}")
    return schema.field(column)


def is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def is_scalar(dtype: pa.DataType) -> bool:
    return not pa.types.is_nested(dtype) and not pa.types.is_null(dtype)


def load(folder: Path, fs: FileSystem) -> list[IndexSpec]:
    """The requested indexes of the table in ``folder``."""
    try:
        return json_files.decode(fs.read(folder / FILE), list[IndexSpec])
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise StorageError(
            f"cannot read {folder / FILE}: {exc.strerror or exc}; fix the cause and retry"
        ) from exc
    except msgspec.DecodeError as exc:
        raise StorageError(
            f"{folder / FILE} is damaged ({exc}); remove it and create the indexes again"
        ) from exc


def save(folder: Path, specs: list[IndexSpec], fs: FileSystem) -> None:
    try:
        fs.write_file(folder / FILE, msgspec.json.encode(specs) + b"\n")
    except OSError as exc:
        raise StorageError(f"cannot write {folder / FILE}: {exc.strerror or exc}") from exc


class Built(msgspec.Struct, frozen=True):
    """An index of a version: the rows it covers and its segments."""

    name: str
    rows: int
    segments: tuple[str, ...]


def built(dataset: Any) -> dict[str, Built]:
    """The indexes that a version has, by name."""
    return {
        index.name: Built(
            index.name, index.num_rows_indexed, tuple(segment.uuid for segment in index.segments)
        )
        for index in indices_of(dataset)
    }


def missing(dataset: Any, specs: list[IndexSpec], rows: int) -> list[IndexSpec]:
    """The indexes to build now: missing ones, and those trained when the table was much smaller."""
    if not specs or not rows:
        return []
    existing = built(dataset)

    def is_due(spec: IndexSpec) -> bool:
        if spec.family != "vector":
            return spec.name not in existing
        return rows >= LEAST_VECTORS and _trained_rows(dataset, existing, spec) * _RETRAIN < rows

    return [spec for spec in specs if is_due(spec) and _takes(dataset.schema, spec)]


def _takes(schema: pa.Schema, spec: IndexSpec) -> bool:
    """Whether a table has the column, and its current type can be indexed like this."""
    if spec.column not in schema.names:
        return False
    return fits(spec.family, schema.field(spec.column).type)


def fits(family: str, dtype: pa.DataType) -> bool:
    """Whether fields of a type can have an index of a family."""
    return {"vector": is_vector, "text": is_text, "scalar": is_scalar}[family](dtype)


def usable(schema: pa.Schema, specs: list[IndexSpec]) -> list[IndexSpec]:
    """The requested indexes that the fields can have now: vectors may have become lists."""
    return [
        spec
        for spec in specs
        if spec.column not in schema.names or fits(spec.family, schema.field(spec.column).type)
    ]


def _trained_rows(dataset: Any, existing: dict[str, Built], spec: IndexSpec) -> int:
    if spec.name not in existing:
        return 0
    os.environ.setdefault("LANCE_INCLUDE_VECTOR_CENTROIDS", "false")  # else Lance warns
    stats = dataset.stats.index_stats(spec.name)
    partitions = [part.get("num_partitions", 1) for part in stats.get("indices", [])]
    return max(partitions, default=1) * _PARTITION_ROWS


def build(dataset: Any, spec: IndexSpec, rows: int) -> None:
    """Build an index over all rows; it replaces one of the same name."""
    if spec.family == "vector":
        dataset.create_index(
            spec.column,
            VECTOR_KINDS[spec.kind],
            name=spec.name,
            metric=spec.metric,
            num_partitions=max(1, rows // _PARTITION_ROWS),
            replace=True,
        )
    elif spec.family == "text":
        settings = text_analysis.index_settings(spec.language)
        dataset.create_scalar_index(
            spec.column, "INVERTED", name=spec.name, replace=True, **settings
        )
    else:
        kind = SCALAR_KINDS[spec.kind]
        dataset.create_scalar_index(spec.column, kind, name=spec.name, replace=True)


def unwanted(dataset: Any, specs: list[IndexSpec]) -> list[str]:
    """The names of our indexes that are no longer requested."""
    requested = {spec.name for spec in specs}
    return [n for n in built(dataset) if n.startswith("persisting_") and n not in requested]


def outdated(dataset: Any) -> list[str]:
    """The fields with a text index that an older version built."""
    old = _TEXT_VERSION_1
    return [name.removeprefix(old) for name in built(dataset) if name.startswith(old)]


def behind(dataset: Any) -> int:
    """How many rows the index that lags most does not cover yet."""
    rows = dataset.count_rows()
    return max((rows - index.rows for index in built(dataset).values()), default=0)
