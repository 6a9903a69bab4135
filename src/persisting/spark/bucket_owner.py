"""Ownership of a bucket while Spark changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persisting.backends.table_backend import TableBackend
from persisting.errors import BucketLocked
from persisting.store_address import StoreAddress
from persisting.topic.ownership import owned
from persisting.topic.spec import TopicConfig


@contextmanager
def owner_of(
    place: Path | StoreAddress, config: TopicConfig, bucket: int, instead: str
) -> Iterator[TableBackend]:
    """Own a bucket for the length of a block.

    If another owner has it open, the error names that owner and says what to do ``instead``.
    """
    try:
        with owned(place, config, bucket) as owner:
            yield owner
    except BucketLocked as exc:
        raise BucketLocked(
            f"{exc.summary}. Spark changes a topic that nobody has open for writing: "
            f"close it there, or {instead}",
            owner=exc.owner,
        ) from exc
