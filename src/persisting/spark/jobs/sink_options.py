"""Options of the sink from Python's names and values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from persisting.errors import InvalidArgument, StorageError
from persisting.spark.query_errors import renamed
from persisting.spark.source_options import option_text

_F = TypeVar("_F", bound=Callable[..., Any])

_ARGUMENTS = {
    "bucketColumn": "bucket_column",
    "numBuckets": "num_buckets",
    "compression": "compression",
    "vectors": "vectors",
    "writeId": "write_id",
}
_OPTION = re.compile(rf"(?:the )?option ({'|'.join(_ARGUMENTS)})\b=?")


def names_arguments(job: _F) -> _F:
    """Let a job name its own arguments in errors, not the options of the sink that they set."""

    @functools.wraps(job)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return job(*args, **kwargs)
        except StorageError as exc:
            text = _OPTION.sub(lambda match: f"{_ARGUMENTS[match[1]]}=", str(exc))
            if text == str(exc):
                raise
            raise renamed(exc, text) from exc.__cause__

    return cast("_F", call)


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
