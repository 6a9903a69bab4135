"""The data source of the format ``persisting``."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from persisting.errors import InvalidArgument
from persisting.spark.gc_tuning import settle
from persisting.spark.source_options import ReadOptions, read_options, write_options
from persisting.spark.topic_scan import checked_filter, fields_of
from persisting.spark.types import parts_of, spark_schema
from persisting.topic.scan import METADATA


class PersistingSource(DataSource):
    """Topics as a Spark source and sink, batch and streaming."""

    @classmethod
    def name(cls) -> str:
        return "persisting"

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        found = _arrow_schema(read_options(self.options))
        settle()
        return from_arrow_schema(found)

    def reader(self, schema: StructType) -> DataSourceReader:
        from persisting.spark.batch_reader import TopicReader

        options = read_options(self.options)
        where = checked_filter(options)
        settle()
        return TopicReader(options, _target(schema), where)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from persisting.spark.stream_reader import TopicStreamReader

        options = read_options(self.options)
        return TopicStreamReader(options, _target(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from persisting.spark.sink import TopicWriter

        incoming = _target(_storable(schema))
        return TopicWriter(write_options(self.options), incoming, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from persisting.spark.sink import TopicStreamWriter

        if overwrite:
            raise InvalidArgument(
                "outputMode complete would store the whole result again with every trigger; use "
                "append, or write in foreachBatch with mode('overwrite')"
            )
        return TopicStreamWriter(write_options(self.options), _target(_storable(schema)))


def _storable(schema: StructType) -> StructType:
    """The schema, or raise where Spark would hand over something else than its values."""
    for field in schema.fields:
        kinds = [one.typeName() for one in parts_of(field.dataType)]
        if found := [kind for kind in kinds if kind in _NOT_KEPT]:
            raise InvalidArgument(
                f"column {field.name!r} holds the type {found[0]}, which a topic does not keep; "
                "write it as text, for example with to_json()"
            )
    return schema


_NOT_KEPT = ("variant", "geometry", "geography")


def _target(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark gives and takes for its own."""
    from pyspark.sql.pandas.types import to_arrow_schema

    nullable = schema.toNullable() if hasattr(schema, "toNullable") else schema
    found: Any = to_arrow_schema(nullable, timezone="UTC")
    return found


def _arrow_schema(options: ReadOptions) -> pa.Schema:
    schema = fields_of(options)
    if options.columns is not None:
        unknown = [name for name in options.columns if name not in schema.names]
        if unknown:
            there = ", ".join(map(repr, schema.names)) or "none yet"
            raise InvalidArgument(
                f"option columns names {unknown[0]!r}; the fields of the topic are: {there}"
            )
        schema = pa.schema([schema.field(name) for name in options.columns])
    found = spark_schema(schema)
    if options.metadata:
        taken = [name for name in METADATA.names if name in found.names]
        if taken:
            raise InvalidArgument(
                f"the topic has a field {taken[0]!r}, a name that includeMetadata needs"
            )
        found = pa.schema([*found, *METADATA])
    return found
