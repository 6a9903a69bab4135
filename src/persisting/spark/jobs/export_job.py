"""Export of rows to files: Parquet, Lance, JSON lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.errors import InvalidArgument
from persisting.spark.jobs import lance_files, spark_files
from persisting.spark.jobs.columns import checked_columns
from persisting.spark.jobs.export_targets import MODES, check_mode, export_folder, write_and_replace
from persisting.spark.jobs.file_formats import LANCE, PARQUET, is_partition, named_format
from persisting.spark.query_errors import readable_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@readable_errors
def export(
    df: DataFrame,
    path: str | Path,
    *,
    format: str | None = None,
    partition_by: str | Sequence[str] = (),
    mode: str = "error",
    vectors: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Write the rows of ``df`` to files below ``path``, a folder that contains no topic.

    ``format`` is ``parquet``, ``lance`` or ``jsonl``; by default the suffix of the path decides
    (``.lance``, ``.jsonl``), else it is Parquet. ``partition_by`` makes a folder for each value of
    these columns. Except for Lance, the values are then only in the name of the folder, as text;
    empty text is refused, since it would be read as null. ``mode`` says what to do if the folder is
    not empty: ``error``, ``overwrite`` (replace everything, once the rows are written) or
    ``append``, which needs the same format and ``partition_by``. ``vectors`` (name: length) names
    arrays of floats that Lance stores as vectors, for search. Returns ``path``, ``format``,
    ``rows``, and the ``files`` and ``bytes`` that the folder now has. JSON lines keep no types:
    bytes become text (base64), and so do times.
    """
    if mode not in MODES:
        raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    chosen = named_format(format, path) or PARQUET
    if vectors and chosen != LANCE:
        raise InvalidArgument(f"vectors are for the format lance, not for {chosen}")
    if not df.columns:
        raise InvalidArgument("the rows have no columns: there is nothing to export yet")
    by = checked_columns(df, partition_by, "partition_by") if partition_by else []
    root = export_folder(path)
    check_mode(root, mode, chosen, by)
    if chosen == LANCE:
        rows = lance_files.write(df, root, by, vectors or {}, overwrite=mode != "append")
    elif mode == "append":
        rows = spark_files.write(df, root, chosen, by)
    else:
        rows = write_and_replace(root, lambda place: spark_files.write(df, place, chosen, by))
    count, size = _on_disk(root)
    return {"path": str(root), "format": chosen, "rows": rows, "files": count, "bytes": size}


def _on_disk(root: Path) -> tuple[int, int]:
    """Return (files, bytes) of the data below a folder."""
    sizes = [
        os.path.getsize(Path(place, name))
        for place, _, names in os.walk(root)
        if is_partition(Path(place).name) or not Path(place).name.startswith("_")
        for name in names
        if not name.startswith(("_", "."))
    ]
    return len(sizes), sum(sizes)
