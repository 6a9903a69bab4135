"""Indexes: what is wanted is kept in a small file; upkeep makes the table have it.

A row that no index covers yet is found all the same: Lance scans such rows beside the index. So an
index may come late, be rebuilt, or be lost with an old version, and only speed changes.
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
from persisting.table.lance_errors import indices_of

log = logging.getLogger("persisting")

FILE = "indexes.json"

VECTOR_KINDS = {"ivf_flat": "IVF_FLAT", "ivf_rq": "IVF_RQ", "ivf_hnsw_sq": "IVF_HNSW_SQ"}
SCALAR_KINDS = {"btree": "BTREE", "bitmap": "BITMAP"}
KINDS = ("vector", "text", "scalar", *VECTOR_KINDS, *SCALAR_KINDS)
"""``vector`` and ``scalar`` choose for the user: IVF_FLAT (exact distances, recall 1.00 at a
twentieth of the build time of HNSW, measured) and BTREE."""

METRICS = ("l2", "cosine", "dot")

TOKENS: dict[str, Any] = {
    "base_tokenizer": "simple",
    "lower_case": True,
    "ascii_folding": True,
    "stem": False,
    "remove_stop_words": False,
    "max_token_length": None,
}
"""How text becomes words, in every index: Lance's own default differs from what it does without
one, and an index must change nothing but speed."""

LEAST_VECTORS = 1024
"""Below this a scan is as fast as an index, and exact."""

_PARTITION_ROWS = 1024
_RETRAIN = 8


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An index as it was asked for."""

    column: str
    kind: str
    metric: str = "l2"

    @property
    def family(self) -> str:
        """vector, text or scalar: a column has at most one index of each."""
        if self.kind in VECTOR_KINDS:
            return "vector"
        return "scalar" if self.kind in SCALAR_KINDS else self.kind

    @property
    def name(self) -> str:
        """Its name in the table; says how it was built, so that another choice is another name."""
        return f"persisting_{self.family}_{self.kind}_{self.metric}_{self.column}"


def wanted_for(schema: pa.Schema, column: Any, kind: Any, metric: Any) -> IndexSpec:
    """Check what was asked for against the fields of the records."""
    if kind is not None and kind not in KINDS:
        raise InvalidArgument(f"kind must be None or one of {', '.join(KINDS)}, got {kind!r}")
    if metric not in METRICS:
        raise InvalidArgument(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    dtype = field_of(schema, column).type
    if kind is None:
        kind = _natural_kind(dtype)
    found = IndexSpec(column=column, kind=_specific(kind), metric=metric)
    if not fits(found.family, dtype):
        raise InvalidArgument(
            f"field {column!r} is {dtype}, which takes no {found.family} index"
            + ("; vectors are lists of floats of one length" if found.family == "vector" else "")
        )
    return found if found.family == "vector" else msgspec.structs.replace(found, metric="l2")


def _specific(kind: str) -> str:
    return {"vector": "ivf_flat", "scalar": "btree"}.get(kind, kind)


def _natural_kind(dtype: pa.DataType) -> str:
    if is_vector(dtype):
        return "vector"
    return "text" if is_text(dtype) else "scalar"


def field_of(schema: pa.Schema, column: Any) -> pa.Field:
    """The field of that name, or raise."""
    if not isinstance(column, str) or column not in schema.names:
        names = ", ".join(map(repr, schema.names)) or "none yet"
        raise InvalidArgument(f"there is no field {column!r}; there are: {names}")
    return schema.field(column)


def is_vector(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(dtype)) and pa.types.is_floating(dtype.value_type)


def is_text(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def is_scalar(dtype: pa.DataType) -> bool:
    return not pa.types.is_nested(dtype) and not pa.types.is_null(dtype)


def load(folder: Path, fs: FileSystem) -> list[IndexSpec]:
    """The indexes that are wanted for the table in ``folder``."""
    try:
        return json_files.decode(fs.read(folder / FILE), list[IndexSpec])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as exc:
        raise StorageError(
            f"{folder / FILE} cannot be read ({exc}); remove it and create the indexes again"
        ) from exc


def save(folder: Path, wanted: list[IndexSpec], fs: FileSystem) -> None:
    try:
        fs.write_file(folder / FILE, msgspec.json.encode(wanted) + b"\n")
    except OSError as exc:
        raise StorageError(f"cannot write {folder / FILE}: {exc.strerror or exc}") from exc


class Built(msgspec.Struct, frozen=True):
    """An index of a version: the rows it covers and the parts it consists of."""

    name: str
    rows: int
    segments: tuple[str, ...]


def built(dataset: Any) -> dict[str, Built]:
    """The indexes that a version has, by name."""
    return {
        one.name: Built(one.name, one.num_rows_indexed, tuple(s.uuid for s in one.segments))
        for one in indices_of(dataset)
    }


def missing(dataset: Any, wanted: list[IndexSpec], rows: int) -> list[IndexSpec]:
    """Those that are to be built now: not there, or trained when the table was much smaller."""
    if not wanted or not rows:
        return []
    there = built(dataset)
    found = []
    for one in wanted:
        if one.family == "vector":
            if rows >= LEAST_VECTORS and _trained_rows(dataset, there, one) * _RETRAIN < rows:
                found.append(one)
        elif one.name not in there:
            found.append(one)
    return [one for one in found if _takes(dataset.schema, one)]


def _takes(schema: pa.Schema, wanted: IndexSpec) -> bool:
    """Whether a table has the column, and of a type that can be indexed so (still)."""
    if wanted.column not in schema.names:
        return False
    return fits(wanted.family, schema.field(wanted.column).type)


def fits(family: str, dtype: pa.DataType) -> bool:
    """Whether fields of a type take an index of a family."""
    return {"vector": is_vector, "text": is_text, "scalar": is_scalar}[family](dtype)


def _trained_rows(dataset: Any, there: dict[str, Built], wanted: IndexSpec) -> int:
    if wanted.name not in there:
        return 0
    os.environ.setdefault("LANCE_INCLUDE_VECTOR_CENTROIDS", "false")  # else Lance warns
    stats = dataset.stats.index_stats(wanted.name)
    partitions = [part.get("num_partitions", 1) for part in stats.get("indices", [])]
    return max(partitions, default=1) * _PARTITION_ROWS


def build(dataset: Any, wanted: IndexSpec, rows: int) -> None:
    """Build an index over all rows, in place of one of the same name."""
    if wanted.family == "vector":
        dataset.create_index(
            wanted.column,
            VECTOR_KINDS[wanted.kind],
            name=wanted.name,
            metric=wanted.metric,
            num_partitions=max(1, rows // _PARTITION_ROWS),
            replace=True,
        )
    elif wanted.family == "text":
        build_text(dataset, wanted.column, wanted.name)
    else:
        kind = SCALAR_KINDS[wanted.kind]
        dataset.create_scalar_index(wanted.column, kind, name=wanted.name, replace=True)


def build_text(dataset: Any, column: str, name: str) -> None:
    """Build the index that a search for words needs."""
    dataset.create_scalar_index(column, "INVERTED", name=name, replace=True, **TOKENS)


def unwanted(dataset: Any, wanted: list[IndexSpec]) -> list[str]:
    """Indexes of ours that nobody wants any more."""
    names = {one.name for one in wanted}
    return [n for n in built(dataset) if n.startswith("persisting_") and n not in names]


def behind(dataset: Any) -> int:
    """How many rows the index that lags most does not cover."""
    rows = dataset.count_rows()
    return max((rows - one.rows for one in built(dataset).values()), default=0)
