"""File formats of records: Parquet, Lance, JSON lines, CSV and TSV."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from persisting.errors import SchemaError
from persisting.suggestions import choices

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("parquet", "lance", "jsonl")
"""What a topic can be exported to."""
_FORMAT_OF_EXTENSION = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".lance": "lance",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_IMPORTED = {**_FORMAT_OF_EXTENSION, ".csv": "csv", ".tsv": "tsv"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSIBLE = ("jsonl", "csv", "tsv")
_INFERRED_BYTES = 8 << 20
"""The first bytes of a CSV file, from which the types of its columns are inferred."""


_WRONG_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): .* invalid value ('.*')", re.DOTALL)


class FileFormat(NamedTuple):
    """The format of a file to import."""

    kind: str
    compression: str | None


def imported_format(name: str) -> FileFormat:
    """Return the format of a file to import by the extensions of its name."""
    path = Path(name.rstrip(os.sep))
    compression = _COMPRESSIONS.get(path.suffix.lower())
    extension = (Path(path.stem) if compression else path).suffix.lower()
    kind = _IMPORTED.get(extension)
    if kind is None or (compression and kind not in _COMPRESSIBLE):
        raise click.UsageError(
            f"{name}: unknown extension; use one of {', '.join(_IMPORTED)}; text files may also "
            f"end in {' or '.join(_COMPRESSIONS)}."
        )
    return FileFormat(kind, compression)


def holds_lines(name: str) -> bool:
    """Return whether a file may hold JSON lines, by the extensions of its name."""
    path = Path(name)
    stem = Path(path.stem) if path.suffix.lower() in _COMPRESSIONS else path
    return _IMPORTED.get(stem.suffix.lower(), "jsonl") == "jsonl"


def compression_of(name: str) -> str | None:
    """Return how a file is compressed, by the extension of its name."""
    return _COMPRESSIONS.get(Path(name).suffix.lower())


class _Reads:
    """Reads from a descriptor of its own, for a thread that may outlive the open file.

    A thread that still reads after the file was closed would otherwise read, and consume, whatever
    file got the same descriptor next. The copy is closed when the last reader drops it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def __call__(self, size: int) -> bytes:
        return os.read(self._fd, size)


@contextmanager
def decompressed(file: IO[bytes], compression: str | None) -> Iterator[Callable[[int], bytes]]:
    """Yield the function that reads a file, at most the given number of bytes at a time."""
    if compression is None:
        yield _Reads(file.fileno())
        return
    import pyarrow as pa

    from persisting.errors import StorageError
    from persisting.table.lance_errors import reason

    with pa.CompressedInputStream(pa.PythonFile(file, "r"), compression) as stream:

        def read(size: int) -> bytes:
            try:
                data: bytes = stream.read(size)
            except OSError as exc:
                name = getattr(file, "name", "the input")
                raise StorageError(f"cannot read {name} as {compression}: {reason(exc)}") from exc
            return data

        yield read


def format_of(name: str) -> str:
    """Return the format of a file to export to by the extension of its name."""
    extension = Path(name.rstrip(os.sep)).suffix.lower()
    if extension not in _FORMAT_OF_EXTENSION:
        raise click.UsageError(
            f"{name}: unknown extension; use one of {', '.join(_FORMAT_OF_EXTENSION)}."
        )
    return _FORMAT_OF_EXTENSION[extension]


def batches(
    name: str,
    form: FileFormat,
    rows: int,
    texts: list[str],
    invalid_row: Callable[[int | None, str], str] | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table file in batches.

    ``texts``: columns of a CSV file whose values are text, whatever they look like.
    ``invalid_row``: called for CSV rows with a wrong number of values; None: they are errors.
    """
    import pyarrow as pa

    from persisting.errors import StorageError
    from persisting.table.lance_errors import reason

    kind = form.kind
    try:
        if kind in ("csv", "tsv"):
            yield from _csv_batches(name, form, texts, invalid_row)
        elif kind == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(name) as file:
                yield from file.iter_batches(batch_size=rows)
        else:
            import lance

            yield from lance.dataset(name).scanner(batch_size=rows, scan_in_order=True).to_batches()
    except SchemaError:
        raise
    except (pa.ArrowException, ValueError, OSError) as exc:
        raise StorageError(f"cannot read {name} as {kind}: {reason(exc)}") from exc


def _csv_batches(
    name: str,
    form: FileFormat,
    texts: list[str],
    invalid_row: Callable[[int | None, str], str] | None,
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyarrow import csv

    def handle(row: Any) -> str:
        assert invalid_row is not None
        return invalid_row(row.number, row.text)

    separator = "\t" if form.kind == "tsv" else ","
    with pa.input_stream(name, compression=form.compression) as stream:
        try:
            reader = csv.open_csv(
                stream,
                # One thread: rows then have numbers, which errors and skipped rows are named by.
                read_options=csv.ReadOptions(block_size=_INFERRED_BYTES, use_threads=False),
                parse_options=csv.ParseOptions(
                    delimiter=separator,
                    newlines_in_values=True,
                    invalid_row_handler=None if invalid_row is None else handle,
                ),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(texts, pa.string()),
                    # Only an empty value is null; "NA" and quoted empty text are text.
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as exc:
            if "Empty CSV file" in str(exc):
                return
            raise
        missing = [text for text in texts if text not in reader.schema.names]
        if missing:
            hint = choices(missing[0], reader.schema.names)
            raise click.UsageError(f"{name} has no column {missing[0]!r}; {hint}")
        try:
            yield from reader
        except pa.ArrowInvalid as exc:
            wrong = _WRONG_VALUE.search(str(exc))
            if wrong is None:
                raise
            column = reader.schema.names[int(wrong[1])]
            raise SchemaError(
                f"{name}, row {wrong[2]}: column {column!r} is {reader.schema.field(column).type} "
                f"by its first values, but has {wrong[3]}; import the file into a new topic with "
                f"--text {column}"
            ) from exc
