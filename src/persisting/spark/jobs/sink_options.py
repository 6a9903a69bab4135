"""The sink's options, from Python's names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persisting.errors import InvalidArgument
from persisting.spark.source_options import plain


def writer_options(
    *,
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    compression: str | None = None,
    vectors: Mapping[str, int] | None = None,
    write_id: str | None = None,
) -> dict[str, str]:
    """Options for ``format("persisting")``; what is None is left to the sink."""
    awkward = next((name for name in vectors or {} if "," in name), None)
    if awkward is not None:
        raise InvalidArgument(f"field {awkward!r} holds vectors and has a comma; rename it first")
    listed = ",".join(f"{name}:{size}" for name, size in (vectors or {}).items())
    said: dict[str, Any] = {
        "bucketColumn": bucket_column,
        "numBuckets": num_buckets,
        "compression": compression,
        "vectors": listed or None,
        "writeId": write_id,
    }
    return {name: plain(value) for name, value in said.items() if value is not None}
