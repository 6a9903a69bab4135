"""Options of the sink from Python's names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persisting.errors import InvalidArgument
from persisting.spark.source_options import option_text


def writer_options(
    *,
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    compression: str | None = None,
    vectors: Mapping[str, int] | None = None,
    write_id: str | None = None,
) -> dict[str, str]:
    """Return options for ``format("persisting")``; None leaves an option to the sink."""
    with_comma = next((name for name in vectors or {} if "," in name), None)
    if with_comma is not None:
        raise InvalidArgument(
            f"vectors names {with_comma!r}; the name of a vector must have no comma: rename it"
        )
    listed = ",".join(f"{name}:{size}" for name, size in (vectors or {}).items())
    options: dict[str, Any] = {
        "bucketColumn": bucket_column,
        "numBuckets": num_buckets,
        "compression": compression,
        "vectors": listed or None,
        "writeId": write_id,
    }
    return {name: option_text(value) for name, value in options.items() if value is not None}
