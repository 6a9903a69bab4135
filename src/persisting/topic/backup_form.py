"""The content of ``backup.json``, and the names of files in a backup."""

from __future__ import annotations

import msgspec

from persisting.topic.backup_files import Copied

CHECKPOINTS = "checkpoints"
DEFINITION = "definition.json"
"""The topic's definition in a backup in an object store. A prefix with ``topic.json`` would be a
topic there."""
TRIES = 5
"""How many times a part of a topic is copied if it changes during the copy."""


class BucketCopy(msgspec.Struct):
    """A bucket of a backup; the records in its log are not among ``rows``."""

    bucket: int
    version: int
    rows: int
    start_offset: int
    end_offset: int
    log_bytes: int
    term: int = 0
    """Of a topic in an object store: the number of the last ownership."""


class Backup(msgspec.Struct):
    """The contents of ``backup.json``."""

    topic: str
    source: str
    time: str
    buckets: list[BucketCopy]
    files: dict[str, Copied]
    """By path in the backup."""
    format: int = 1

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def divide_logs(
    sizes: dict[str, int], noted: dict[int, str], buckets: list[BucketCopy]
) -> list[str]:
    """Count the bytes of each shared log for the buckets that note it; return the logs that none
    does."""
    unused = []
    for place, size in sizes.items():
        noting = [b for b in buckets if noted.get(b.bucket) == place]
        if not noting:
            unused.append(place)
        for number, bucket in enumerate(noting):
            bucket.log_bytes += size // len(noting) + (number < size % len(noting))
    return unused
