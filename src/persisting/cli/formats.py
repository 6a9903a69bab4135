"""Files of records: Parquet, Lance, JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "lance", "jsonl")
_ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".lance": "lance",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}


def format_of(name: str) -> str:
    """The format of a file, by its name."""
    ending = Path(name.rstrip(os.sep)).suffix.lower()
    if ending not in _ENDINGS:
        raise click.UsageError(
            f"{name}: cannot tell the format by the name; it should end with {', '.join(_ENDINGS)}."
        )
    return _ENDINGS[ending]


def batches(name: str, kind: str, rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file or a Lance dataset, a part at a time."""
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
