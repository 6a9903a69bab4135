"""The data source of the format ``persisting``."""

from __future__ import annotations

from collections.abc import Mapping
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

from persisting.arrow_loading import load_without_pandas
from persisting.errors import InvalidArgument
from persisting.spark.gc_tuning import freeze_loaded_objects
from persisting.spark.partial_aggregates import PartialAggregates
from persisting.spark.scan_hints import take_hints
from persisting.spark.source_options import (
    ReadOptions,
    adds_fields,
    drops_topic,
    lists_topics,
    read_options,
    write_options,
)
from persisting.spark.topic_scan import checked_filter, topic_fields
from persisting.spark.types import nested_types, spark_schema
from persisting.spark.worker_exit import is_planner
from persisting.topic.scan import METADATA

if is_planner():  # it imports this module first
    load_without_pandas()

_UNSUPPORTED_TYPES = ("variant", "geometry", "geography")


class PersistingSource(DataSource):
    """Topics as a Spark source and sink, batch and streaming."""

    _is_copy = False
    """Whether Spark sent this source to another process. Spark constructs a source where it plans
    a streaming write, and sends a copy of one to where it commits or aborts a micro-batch."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_copy": True}

    @classmethod
    def name(cls) -> str:
        return "persisting"

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        if lists_topics(self.options):
            from persisting.spark.store_catalog import listed_topics

            return listed_topics(self.options)
        schema = read_schema(read_options(self.options))
        freeze_loaded_objects()
        return from_arrow_schema(schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        from persisting.spark.batch_reader import TopicReader

        options = read_options(self.options)
        where = checked_filter(options)
        freeze_loaded_objects()
        schema, hints = take_hints(schema)
        asked = hints.aggregates
        if asked is None:
            return TopicReader(options, _to_arrow(schema), where, hints)
        aggregates = PartialAggregates(asked.groups, asked.values, _to_arrow(schema))
        return TopicReader(options, _to_arrow(asked.rows()), where, hints, aggregates)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from persisting.spark.stream_reader import TopicStreamReader

        options = read_options(self.options)
        return TopicStreamReader(options, _to_arrow(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from persisting.spark.sink import NewFields, TopicDeletion, TopicWriter

        if drops_topic(self.options):
            return TopicDeletion(self.options)
        _check_storable(schema)
        if adds_fields(self.options):
            return NewFields(self.options, _to_arrow(schema))
        return TopicWriter(write_options(self.options), _to_arrow(schema), overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from persisting.spark.sink import TopicStreamWriter
        from persisting.spark.write_plan import plan_write

        if overwrite:
            raise InvalidArgument(
                "outputMode complete would store the whole result again with every trigger; use "
                "append, or write in foreachBatch with mode('overwrite')"
            )
        _check_storable(schema)
        options = write_options(self.options)
        plan = None if self._is_copy else plan_write(options, _to_arrow(schema))
        return TopicStreamWriter(options, plan)


def read_schema(options: ReadOptions) -> pa.Schema:
    """Return the schema of a read in types that Spark has; raise if the options ask for fields
    that the topic does not have."""
    schema = topic_fields(options)
    if options.columns is not None:
        unknown = [name for name in options.columns if name not in schema.names]
        if unknown:
            fields = ", ".join(map(repr, schema.names)) or "none yet"
            raise InvalidArgument(
                f"option columns names {unknown[0]!r}; the fields of the topic are: {fields}"
            )
        schema = pa.schema([schema.field(name) for name in options.columns])
    schema = spark_schema(schema)
    if options.metadata:
        taken = [name for name in METADATA.names if name in schema.names]
        if taken:
            raise InvalidArgument(
                f"the topic has a field {taken[0]!r}, a name that includeMetadata needs"
            )
        schema = pa.schema([*schema, *METADATA])
    return schema


def check_rows(options: Mapping[str, str], schema: StructType) -> None:
    """Raise if a topic cannot take rows of ``schema`` with these options of the sink."""
    from persisting.spark.write_plan import check_write

    _check_storable(schema)
    check_write(write_options(options), _to_arrow(schema))


def _check_storable(schema: StructType) -> None:
    """Raise for types whose values Spark would hand over as something else."""
    for field in schema.fields:
        kinds = [dtype.typeName() for dtype in nested_types(field.dataType)]
        if unsupported := [kind for kind in kinds if kind in _UNSUPPORTED_TYPES]:
            raise InvalidArgument(
                f"column {field.name!r} holds the type {unsupported[0]}, which a topic cannot "
                "store; write it as text, for example with to_json()"
            )


def _to_arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark exchanges rows of ``schema``."""
    from pyspark.sql.pandas.types import to_arrow_schema

    nullable = schema.toNullable() if hasattr(schema, "toNullable") else schema
    arrow: Any = to_arrow_schema(nullable, timezone="UTC")
    return arrow
