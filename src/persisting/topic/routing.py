"""Which bucket a record belongs to: the rule of Pulsing's queues, kept for good."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import md5
from typing import Any

import pyarrow as pa

from persisting.errors import SchemaError


def bucket_of(value: Any, num_buckets: int) -> int:
    """The bucket for a value of the bucket column; None counts as the empty string."""
    text = "" if value is None else str(value)
    return int.from_bytes(md5(text.encode(), usedforsecurity=False).digest(), "big") % num_buckets


def route(record: Any, column: str, num_buckets: int) -> int:
    """The bucket for a record."""
    if not isinstance(record, dict):
        raise SchemaError(f"a record is a dict of fields, got a {type(record).__name__}")
    try:
        value = record[column]
    except KeyError:
        raise SchemaError(
            f"the record has no field {column!r}, by which the topic is divided into buckets; add "
            "it, or make the topic with another bucket_column"
        ) from None
    return bucket_of(value, num_buckets)


def by_bucket(
    records: Iterable[Any], column: str, num_buckets: int
) -> dict[int, list[dict[str, Any]]]:
    """Records in order, by bucket."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(route(record, column, num_buckets), []).append(record)
    return groups


def table_by_bucket(table: pa.Table, column: str, num_buckets: int) -> dict[int, pa.Table]:
    """The rows of an Arrow table in order, by bucket."""
    if column not in table.schema.names:
        raise SchemaError(
            f"the Arrow data has no column {column!r}, by which the topic is divided into buckets"
        )
    places: dict[int, list[int]] = {}
    for place, value in enumerate(table.column(column).to_pylist()):
        places.setdefault(bucket_of(value, num_buckets), []).append(place)
    if len(places) == 1:
        return dict.fromkeys(places, table)
    return {bucket: table.take(pa.array(rows)) for bucket, rows in places.items()}
