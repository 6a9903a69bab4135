"""Which bucket a record belongs to: the rule of Pulsing's queues, which must never change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.errors import SchemaError

try:
    # CPython's own implementation takes half the time of OpenSSL's for short texts.
    from _md5 import md5 as _md5  # type: ignore[import-not-found]
except ImportError:
    _md5 = partial(hashlib.md5, usedforsecurity=False)

_digest = type(_md5()).digest


def bucket_of(value: Any, num_buckets: int) -> int:
    """Return the bucket for a value of the bucket column; None counts as the empty string."""
    # A str enum is stored as its text, whatever its __str__ returns.
    plain = str.__str__ if isinstance(value, str) else str
    try:
        encoded = b"" if value is None else plain(value).encode()
    except UnicodeEncodeError as exc:
        raise SchemaError(
            "the field by which the topic is divided into buckets holds text that is not valid "
            f"unicode (a lone surrogate at position {exc.start}); store it as bytes"
        ) from None
    return int.from_bytes(_md5(encoded).digest(), "big") % num_buckets


def route(record: Any, column: str, num_buckets: int) -> int:
    """Return the bucket for a record."""
    if not isinstance(record, dict):
        raise SchemaError(f"a record is a dict of fields, got a {type(record).__name__}")
    try:
        value = record[column]
    except KeyError:
        raise SchemaError(
            f"the record has no field {column!r}, by which the topic is divided into buckets; add "
            "it, or create the topic with another bucket_column"
        ) from None
    return bucket_of(value, num_buckets)


def by_bucket(
    records: Sequence[Any], column: str, num_buckets: int
) -> dict[int, list[dict[str, Any]]]:
    """Divide records by bucket; the order within a bucket is kept."""
    buckets = _buckets_at_once(records, column, num_buckets)
    if buckets is None:
        buckets = np.array([route(record, column, num_buckets) for record in records], np.int64)
    order = np.argsort(buckets, kind="stable").tolist()
    ordered = list(map(records.__getitem__, order))
    groups, start = {}, 0
    for bucket, count in enumerate(np.bincount(buckets).tolist()):
        if count:
            groups[bucket] = ordered[start : start + count]
            start += count
    return groups


def _buckets_at_once(records: Sequence[Any], column: str, num_buckets: int) -> np.ndarray | None:
    """Return the bucket of each record; None if :func:`route` must look at each."""
    if list(map(type, records)).count(dict) != len(records):
        return None
    try:
        values = list(map(itemgetter(column), records))
        if num_buckets == 1:
            return np.zeros(len(values), np.uint8)
        kinds = set(map(type, values))
        if kinds == {int}:
            values = list(map(str, values))
        elif kinds != {str}:
            return None
        digests = b"".join(map(_digest, map(_md5, map(str.encode, values))))
    except (KeyError, UnicodeEncodeError):
        return None
    return _remainders(digests, num_buckets)


def _remainders(digests: bytes, num_buckets: int) -> np.ndarray:
    """Return each digest as a whole number, modulo the number of buckets."""
    if num_buckets in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        # The last byte has the lowest bits of the number.
        return np.frombuffer(digests, np.uint8)[15::16] & np.uint8(num_buckets - 1)
    words = np.frombuffer(digests, ">u4").reshape(-1, 4).astype(np.uint64)
    rest = np.zeros(len(words), np.uint64)
    for word in range(4):
        rest = ((rest << np.uint64(32)) + words[:, word]) % np.uint64(num_buckets)
    return rest.astype(np.int64)


def table_by_bucket(table: pa.Table, column: str, num_buckets: int) -> dict[int, pa.Table]:
    """Divide the rows of an Arrow table by bucket; the order within a bucket is kept."""
    if column not in table.schema.names:
        raise SchemaError(
            f"the Arrow data has no column {column!r}, by which the topic is divided into buckets"
        )
    if table.schema.names.count(column) > 1:
        raise SchemaError(f"the Arrow data has two columns of one name: {table.schema.names}")
    buckets = _buckets_of(table.column(column), num_buckets)
    used = np.unique(buckets).tolist()
    if len(used) == 1:
        return {used[0]: table}
    return {b: table.take(pa.array(np.flatnonzero(buckets == b))) for b in used}


def _buckets_of(values: pa.ChunkedArray, num_buckets: int) -> np.ndarray:
    """Return the bucket of each value, by the rule of :func:`bucket_of`."""
    if not pa.types.is_string(values.type) and not pa.types.is_integer(values.type):
        return np.array([bucket_of(value, num_buckets) for value in values.to_pylist()], np.int64)
    # Equal values are hashed once.
    distinct = values.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
    texts = distinct.dictionary.cast(pa.binary()).to_pylist()
    digests = b"".join(map(_digest, map(_md5, texts)))
    return _remainders(digests, num_buckets)[distinct.indices.to_numpy()]
