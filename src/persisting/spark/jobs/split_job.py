"""Reproducible training, validation and test sets: by a hash of a key, at a tag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, DoubleType, FloatType, TimestampType

from persisting.errors import InvalidArgument
from persisting.spark.jobs.columns import checked_columns, exact_column
from persisting.spark.jobs.topic_lookup import open_topic, place_of
from persisting.spark.query_errors import readable_errors
from persisting.spark.topic_scan import read_topic
from persisting.spark.types import TIMESTAMP_FORMAT, nested_types
from persisting.store_address import StoreAddress
from persisting.topic.open_local import (
    BucketChoice,
    ReaderOptions,
    open_local_reader,
    topic_spec,
)
from persisting.topic.open_store import open_store_reader, store_of
from persisting.topic.scan import Filter
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SHARES: Mapping[str, float] = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
SPLIT = "split"

_DIGITS = 13
"""Hexadecimal digits of the hash that are used: 52 bits, which a double holds exactly."""

_EXACT = 2.0**53
"""Below this, a double holds every whole number exactly."""


@readable_errors
def split(
    df: DataFrame,
    key: str | Sequence[str],
    shares: Mapping[str, float] = SHARES,
    *,
    salt: str = "",
) -> dict[str, DataFrame]:
    """Split ``df`` into disjoint parts of about these ``shares`` (which sum to 1), by name.

    The part of a row depends only on its ``key``, the shares and the ``salt``. So it is the same in
    every run, on every machine and for rows that are added later, and a number is in the same part
    whether the column holds ints or floats. Rows with equal keys stay together, and so do rows
    whose key is null. Another salt gives another split.
    """
    part = _part(df, key, shares, salt)
    return {name: df.where(part == sf.lit(name)) for name in shares}


@readable_errors
def assign_splits(
    df: DataFrame,
    key: str | Sequence[str],
    shares: Mapping[str, float] = SHARES,
    *,
    salt: str = "",
    into: str = SPLIT,
) -> DataFrame:
    """Return ``df`` with one more column that names the part of each row, as in :func:`split`."""
    if into in df.columns:
        raise InvalidArgument(f"the rows already have a column {into!r}; set into to another name")
    return df.withColumn(into, _part(df, key, shares, salt))


@readable_errors
def split_topic(
    spark: SparkSession,
    path: str | Path,
    topic: str | None = None,
    *,
    key: str | Sequence[str],
    tag: str,
    shares: Mapping[str, float] = SHARES,
    salt: str = "",
    columns: Sequence[str] | None = None,
    where: str | None = None,
) -> dict[str, DataFrame]:
    """Split a topic as of a tag: the rows stay the same, whatever is put later.

    The tag is created if it does not exist. ``columns`` and ``where`` are pushed down to the
    storage, as in :func:`persisting.spark.read_topic`.
    """
    stored = open_topic(path, topic)
    keys = [key] if isinstance(key, str) else list(key)
    read_columns = None if columns is None else list(dict.fromkeys([*columns, *keys]))
    _check(shares)
    if tag not in stored.tag_files.names():
        _check_fields(stored, [*(columns or ()), *keys], keys, where)
        _tag(stored, tag)
    rows = read_topic(spark, stored.place, columns=read_columns, where=where, tag=tag)
    parts = split(rows, keys, shares, salt=salt)
    if columns is None:
        return parts
    return {name: part.select(*map(exact_column, columns)) for name, part in parts.items()}


def _part(
    df: DataFrame, key: str | Sequence[str], shares: Mapping[str, float], salt: str
) -> Column:
    """Return the name of a row's part."""
    _check(shares)
    keys = [
        sf.coalesce(_text(exact_column(name), df.schema[name].dataType), sf.lit(""))
        for name in checked_columns(df, key, "key")
    ]
    digest = sf.md5(sf.concat_ws("\x00", sf.lit(salt), *keys).cast("binary"))
    point = sf.conv(sf.substring(digest, 1, _DIGITS), 16, 10).cast("double") / float(16**_DIGITS)
    *firsts, last = shares
    bounds, total = [], 0.0
    for name in firsts:
        total += shares[name]
        bounds.append((name, total))
    return reduce(
        lambda rest, bound: sf.when(point < bound[1], bound[0]).otherwise(rest),
        reversed(bounds),
        sf.lit(last),
    )


def _text(key: Column, dtype: DataType) -> Column:
    """Return a key as text that does not depend on the time zone or the width of its type."""
    if isinstance(dtype, TimestampType):
        return sf.unix_micros(key).cast("string")
    if isinstance(dtype, (FloatType, DoubleType)):
        wide = key.cast("double")
        is_whole = (wide == sf.rint(wide)) & (sf.abs(wide) < _EXACT)
        return sf.when(is_whole, wide.cast("long").cast("string")).otherwise(wide.cast("string"))
    if any(isinstance(part, TimestampType) for part in nested_types(dtype)):
        return sf.to_json(sf.struct(key), {"timeZone": "UTC", "timestampFormat": TIMESTAMP_FORMAT})
    return key.cast("string")


def _check_fields(
    stored: TopicFolder, names: Sequence[str], keys: Sequence[str], where: str | None
) -> None:
    """Raise for fields that the topic does not have; called before a tag is created."""
    fields = stored.schema()
    unknown = [name for name in names if name not in fields.names]
    if unknown or not keys:
        named = f"{unknown[0]!r}, which is not a field" if unknown else "no field"
        what = "columns" if unknown and unknown[0] not in keys else "key"
        listed = ", ".join(map(repr, fields.names))
        raise InvalidArgument(f"{what} names {named}; the fields of the topic are: {listed}")
    if where is not None:
        Filter.checked(where, fields)


def _check(shares: Mapping[str, float]) -> None:
    if not shares or any(not _is_share(share) for share in shares.values()):
        raise InvalidArgument(f"shares must be numbers above 0 by name, got {dict(shares)!r}")
    if abs(sum(shares.values()) - 1) > 1e-9:
        raise InvalidArgument(f"shares must sum to 1, got {dict(shares)!r}")


def _is_share(share: Any) -> bool:
    return isinstance(share, (int, float)) and 0 < share <= 1


def _tag(stored: TopicFolder, name: str) -> None:
    """Tag the topic through its owner in this process, else as its owner for this one call."""

    async def tag() -> None:
        place = place_of(stored)
        spec, cls = topic_spec(place.name)
        options = ReaderOptions(buckets=BucketChoice())
        if isinstance(place, StoreAddress):
            store = store_of(str(place.parent), place.name, None)
            reader = await open_store_reader(spec, store, options)
        else:
            reader = await open_local_reader(spec, cls, str(place.parent), options)
        async with reader:
            await reader.tag(name)

    # In another thread: the caller's may run an event loop, as in a notebook.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, tag()).result()
