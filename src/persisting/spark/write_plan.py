"""The plan of a write: creates the topic if needed, and prepares its tables for the rows.

Everything that can be refused is refused here, before anything is stored and before any task runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.errors import InvalidArgument, NoSuchTopic
from persisting.records import EMPTY, Rules
from persisting.records.arrow import accept, merge
from persisting.spark.source_options import WriteOptions
from persisting.spark.write_target import Target, target_of
from persisting.store_address import StoreAddress
from persisting.topic.spec import TopicConfig, TopicSpec

EVOLVING = Rules(evolving=True)


@dataclass(frozen=True)
class WritePlan:
    """What tasks need to know about the topic; it pickles."""

    place: Path | StoreAddress
    config: TopicConfig
    schema: pa.Schema
    tables: dict[int, dict[str, Any]]


def plan_write(options: WriteOptions, incoming: pa.Schema) -> WritePlan:
    """Open or create the topic, and prepare every table for rows of ``incoming``."""
    target = target_of(options.place, options.owner_seconds)
    config, spec = _checked(target, options, incoming)
    if spec.backend is None:
        target.check_owners(config)
    config = target.ensure_topic(spec)
    schema = _agree_on_schema(target, options, config, incoming)
    return WritePlan(options.place, config, schema, target.prepare(config, schema))


def add_fields(options: WriteOptions, fields: pa.Schema) -> None:
    """Add fields to a topic that exists; the rows that it has are null there."""
    target = target_of(options.place, options.owner_seconds)
    config = target.load()
    if config is None:
        raise NoSuchTopic(f"there is no topic {options.place}")
    _merge_schemas(target, options, config, fields)  # raises where they contradict
    target.check_owners(config)
    target.prepare(config, _agree_on_schema(target, options, config, fields))


def check_write(options: WriteOptions, incoming: pa.Schema) -> TopicConfig:
    """Raise if rows of ``incoming`` cannot be written; change nothing and take no lock."""
    config, _ = _checked(target_of(options.place, options.owner_seconds), options, incoming)
    return config


def _checked(
    target: Target, options: WriteOptions, incoming: pa.Schema
) -> tuple[TopicConfig, TopicSpec]:
    known = target.load()
    spec = _topic_spec(target, options, is_new=known is None)
    config = spec.new() if known is None else spec.applied_to(known)
    _check_columns(config, incoming, _merge_schemas(target, options, config, incoming))
    return config, spec


def _topic_spec(target: Target, options: WriteOptions, *, is_new: bool) -> TopicSpec:
    wanted: dict[str, Any] = dict(target.new_options) if is_new else {}
    if options.compression is not None:
        wanted["compression"] = options.compression
    spec = TopicSpec(
        topic=options.place.name,
        num_buckets=options.num_buckets,
        bucket_column=options.bucket_column,
        backend="persisting" if is_new else None,
        options=wanted or None,
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


def _merge_schemas(
    target: Target, options: WriteOptions, config: TopicConfig, incoming: pa.Schema
) -> pa.Schema:
    """Merge the schema of the rows into that of the topic; raise where they contradict."""
    known = target.shared_schema().read() or EMPTY
    rows = accept(_with_declared_vectors(incoming, options, known).empty_table(), known).schema
    rules = EVOLVING if config.backend == "persisting" or not known.names else Rules()
    return merge(known, _with_known_vectors(rows, known), rules, defined=bool(known.names))


def _agree_on_schema(
    target: Target, options: WriteOptions, config: TopicConfig, incoming: pa.Schema
) -> pa.Schema:
    """Merge the schemas and store the result as the schema of the topic."""
    rules = EVOLVING if config.backend == "persisting" else Rules()
    merged = _merge_schemas(target, options, config, incoming)
    return target.shared_schema().propose(merged, frozenset(), rules)


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


def _with_declared_vectors(
    incoming: pa.Schema, options: WriteOptions, known: pa.Schema
) -> pa.Schema:
    """Turn arrays of floats into vectors where the option ``vectors`` says so."""
    vectors = options.vectors or {}
    unknown = [name for name in vectors if name not in incoming.names]
    if unknown:
        raise InvalidArgument(f"option vectors names {unknown[0]!r}, which is not a column")
    fields = []
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
