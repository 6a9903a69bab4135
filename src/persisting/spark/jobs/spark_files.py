"""Parquet and JSON lines, written and read by Spark itself."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from persisting.errors import InvalidArgument
from persisting.spark.jobs.columns import check_times, exact_column
from persisting.spark.jobs.file_formats import JSONL, folder_columns
from persisting.spark.jobs.row_count import counted
from persisting.spark.types import TIMESTAMP_FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value in the name of a folder whose rows have null."""

_WILD = re.compile(r"[*?\[{]")
_JSON: Mapping[str, Any] = {
    "ignoreNullFields": False,
    # By default Spark truncates timestamps to milliseconds, and zones to minutes.
    "timestampFormat": TIMESTAMP_FORMAT,
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


def write(df: DataFrame, root: Path, chosen: str, by: Sequence[str]) -> int:
    """Append the rows to the files below ``root``; return how many."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    check_times(df, f"export to {chosen}")
    refusals = {name: _refusal(df, name) for name in by}
    for name, refusal in refusals.items():
        value = exact_column(name)
        if isinstance(df.schema[name].dataType, StringType):
            checked = sf.when(value.isin("", NULL), sf.raise_error(sf.lit(refusal)))
            df = df.withColumn(name, checked.otherwise(value))
    try:
        with counted(df) as (rows, count):
            writer = rows.write.mode("append").partitionBy(*by)
            if chosen == JSONL:
                writer = writer.options(**_JSON)
            writer.format("json" if chosen == JSONL else chosen).save(str(root))
        return count()
    except (PySparkException, Py4JJavaError) as exc:
        for refusal in refusals.values():
            if refusal in str(exc):
                raise InvalidArgument(refusal) from exc
        raise


def _refusal(df: DataFrame, name: str) -> str:
    """Return the error for values that the name of a folder cannot hold."""
    if isinstance(df.schema[name].dataType, BinaryType):
        raise InvalidArgument(
            f"partition_by names {name!r}, whose bytes cannot be names of folders"
        )
    return (
        f"partition_by names {name!r}, which holds an empty text or {NULL!r}: in folders of "
        "Parquet and JSON lines these mean null. Leave such rows out, or export to Lance"
    )


@dataclass(frozen=True)
class Files:
    """The files that Spark reads."""

    path: str
    base: str | None
    """For a pattern, the folder that it starts with; folders below it may name columns."""
    paths: list[str]
    columns: tuple[str, ...]
    """The columns in the names of folders."""

    def load(self, spark: SparkSession, kind: str, types: StructType, **options: Any) -> DataFrame:
        """Return the rows, including the values of folders, with these types."""
        reader = spark.read.schema(types).options(**options)
        if not self.columns:
            reader = reader.option("recursiveFileLookup", True)
        elif self.base is not None:
            reader = reader.option("basePath", self.base)
        return reader.format(kind).load(self.path)


def listed(spark: SparkSession, source: str) -> Files:
    """List the files at ``source``: a file, all below a folder, or the matches of a pattern."""
    path = source if ":/" in source else posixpath.abspath(source)
    is_literal = os.path.exists(path)
    path = literal(path) if is_literal else path
    wild = None if is_literal else _WILD.search(path)
    base = path[: wild.start()].rpartition("/")[0] or "/" if wild else None
    every = spark.read.option("recursiveFileLookup", True).text(path)
    paths = [unquote(urlsplit(url).path) for url in every.inputFiles()]
    if not paths:
        raise InvalidArgument(f"there are no files at {source}")
    layouts = {folder_columns(folder) for folder in _below(base or source, paths)}
    if len(layouts) > 1:
        listed = " and ".join(
            repr("/".join(names)) if names else "none" for names in sorted(layouts)
        )
        raise InvalidArgument(
            f"the folders at {source} name different columns ({listed}), and Spark would leave "
            "rows out: ingest them one by one"
        )
    return Files(path, base, paths, layouts.pop() if layouts else ())


def literal(path: str) -> str:
    """Escape a path that Spark would take for a pattern."""
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", path)


def _below(base: str, paths: list[str]) -> list[PurePosixPath]:
    """Return the folders of files, relative to the folder that is read."""
    root = PurePosixPath(urlsplit(base).path if ":/" in base else posixpath.abspath(base))
    folders = [PurePosixPath(path).parent for path in paths]
    return [folder.relative_to(root) for folder in folders if folder.is_relative_to(root)]


def with_columns(data: StructType, columns: Sequence[str], known: StructType) -> StructType:
    """Add the columns of folders to the fields of files: with their known types, else text."""
    types = {field.name: field.dataType for field in known}
    fields = [
        StructField(name, _folder_type(types.get(name)))
        for name in columns
        if name not in data.names
    ]
    return StructType([*data.fields, *fields])


def _folder_type(known: DataType | None) -> DataType:
    if known is None or isinstance(known, (NullType, ArrayType, StructType)):
        return StringType()
    return known
