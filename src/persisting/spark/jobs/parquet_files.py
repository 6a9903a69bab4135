"""Parquet files of any origin: the fields of all files, in types that hold all values."""

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
"""The types as which Spark can read a type without loss."""


def read(
    spark: SparkSession, files: Files, schema: str | StructType | None, known: StructType
) -> DataFrame:
    """Return the rows of all files; ``known`` has the types of the topic."""
    if schema is None:
        data = _merged_schema(spark, files)
    else:
        reader = spark.read.schema(schema).option("recursiveFileLookup", True)
        data = reader.parquet(files.path).schema
    return files.load(spark, "parquet", with_columns(data, files.columns, known))


def _merged_schema(spark: SparkSession, files: Files) -> StructType:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    reader = spark.read.option("recursiveFileLookup", True).option("mergeSchema", True)
    try:
        return reader.parquet(files.path).schema
    except (PySparkException, Py4JJavaError) as exc:
        kinds = _distinct_schemas(files)
        _refuse_nanoseconds(kinds)
        if "CANNOT_MERGE_SCHEMAS" not in str(exc):
            raise
    return _widened({path: spark.read.parquet(literal(path)).schema for path in kinds})


def _distinct_schemas(files: Files) -> dict[str, pa.Schema]:
    """Return one file for each schema, as far as the files can be read from here."""
    import pyarrow.parquet as pq

    distinct: dict[str, tuple[str, pa.Schema]] = {}
    for path in files.paths:
        with suppress(OSError, pa.ArrowException):
            schema = pq.read_schema(path).remove_metadata()
            distinct.setdefault(str(schema), (path, schema))
    return dict(distinct.values())


def _refuse_nanoseconds(kinds: dict[str, pa.Schema]) -> None:
    for path, schema in kinds.items():
        for field in schema:
            if "[ns" in str(field.type):
                raise InvalidArgument(
                    f"{path}: field {field.name!r} is {field.type}, and Spark cannot read "
                    "nanoseconds; write it with microseconds, or use 'persisting import'"
                )


def _widened(kinds: dict[str, StructType]) -> StructType:
    """Return all fields, each with the narrowest type as which Spark can read all files."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    whole: pa.Schema = EMPTY
    for path, kind in kinds.items():
        try:
            whole = merge(whole, to_arrow_schema(kind, timezone="UTC"), Rules(evolving=True))
        except SchemaError as exc:
            raise InvalidArgument(
                f"{path}: {exc} as in other files; ingest this file by itself"
            ) from exc
    widened = from_arrow_schema(whole)
    for path, kind in kinds.items():
        for field in kind:
            wide = widened[field.name].dataType
            if not _holds(wide, field.dataType):
                raise InvalidArgument(
                    f"{path}: field {field.name!r} is {field.dataType.simpleString()}, which "
                    f"Spark cannot read as {wide.simpleString()}, the type in other files; ingest "
                    "this file by itself"
                )
    return widened


def _holds(wide: DataType, narrow: DataType) -> bool:
    if isinstance(wide, ArrayType) and isinstance(narrow, ArrayType):
        return _holds(wide.elementType, narrow.elementType)
    if isinstance(wide, StructType) and isinstance(narrow, StructType):
        return all(_holds(wide[field.name].dataType, field.dataType) for field in narrow)
    return wide == narrow or type(wide) in _WIDER.get(type(narrow), ())
