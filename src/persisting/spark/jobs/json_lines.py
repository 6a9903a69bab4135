"""JSON lines: each is a record, or raises an error that names the line.

All lines are scanned before anything is written: each must be an object. Unless the caller gives a
schema, the scan also infers the types, as a queue infers them; Spark would turn contradictory types
into text.
"""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, StructField, StructType

from persisting.errors import InvalidArgument, SchemaError, StorageError
from persisting.records import EMPTY, RecordEncoder, Rules
from persisting.records.arrow import merge
from persisting.records.evolution import integers_become_floats
from persisting.spark.jobs.columns import exact_column
from persisting.spark.jobs.spark_files import Files, with_columns
from persisting.spark.types import spark_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RULES = Rules(evolving=True)
_REPORT = "schema binary, again boolean, kind string, problem string, path string, line binary"
_LINE, _PATH = "_persisting_line", "_persisting_path"
_MAX_SHOWN = 80
"""Characters of a line that an error shows."""


class Problem(NamedTuple):
    """A line that is not a record, or does not fit the types."""

    kind: str
    problem: str
    path: str
    line: bytes

    def error(self) -> StorageError:
        path = unquote(urlsplit(self.path).path)
        number = _number(Path(path), self.line)
        place = path if number is None else f"{path}, line {number}"
        if self.kind == SchemaError.__name__:
            return SchemaError(f"{place}: {self.problem}; nothing was stored")
        return InvalidArgument(
            f"{place} is not a JSON object ({self.problem}); nothing was stored. Every line must "
            "be one complete object"
        )


def read(
    spark: SparkSession, files: Files, schema: str | StructType | None, known: StructType
) -> DataFrame:
    """Return the rows of all files; raise for a line that is not an object.

    Without a ``schema`` the types are inferred; ``known`` has those of the topic.
    """
    if schema is None:
        return _decoded(spark, files, _inferred_schema(spark, files), known)
    _scan(spark, files, None)
    reader = spark.read.schema(schema).option("recursiveFileLookup", True)
    types = with_columns(reader.json(files.path).schema, files.columns, known)
    return files.load(spark, "json", types, mode="FAILFAST")


@contextmanager
def bad_lines_named(spark: SparkSession, files: Files, types: StructType) -> Iterator[None]:
    """Name the file and line in errors that are due to a line that does not fit the types."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException:
        raise
    except (PySparkException, Py4JJavaError) as exc:
        problem = _find_misfit(spark, files, types)
        if problem is None:
            raise
        raise problem.error() from exc


def _inferred_schema(spark: SparkSession, files: Files) -> pa.Schema:
    """Return the fields of all lines, each with the narrowest type that holds its values."""
    whole, rescan = EMPTY, False
    for schema, task_rescan in _scan(spark, files, EMPTY):
        try:
            both = merge(whole, schema, _RULES)
        except SchemaError:
            _scan(spark, files, whole)  # raises with the line that contradicts
            raise
        rescan = rescan or task_rescan or _widens(whole, both) or _widens(schema, both)
        whole = both
    if rescan:
        _scan(spark, files, whole)
    return whole


def _widens(old: pa.Schema, new: pa.Schema) -> bool:
    """Whether integers became floats; the lines must then be checked for integers too large."""
    return any(integers_become_floats(f.type, new.field(f.name).type) for f in old)


def _scan(spark: SparkSession, files: Files, start: pa.Schema | None) -> list[tuple[Any, bool]]:
    """Scan all lines; raise for the first that is not a record.

    Returns for each task the schema that it inferred on top of ``start`` (without ``start``, types
    are ignored), and whether the lines must be scanned again.
    """
    lines = _lines(files.load(spark, "text", StructType([StructField("value", StringType())])))
    reports = lines.mapInArrow(_scan_task(start), _REPORT).collect()
    for row in reports:
        if row["kind"] is not None:
            raise Problem(row["kind"], row["problem"], row["path"], bytes(row["line"])).error()
    return [(pa.ipc.read_schema(pa.py_buffer(row["schema"])), row["again"]) for row in reports]


def _lines(texts: DataFrame, *others: str) -> DataFrame:
    """Return the lines that are not blank, as bytes, with their files."""
    line = sf.col("value").cast("binary").alias(_LINE)
    path = sf.col("_metadata.file_path").alias(_PATH)
    return texts.where(sf.col("value").rlike(r"\S")).select(line, path, *map(exact_column, others))


def _scan_task(start: pa.Schema | None) -> Any:
    """Return the function that scans lines in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder, rescan = RecordEncoder(start or EMPTY, _RULES, defined=bool(start)), False
        for batch in batches:
            lines = list(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
            try:
                records = [_object(line) for line, _ in lines]
                before = encoder.schema
                encoder = encoder if start is None else _widened(encoder, records)
            except (InvalidArgument, SchemaError):
                problem = _first_problem(encoder, lines, infers=start is not None)
                yield _report(None, rescan, problem)
                return
            rescan = rescan or _widens(before, encoder.schema)
        yield _report(encoder.schema, rescan, None)

    return run


def _widened(encoder: RecordEncoder, records: list[dict[str, Any]]) -> RecordEncoder:
    """Return an encoder that all the records fit."""
    _, wider = encoder.take(records)
    if wider is not encoder:
        wider.take(records)
    return wider


def _first_problem(
    encoder: RecordEncoder, lines: Iterable[tuple[bytes, str]], *, infers: bool
) -> Problem | None:
    """Return the line at which a batch failed: the first that contradicts those before it."""
    good: list[dict[str, Any]] = []
    for line, path in lines:
        try:
            good.append(_object(line))
            if infers:
                encoder = _widened(encoder, good[-1:])
        except (InvalidArgument, SchemaError) as exc:
            return Problem(type(exc).__name__, str(exc), path, line)
    for (line, path), record in zip(lines, good, strict=True):
        try:
            encoder.take([record])
        except SchemaError as exc:
            return Problem(type(exc).__name__, str(exc), path, line)
    return None


def _report(schema: pa.Schema | None, rescan: bool, problem: Problem | None) -> pa.RecordBatch:
    kind, text, path, line = problem or (None, None, None, None)
    serialized = None if schema is None else schema.serialize().to_pybytes()
    columns = [
        pa.array([serialized], pa.binary()),
        pa.array([rescan], pa.bool_()),
        pa.array([kind], pa.string()),
        pa.array([text], pa.string()),
        pa.array([path], pa.string()),
        pa.array([line], pa.binary()),
    ]
    names = ["schema", "again", "kind", "problem", "path", "line"]
    return pa.RecordBatch.from_arrays(columns, names)


def _object(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(str(exc)) from exc


def _decoded(spark: SparkSession, files: Files, schema: pa.Schema, known: StructType) -> DataFrame:
    """Return the rows of lines that were scanned, with the values of their folders."""
    from pyspark.sql.pandas.types import from_arrow_schema

    data = from_arrow_schema(spark_schema(schema))
    types = with_columns(data, files.columns, known)
    others = types.fields[len(data) :]
    texts = files.load(spark, "text", StructType([StructField("value", StringType()), *others]))
    lines = _lines(texts, *(field.name for field in others))
    return lines.mapInArrow(_decode_task(schema), types)


def _decode_task(schema: pa.Schema) -> Any:
    """Return the function that decodes lines in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder, target = RecordEncoder(schema, _RULES), spark_schema(schema)
        for batch in batches:
            records = [_object(line) for line in batch.column(0).to_pylist()]
            rows, fitted = encoder.take(records)
            for converted in to_spark([fitted.to_batch(rows)], target):
                yield pa.RecordBatch.from_arrays(
                    [*converted.columns, *batch.columns[2:]],
                    [*target.names, *batch.schema.names[2:]],
                )

    return run


def _find_misfit(spark: SparkSession, files: Files, types: StructType) -> Problem | None:
    """Return a line that does not fit these types."""
    fields = [field for field in types.fields if field.name not in files.columns]
    rows = (
        spark.read.schema(StructType([*fields, StructField(_LINE, StringType())]))
        .options(recursiveFileLookup=True, columnNameOfCorruptRecord=_LINE)
        .json(files.path)
    )
    # Spark parses only the fields that are selected.
    every = sf.struct(*(exact_column(field.name) for field in fields))
    found = (
        rows.select(sf.col("_metadata.file_path").alias(_PATH), _LINE, every)
        .where(exact_column(_LINE).isNotNull())
        .head(1)
    )
    if not found:
        return None
    line = found[0][_LINE]
    shown = repr(line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}…")
    problem = f"{shown} does not fit the schema {types.simpleString()}"
    return Problem(SchemaError.__name__, problem, found[0][_PATH], line.encode())


def _number(path: Path, line: bytes) -> int | None:
    """Return the number of a line; None if the file cannot be read from here."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        with _open_text(path) as file:
            lines = (each.rstrip("\r\n") for each in file)
            return next((n for n, each in enumerate(lines, 1) if each == text), None)
    except OSError:
        return None


def _open_text(path: Path) -> IO[str]:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    file: IO[str] = openers.get(path.suffix, open)(
        path, "rt", encoding="utf-8-sig", errors="surrogateescape"
    )
    return file
