"""Parquet files of any writers: the fields of all of them, in types that hold all values."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
)

from persisting.errors import InvalidArgument, SchemaError
from persisting.records import EMPTY, Rules
from persisting.records.arrow import merge
from persisting.spark.jobs.spark_files import Files, literal, with_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WIDER: dict[type[DataType], tuple[type[DataType], ...]] = {
    ByteType: (ShortType, IntegerType, LongType, DoubleType),
    ShortType: (IntegerType, LongType, DoubleType),
    IntegerType: (LongType, DoubleType),
    FloatType: (DoubleType,),
}
"""As what Spark reads a type, with nothing lost."""


def read(
    spark: SparkSession, files: Files, said: str | StructType | None, known: StructType
) -> DataFrame:
    """The rows of all files."""
    if said is None:
        data = _merged(spark, files)
    else:
        reader = spark.read.schema(said).option("recursiveFileLookup", True)
        data = reader.parquet(files.path).schema
    return files.load(spark, "parquet", with_columns(data, files.columns, known))


def _merged(spark: SparkSession, files: Files) -> StructType:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    reader = spark.read.option("recursiveFileLookup", True).option("mergeSchema", True)
    try:
        return reader.parquet(files.path).schema
    except (PySparkException, Py4JJavaError) as exc:
        kinds = _kinds(files)
        _refuse_nanoseconds(kinds)
        if "CANNOT_MERGE_SCHEMAS" not in str(exc):
            raise
    return _widened({path: spark.read.parquet(literal(path)).schema for path in kinds})


def _kinds(files: Files) -> dict[str, pa.Schema]:
    """A file of each schema that there is, as far as they can be looked into from here."""
    import pyarrow.parquet as pq

    found: dict[str, tuple[str, pa.Schema]] = {}
    for path in files.paths:
        with suppress(OSError, pa.ArrowException):
            schema = pq.read_schema(path).remove_metadata()
            found.setdefault(str(schema), (path, schema))
    return dict(found.values())


def _refuse_nanoseconds(kinds: dict[str, pa.Schema]) -> None:
    for path, schema in kinds.items():
        for field in schema:
            if "[ns" in str(field.type):
                raise InvalidArgument(
                    f"{path}: field {field.name!r} is {field.type}, and Spark reads no nanoseconds;"
                    " write it with microseconds, or use 'persisting import'"
                )


def _widened(kinds: dict[str, StructType]) -> StructType:
    """The fields of all, each of the narrowest type that Spark reads them all as."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    whole: pa.Schema = EMPTY
    for path, kind in kinds.items():
        try:
            whole = merge(whole, to_arrow_schema(kind, timezone="UTC"), Rules(evolving=True))
        except SchemaError as exc:
            raise InvalidArgument(f"{path}: {exc} as in other files; ingest it by itself") from exc
    found = from_arrow_schema(whole)
    for path, kind in kinds.items():
        for field in kind:
            wide = found[field.name].dataType
            if not _holds(wide, field.dataType):
                raise InvalidArgument(
                    f"{path}: field {field.name!r} is {field.dataType.simpleString()}, which is "
                    f"not read as {wide.simpleString()}, as other files have it; ingest it by "
                    "itself"
                )
    return found


def _holds(wide: DataType, narrow: DataType) -> bool:
    if isinstance(wide, ArrayType) and isinstance(narrow, ArrayType):
        return _holds(wide.elementType, narrow.elementType)
    if isinstance(wide, StructType) and isinstance(narrow, StructType):
        return all(_holds(wide[field.name].dataType, field.dataType) for field in narrow)
    return wide == narrow or type(wide) in _WIDER.get(type(narrow), ())
