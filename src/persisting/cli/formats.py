"""File formats of records: Parquet, Lance, JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "lance", "jsonl")
_FORMAT_OF_EXTENSION = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".lance": "lance",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


def format_of(name: str) -> str:
    """Return the format of a file by the extension of its name."""
    extension = Path(name.rstrip(os.sep)).suffix.lower()
    if extension not in _FORMAT_OF_EXTENSION:
        raise click.UsageError(
            f"{name}: unknown extension; use one of {', '.join(_FORMAT_OF_EXTENSION)}."
        )
    return _FORMAT_OF_EXTENSION[extension]


def batches(name: str, kind: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file or a Lance dataset in batches."""
    import pyarrow as pa

    from persisting.errors import StorageError
    from persisting.table.lance_errors import reason

    try:
        if kind == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(name) as file:
                yield from file.iter_batches(batch_size=rows)
        else:
            import lance

            yield from lance.dataset(name).scanner(batch_size=rows, scan_in_order=True).to_batches()
    except (pa.ArrowException, ValueError, OSError) as exc:
        raise StorageError(f"cannot read {name} as {kind}: {reason(exc)}") from exc
