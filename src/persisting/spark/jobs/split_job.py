"""Training, validation and test sets that stay the same: by a hash of a key, at a tag."""

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

from persisting import fs as filesystem
from persisting.errors import InvalidArgument
from persisting.spark.jobs.columns import existing, named
from persisting.spark.jobs.topic_lookup import opened
from persisting.spark.topic_scan import read_topic
from persisting.spark.types import MOMENT, parts_of
from persisting.topic import tags
from persisting.topic.open_local import BucketChoice, read_here, wanted_topic
from persisting.topic.scan import Filter
from persisting.topic.topic_files import TopicFolder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SHARES: Mapping[str, float] = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
SPLIT = "split"

_DIGITS = 13
"""Hexadecimal digits of the hash: 52 bits, as many as a double has."""

_EXACT = 2.0**53
"""Below it a double holds every whole number."""


def split(
    df: DataFrame,
    key: str | Sequence[str],
    shares: Mapping[str, float] = SHARES,
    *,
    salt: str = "",
) -> dict[str, DataFrame]:
    """``df`` in disjoint parts of about these ``shares`` (which sum to 1), by name.

    The part of a row depends on its ``key``, the shares and the ``salt``, and on nothing else: the
    same on every run and machine, and for rows that come later; a number is the same whether the
    column holds ints or floats. Rows with one key stay together, also those with none. Another
    salt is another split.
    """
    part = _part(df, key, shares, salt)
    return {name: df.where(part == sf.lit(name)) for name in shares}


def assign_splits(
    df: DataFrame,
    key: str | Sequence[str],
    shares: Mapping[str, float] = SHARES,
    *,
    salt: str = "",
    into: str = SPLIT,
) -> DataFrame:
    """``df`` with one more column that names the part of each row, as :func:`split` has it."""
    if into in df.columns:
        raise InvalidArgument(f"the rows have a column {into!r} already; name another one in into")
    return df.withColumn(into, _part(df, key, shares, salt))


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
    """A topic in parts, as it is at a tag: the same rows for ever, whatever is put later.

    If there is no such tag it is made now. ``columns`` and ``where`` are pushed down to the
    storage, as in :func:`persisting.spark.read_topic`.
    """
    stored = opened(path, topic)
    keys = [key] if isinstance(key, str) else list(key)
    wanted = None if columns is None else list(dict.fromkeys([*columns, *keys]))
    _check(shares)
    if tag not in tags.names_in(stored.folder, filesystem.current()):
        _check_fields(stored, [*(columns or ()), *keys], keys, where)
        _tag(stored, tag)
    rows = read_topic(spark, stored.folder, columns=wanted, where=where, tag=tag)
    parts = split(rows, keys, shares, salt=salt)
    if columns is None:
        return parts
    return {name: part.select(*map(named, columns)) for name, part in parts.items()}


def _part(
    df: DataFrame, key: str | Sequence[str], shares: Mapping[str, float], salt: str
) -> Column:
    """The name of a row's part."""
    _check(shares)
    keys = [
        sf.coalesce(_text(named(one), df.schema[one].dataType), sf.lit(""))
        for one in existing(df, key, "key")
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
    """A key as text, whatever the session's time zone, and as wide as its column may become."""
    if isinstance(dtype, TimestampType):
        return sf.unix_micros(key).cast("string")
    if isinstance(dtype, (FloatType, DoubleType)):
        wide = key.cast("double")
        is_whole = (wide == sf.rint(wide)) & (sf.abs(wide) < _EXACT)
        return sf.when(is_whole, wide.cast("long").cast("string")).otherwise(wide.cast("string"))
    if any(isinstance(one, TimestampType) for one in parts_of(dtype)):
        return sf.to_json(sf.struct(key), {"timeZone": "UTC", "timestampFormat": MOMENT})
    return key.cast("string")


def _check_fields(
    stored: TopicFolder, names: Sequence[str], keys: Sequence[str], where: str | None
) -> None:
    """Before a tag is made: what the topic does not have is refused."""
    fields = stored.schema()
    unknown = [name for name in names if name not in fields.names]
    if unknown or not keys:
        said = f"{unknown[0]!r}, which is no field" if unknown else "no field"
        what = "columns" if unknown and unknown[0] not in keys else "key"
        there = ", ".join(map(repr, fields.names))
        raise InvalidArgument(f"{what} names {said}; the fields of the topic are: {there}")
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
    """Tag the topic through its owner: one in this process, or ourselves for a moment."""

    async def tag() -> None:
        wanted, cls = wanted_topic(stored.folder.name)
        reader = await read_here(
            wanted, cls, str(stored.folder.parent), BucketChoice(), False, None, False, False
        )
        async with reader:
            await reader.tag(name)

    # In a thread, since the caller's may run an event loop, as a notebook's does.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, tag()).result()
