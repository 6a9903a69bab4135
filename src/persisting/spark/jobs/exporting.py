"""Rows to files: Parquet, Lance, JSON lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.errors import InvalidArgument
from persisting.spark.jobs import lance_files
from persisting.spark.jobs.columns import existing
from persisting.spark.jobs.counting import counted
from persisting.spark.jobs.formats import JSONL, LANCE, PARQUET, named_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODES = ("error", "overwrite", "append")


def export(
    df: DataFrame,
    path: str | Path,
    *,
    format: str | None = None,
    partition_by: str | Sequence[str] = (),
    mode: str = "error",
    vectors: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Write the rows of ``df`` to files below ``path``.

    ``format`` is ``parquet``, ``lance`` or ``jsonl``; without it the end of the path says which
    (``.lance``, ``.jsonl``), else it is Parquet. ``partition_by`` makes a folder for each value of
    these columns. ``mode`` says what happens if something is there: ``error``, ``overwrite`` or
    ``append``. ``vectors`` (name: length) are arrays of floats that Lance stores as vectors, to be
    searched. What is returned says ``path``, ``format``, ``rows``, and the ``files`` and ``bytes``
    that are there now. JSON lines keep no types: bytes become text (base64), and so do times.
    """
    if mode not in MODES:
        raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    chosen = named_format(format, path) or PARQUET
    if vectors and chosen != LANCE:
        raise InvalidArgument(f"vectors are for the format lance, not for {chosen}")
    by = existing(df, partition_by, "partition_by") if partition_by else []
    root = Path(str(path).removeprefix("file://")).absolute()
    if mode == "error" and root.exists() and any(root.iterdir()):
        raise InvalidArgument(f"{root} is there already; say mode='overwrite' or 'append'")
    if chosen == LANCE:
        rows = lance_files.write(df, root, by, vectors or {}, overwrite=mode != "append")
    else:
        rows = _write(df, root, chosen, by, "append" if mode == "append" else "overwrite")
    count, size = _on_disk(root)
    return {"path": str(root), "format": chosen, "rows": rows, "files": count, "bytes": size}


def _write(df: DataFrame, root: Path, chosen: str, by: list[str], mode: str) -> int:
    with counted(df) as (rows, count):
        writer = rows.write.mode(mode).partitionBy(*by)
        if chosen == JSONL:
            writer = writer.option("ignoreNullFields", False)
        writer.format("json" if chosen == JSONL else chosen).save(str(root))
    return count()


def _on_disk(root: Path) -> tuple[int, int]:
    """(files, bytes) of the data below a folder."""
    sizes = [
        os.path.getsize(Path(place, name))
        for place, _, names in os.walk(root)
        if not Path(place).name.startswith("_")
        for name in names
        if not name.startswith(("_", "."))
    ]
    return len(sizes), sum(sizes)
