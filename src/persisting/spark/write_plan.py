"""The plan of a write: creates the topic if needed, and prepares its tables for the rows.

Everything that can be refused is refused here, before anything is stored and before any task runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import bulk_import
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.errors import InvalidArgument
from persisting.records import EMPTY, Rules
from persisting.records.arrow import accept, merge
from persisting.spark.bucket_owner import owner_of
from persisting.spark.source_options import WriteOptions
from persisting.topic import spec as topics
from persisting.topic.local import agreed_config
from persisting.topic.spec import TopicConfig, TopicSpec
from persisting.topic.topic_files import TopicFolder

EVOLVING = Rules(evolving=True)
USE_THE_QUEUE = "put through its queue"
"""The alternative to a write by Spark for a topic that has an owner."""


@dataclass(frozen=True)
class WritePlan:
    """What tasks need to know about the topic; it pickles."""

    folder: str
    config: TopicConfig
    schema: pa.Schema
    tables: dict[int, dict[str, Any]]


def plan_write(options: WriteOptions, incoming: pa.Schema) -> WritePlan:
    """Open or create the topic, and prepare every table for rows of ``incoming``."""
    config = check_write(options, incoming)
    spec = _topic_spec(options)
    for bucket in range(config.num_buckets) if spec.backend is None else ():
        with owner_of(options.folder, config, bucket, USE_THE_QUEUE):
            pass
    _, config, _ = agreed_config(spec, options.folder.parent)
    schema = _agree_on_schema(options, config, incoming)
    tables = {}
    for bucket in range(config.num_buckets):
        with owner_of(options.folder, config, bucket, USE_THE_QUEUE) as owner:
            tables[bucket] = bulk_import.prepare(owner.bucket, schema)
    return WritePlan(str(options.folder), config, schema, tables)


def check_write(options: WriteOptions, incoming: pa.Schema) -> TopicConfig:
    """Raise if rows of ``incoming`` cannot be written; change nothing and take no lock."""
    spec = _topic_spec(options)
    known = topics.load(options.folder, filesystem.current())
    config = spec.new() if known is None else spec.applied_to(known)
    if known is not None:
        TopicFolder.open(options.folder)  # raises unless the backend stores tables
    _check_columns(config, incoming, _merge_schemas(options, config, incoming))
    return config


def _topic_spec(options: WriteOptions) -> TopicSpec:
    is_new = not (options.folder / topics.FILE).exists()
    spec = TopicSpec(
        topic=options.folder.name,
        num_buckets=options.num_buckets,
        bucket_column=options.bucket_column,
        backend="persisting" if is_new else None,
        options=None if options.compression is None else {"compression": options.compression},
    )
    spec.check()
    return spec


def _check_columns(config: TopicConfig, incoming: pa.Schema, merged: pa.Schema) -> None:
    if config.bucket_column not in incoming.names:
        raise InvalidArgument(
            f"the rows have no column {config.bucket_column!r}, by which topic {config.topic!r} is "
            "divided into buckets; name another one with the option bucketColumn"
        )
    if all(pa.types.is_null(merged.field(name).type) for name in incoming.names):
        raise InvalidArgument(
            f"all columns of the rows ({', '.join(incoming.names)}) are void, and the topic has "
            "no type for them either; cast one, for example CAST(NULL AS STRING)"
        )


def _merge_schemas(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """Merge the schema of the rows into that of the topic; raise where they contradict."""
    known = shared_schema(options.folder).read() or EMPTY
    rows = accept(_with_declared_vectors(incoming, options).empty_table(), known).schema
    rules = EVOLVING if config.backend == "persisting" or not known.names else Rules()
    return merge(known, _with_known_vectors(rows, known), rules, defined=bool(known.names))


def _agree_on_schema(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """Merge the schemas and store the result as the schema of the topic."""
    rules = EVOLVING if config.backend == "persisting" else Rules()
    return shared_schema(options.folder).propose(
        _merge_schemas(options, config, incoming), frozenset(), rules
    )


def shared_schema(folder: Path) -> SharedSchema:
    return SharedSchema(folder / SCHEMA_FILE, filesystem.current())


def _with_known_vectors(rows: pa.Schema, known: pa.Schema) -> pa.Schema:
    """Turn arrays of floats into vectors where the topic has vectors under the same name."""
    fields = []
    for field in rows:
        stored = known.field(field.name).type if field.name in known.names else None
        is_vector = stored is not None and pa.types.is_fixed_size_list(stored)
        if is_vector and pa.types.is_list(field.type):
            field = field.with_type(stored)
        fields.append(field)
    return pa.schema(fields)


def _with_declared_vectors(incoming: pa.Schema, options: WriteOptions) -> pa.Schema:
    """Turn arrays of floats into vectors where the option ``vectors`` says so."""
    vectors = options.vectors or {}
    unknown = [name for name in vectors if name not in incoming.names]
    if unknown:
        raise InvalidArgument(f"option vectors names {unknown[0]!r}, which is not a column")
    fields = []
    known = shared_schema(options.folder).read() or EMPTY
    for field in incoming:
        if field.name in vectors:
            stored = known.field(field.name).type if field.name in known.names else None
            if stored is not None and pa.types.is_fixed_size_list(stored):
                if stored.list_size != vectors[field.name]:
                    raise InvalidArgument(
                        f"option vectors says {field.name}:{vectors[field.name]}, and the topic "
                        f"has vectors of {stored.list_size}; leave such rows out, or write them "
                        "to another column"
                    )
            if not pa.types.is_list(field.type) or not pa.types.is_floating(field.type.value_type):
                raise InvalidArgument(
                    f"option vectors names {field.name!r}, which is {field.type}, not an array "
                    "of floats"
                )
            field = field.with_type(pa.list_(field.type.value_type, vectors[field.name]))
        fields.append(field)
    return pa.schema(fields)
