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
from persisting.spark.jobs.columns import check_times, named
from persisting.spark.jobs.file_formats import JSONL, folder_columns
from persisting.spark.jobs.row_count import counted
from persisting.spark.types import MOMENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a folder whose rows have none."""

_WILD = re.compile(r"[*?\[{]")
_JSON: Mapping[str, Any] = {
    "ignoreNullFields": False,
    # Spark would cut moments to milliseconds, and zones to minutes.
    "timestampFormat": MOMENT,
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


def write(df: DataFrame, root: Path, chosen: str, by: Sequence[str]) -> int:
    """Add the rows to the files below ``root``; how many."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    check_times(df, f"export to {chosen}")
    refusals = {name: _refusal(df, name) for name in by}
    for name, refusal in refusals.items():
        one = named(name)
        if isinstance(df.schema[name].dataType, StringType):
            same = sf.when(one.isin("", NULL), sf.raise_error(sf.lit(refusal))).otherwise(one)
            df = df.withColumn(name, same)
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
    """What to say of values that the name of a folder does not keep."""
    if isinstance(df.schema[name].dataType, BinaryType):
        raise InvalidArgument(f"partition_by names {name!r}, whose bytes make no names of folders")
    return (
        f"partition_by names {name!r}, which holds an empty text or {NULL!r}: folders of Parquet "
        "and JSON lines have that name for null. Leave such rows out, or export to Lance"
    )


@dataclass(frozen=True)
class Files:
    """What Spark is to read."""

    path: str
    base: str | None
    """For a pattern, the folder that it begins with: folders below it may stand for columns."""
    paths: list[str]
    columns: tuple[str, ...]
    """Those that the names of folders stand for."""

    def load(self, spark: SparkSession, kind: str, types: StructType, **options: Any) -> DataFrame:
        """The rows, the values of folders among them, with these types."""
        reader = spark.read.schema(types).options(**options)
        if not self.columns:
            reader = reader.option("recursiveFileLookup", True)
        elif self.base is not None:
            reader = reader.option("basePath", self.base)
        return reader.format(kind).load(self.path)


def listed(spark: SparkSession, source: str) -> Files:
    """The files at ``source``: a file, all below a folder, or what a pattern finds."""
    path = source if ":/" in source else posixpath.abspath(source)
    is_one = os.path.exists(path)
    path = literal(path) if is_one else path
    wild = None if is_one else _WILD.search(path)
    base = path[: wild.start()].rpartition("/")[0] or "/" if wild else None
    every = spark.read.option("recursiveFileLookup", True).text(path)
    paths = [unquote(urlsplit(one).path) for one in every.inputFiles()]
    if not paths:
        raise InvalidArgument(f"there are no files at {source}")
    shapes = {folder_columns(one) for one in _below(base or source, paths)}
    if len(shapes) > 1:
        said = " and ".join(repr("/".join(one)) if one else "none" for one in sorted(shapes))
        raise InvalidArgument(
            f"the folders at {source} stand for different columns ({said}), and Spark would leave "
            "rows out: ingest them one by one"
        )
    return Files(path, base, paths, shapes.pop() if shapes else ())


def literal(path: str) -> str:
    """A path that Spark does not take for a pattern."""
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", path)


def _below(base: str, paths: list[str]) -> list[PurePosixPath]:
    """The folders of files, seen from the one that is read."""
    root = PurePosixPath(urlsplit(base).path if ":/" in base else posixpath.abspath(base))
    folders = [PurePosixPath(path).parent for path in paths]
    return [one.relative_to(root) for one in folders if one.is_relative_to(root)]


def with_columns(data: StructType, columns: Sequence[str], known: StructType) -> StructType:
    """The fields in files with those of their folders: of the types that are known, else text."""
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
