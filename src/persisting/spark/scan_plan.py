"""Before a write: the topic is found or made, and its tables are ready for the rows.

What can be refused is refused here, before anything is kept and before any task runs.
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
INSTEAD = "put through its queue"
"""What a writer does with a topic that somebody has open."""


@dataclass(frozen=True)
class Plan:
    """What the tasks need to know of the topic; it pickles."""

    folder: str
    config: TopicConfig
    schema: pa.Schema
    tables: dict[int, dict[str, Any]]


def plan(options: WriteOptions, incoming: pa.Schema) -> Plan:
    """Make the topic, or find it, and have every table ready for rows of ``incoming``."""
    wanted = _wanted(options)
    known = topics.load(options.folder, filesystem.current())
    config = wanted.new() if known is None else wanted.applied_to(known)
    if known is not None:
        TopicFolder.open(options.folder)  # a backend that keeps tables
    _check_columns(config, incoming, _merged(options, config, incoming))
    for bucket in range(config.num_buckets) if known is not None else ():
        with owner_of(options.folder, config, bucket, INSTEAD):
            pass
    _, config, _ = agreed_config(wanted, options.folder.parent)
    schema = _agreed(options, config, incoming)
    tables = {}
    for bucket in range(config.num_buckets):
        with owner_of(options.folder, config, bucket, INSTEAD) as owner:
            tables[bucket] = bulk_import.prepare(owner.bucket, schema)
    return Plan(str(options.folder), config, schema, tables)


def _wanted(options: WriteOptions) -> TopicSpec:
    new = not (options.folder / topics.FILE).exists()
    wanted = TopicSpec(
        topic=options.folder.name,
        num_buckets=options.num_buckets,
        bucket_column=options.bucket_column,
        backend="persisting" if new else None,
        options=None if options.compression is None else {"compression": options.compression},
    )
    wanted.check()
    return wanted


def _check_columns(config: TopicConfig, incoming: pa.Schema, merged: pa.Schema) -> None:
    if config.bucket_column not in incoming.names:
        raise InvalidArgument(
            f"the rows have no column {config.bucket_column!r}, by which topic {config.topic!r} is "
            "divided into buckets; name another one with the option bucketColumn"
        )
    if all(pa.types.is_null(merged.field(name).type) for name in incoming.names):
        raise InvalidArgument(
            f"all columns of the rows ({', '.join(incoming.names)}) are void, and the topic knows "
            "no type for them; cast one, for example CAST(NULL AS STRING)"
        )


def _merged(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """The topic's schema with that of the rows, or raise where they contradict."""
    known = shared_schema(options.folder).read() or EMPTY
    rows = accept(_with_vectors(incoming, options).empty_table(), known).schema
    rules = EVOLVING if config.backend == "persisting" or not known.names else Rules()
    return merge(known, _as_known(rows, known), rules, defined=bool(known.names))


def _agreed(options: WriteOptions, config: TopicConfig, incoming: pa.Schema) -> pa.Schema:
    """The same, and the topic agrees to it."""
    rules = EVOLVING if config.backend == "persisting" else Rules()
    return shared_schema(options.folder).propose(
        _merged(options, config, incoming), frozenset(), rules
    )


def shared_schema(folder: Path) -> SharedSchema:
    return SharedSchema(folder / SCHEMA_FILE, filesystem.current())


def _as_known(rows: pa.Schema, known: pa.Schema) -> pa.Schema:
    """Spark's arrays of floats are the vectors that the topic holds under that name."""
    fields = []
    for one in rows:
        old = known.field(one.name).type if one.name in known.names else None
        is_vector = old is not None and pa.types.is_fixed_size_list(old)
        fields.append(one.with_type(old) if is_vector and pa.types.is_list(one.type) else one)
    return pa.schema(fields)


def _with_vectors(incoming: pa.Schema, options: WriteOptions) -> pa.Schema:
    vectors = options.vectors or {}
    unknown = [name for name in vectors if name not in incoming.names]
    if unknown:
        raise InvalidArgument(f"option vectors names {unknown[0]!r}, which is no column")
    fields = []
    known = shared_schema(options.folder).read() or EMPTY
    for one in incoming:
        if one.name in vectors:
            held = known.field(one.name).type if one.name in known.names else None
            if held is not None and pa.types.is_fixed_size_list(held):
                if held.list_size != vectors[one.name]:
                    raise InvalidArgument(
                        f"option vectors says {one.name}:{vectors[one.name]}, and the topic holds "
                        f"vectors of {held.list_size}; leave such rows out, or write them to "
                        "another column"
                    )
            if not pa.types.is_list(one.type) or not pa.types.is_floating(one.type.value_type):
                raise InvalidArgument(
                    f"option vectors names {one.name!r}, which is {one.type}, no array of floats"
                )
            one = one.with_type(pa.list_(one.type.value_type, vectors[one.name]))
        fields.append(one)
    return pa.schema(fields)
