"""JSON lines: each a record, or an error that names it.

The lines are looked through before anything is written: whether each is an object, and, unless the
caller says, of which types. These are found as a queue finds them, where Spark would make text of
what contradicts itself.
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
from persisting.spark.jobs.columns import named
from persisting.spark.jobs.spark_files import Files, with_columns
from persisting.spark.types import spark_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RULES = Rules(evolving=True)
_FOUND = "schema binary, again boolean, kind string, problem string, path string, line binary"
_LINE, _PATH = "_persisting_line", "_persisting_path"
_SHOWN = 80
"""Characters that are shown of a line."""


class Problem(NamedTuple):
    """A line that is no record."""

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
            f"{place} is no JSON object ({self.problem}); nothing was stored. Each line has to be "
            "a whole one"
        )


def read(
    spark: SparkSession, files: Files, said: str | StructType | None, known: StructType
) -> DataFrame:
    """The rows of all files; raises for a line that is none."""
    if said is None:
        return _decoded(spark, files, _learned(spark, files), known)
    _look(spark, files, None)
    reader = spark.read.schema(said).option("recursiveFileLookup", True)
    types = with_columns(reader.json(files.path).schema, files.columns, known)
    return files.load(spark, "json", types, mode="FAILFAST")


@contextmanager
def misfits_named(spark: SparkSession, files: Files, types: StructType) -> Iterator[None]:
    """What fails for a line that does not fit the types is told with its file and number."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException:
        raise
    except (PySparkException, Py4JJavaError) as exc:
        found = _misfit(spark, files, types)
        if found is None:
            raise
        raise found.error() from exc


def _learned(spark: SparkSession, files: Files) -> pa.Schema:
    """The fields of all lines, each of the narrowest type that holds its values."""
    whole, again = EMPTY, False
    for schema, lost in _look(spark, files, EMPTY):
        try:
            both = merge(whole, schema, _RULES)
        except SchemaError:
            _look(spark, files, whole)  # names the line
            raise
        again = again or lost or _are_floats_now(whole, both) or _are_floats_now(schema, both)
        whole = both
    if again:
        _look(spark, files, whole)
    return whole


def _are_floats_now(old: pa.Schema, new: pa.Schema) -> bool:
    return any(integers_become_floats(f.type, new.field(f.name).type) for f in old)


def _look(spark: SparkSession, files: Files, start: pa.Schema | None) -> list[tuple[Any, bool]]:
    """What each task learns beyond ``start``; raises for the first line that is no record."""
    lines = _lines(files.load(spark, "text", StructType([StructField("value", StringType())])))
    found = lines.mapInArrow(_looking(start), _FOUND).collect()
    for row in found:
        if row["kind"] is not None:
            raise Problem(row["kind"], row["problem"], row["path"], bytes(row["line"])).error()
    return [(pa.ipc.read_schema(pa.py_buffer(row["schema"])), row["again"]) for row in found]


def _lines(texts: DataFrame, *others: str) -> DataFrame:
    """Lines that are not empty, as bytes, with their files."""
    line = sf.col("value").cast("binary").alias(_LINE)
    path = sf.col("_metadata.file_path").alias(_PATH)
    return texts.where(sf.col("value").rlike(r"\S")).select(line, path, *map(named, others))


def _looking(start: pa.Schema | None) -> Any:
    """Runs in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shaper, again = RecordEncoder(start or EMPTY, _RULES, defined=bool(start)), False
        for batch in batches:
            lines = list(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
            try:
                records = [_object(line) for line, _ in lines]
                before, shaper = shaper.schema, shaper if start is None else _after(shaper, records)
            except (InvalidArgument, SchemaError):
                yield _answer(None, again, _first_problem(shaper, lines, learns=start is not None))
                return
            again = again or _are_floats_now(before, shaper.schema)
        yield _answer(shaper.schema, again, None)

    return run


def _after(shaper: RecordEncoder, records: list[dict[str, Any]]) -> RecordEncoder:
    """What a shaper has become with records; all of them fit it then."""
    _, found = shaper.take(records)
    if found is not shaper:
        found.take(records)
    return found


def _first_problem(
    shaper: RecordEncoder, lines: Iterable[tuple[bytes, str]], *, learns: bool
) -> Problem | None:
    """The line that a batch failed for: the first that does not go with those before it."""
    good: list[dict[str, Any]] = []
    for line, path in lines:
        try:
            good.append(_object(line))
            if learns:
                shaper = _after(shaper, good[-1:])
        except (InvalidArgument, SchemaError) as exc:
            return Problem(type(exc).__name__, str(exc), path, line)
    for (line, path), record in zip(lines, good, strict=True):
        try:
            shaper.take([record])
        except SchemaError as exc:
            return Problem(type(exc).__name__, str(exc), path, line)
    return None


def _answer(schema: pa.Schema | None, again: bool, problem: Problem | None) -> pa.RecordBatch:
    kind, text, path, line = problem or (None, None, None, None)
    known = None if schema is None else schema.serialize().to_pybytes()
    columns = [
        pa.array([known], pa.binary()),
        pa.array([again], pa.bool_()),
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
    """The rows of lines that were looked through, with the values of their folders."""
    from pyspark.sql.pandas.types import from_arrow_schema

    data = from_arrow_schema(spark_schema(schema))
    types = with_columns(data, files.columns, known)
    others = types.fields[len(data) :]
    texts = files.load(spark, "text", StructType([StructField("value", StringType()), *others]))
    lines = _lines(texts, *(field.name for field in others))
    return lines.mapInArrow(_decoding(schema), types)


def _decoding(schema: pa.Schema) -> Any:
    """Runs in an executor."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shaper, target = RecordEncoder(schema, _RULES), spark_schema(schema)
        for batch in batches:
            rows, now = shaper.take([_object(line) for line in batch.column(0).to_pylist()])
            for made in to_spark([now.to_batch(rows)], target):
                yield pa.RecordBatch.from_arrays(
                    [*made.columns, *batch.columns[2:]], [*target.names, *batch.schema.names[2:]]
                )

    return run


def _misfit(spark: SparkSession, files: Files, types: StructType) -> Problem | None:
    """A line that is no record of these types."""
    fields = [field for field in types.fields if field.name not in files.columns]
    rows = (
        spark.read.schema(StructType([*fields, StructField(_LINE, StringType())]))
        .options(recursiveFileLookup=True, columnNameOfCorruptRecord=_LINE)
        .json(files.path)
    )
    # Spark looks only at the fields that are asked for.
    every = sf.struct(*(named(field.name) for field in fields))
    found = (
        rows.select(sf.col("_metadata.file_path").alias(_PATH), _LINE, every)
        .where(named(_LINE).isNotNull())
        .head(1)
    )
    if not found:
        return None
    line = found[0][_LINE]
    shown = repr(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…")
    problem = f"{shown} does not fit the schema {types.simpleString()}"
    return Problem(SchemaError.__name__, problem, found[0][_PATH], line.encode())


def _number(path: Path, line: bytes) -> int | None:
    """The number of a line, where the file is one that can be looked into from here."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        with _opened(path) as file:
            every = (one.rstrip("\r\n") for one in file)
            return next((n for n, one in enumerate(every, 1) if one == text), None)
    except OSError:
        return None


def _opened(path: Path) -> IO[str]:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    opened: IO[str] = openers.get(path.suffix, open)(
        path, "rt", encoding="utf-8-sig", errors="surrogateescape"
    )
    return opened
