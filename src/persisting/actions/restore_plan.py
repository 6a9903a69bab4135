"""The effect of a restore, computed before it is done. Blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from persisting.errors import InvalidArgument

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder
    from persisting.topic.topic_versions import TopicVersion


class BucketRestore(msgspec.Struct):
    """The effect of a restore on a bucket."""

    bucket: int
    version: int
    end_offset: int
    """The end offset of the bucket after the restore."""
    removed: int
    """Records that the restore removes."""


class Restore(msgspec.Struct):
    """The effect of a restore, or of its dry run."""

    topic: str
    removed: int
    buckets: list[BucketRestore]
    groups: list[dict[str, Any]] = []
    """Groups that had committed more and are moved back to the new end."""
    dry_run: bool = False


def restore_plan(source: TopicFolder, version: TopicVersion) -> Restore:
    """Return what restoring a tag, a point in time or versions by bucket would remove.

    Records that are only in an owner's log count too: a restore removes them as well.
    """
    buckets = []
    for bucket, number in _numbers(source, version).items():
        end = source.table(bucket).at(number).end
        removed = max(0, source.snapshot(bucket).end - end)
        buckets.append(BucketRestore(bucket, number, end, removed))
    removed = sum(bucket.removed for bucket in buckets)
    return Restore(source.config.topic, removed, buckets)


def _numbers(source: TopicFolder, version: TopicVersion) -> dict[int, int]:
    if isinstance(version, dict):
        unknown = [bucket for bucket in version if bucket not in source.buckets]
        if unknown:
            raise InvalidArgument(
                f"the topic has no bucket {unknown[0]}; its buckets are 0 to "
                f"{len(source.buckets) - 1}"
            )
        return {bucket: _resolved(source, bucket, number) for bucket, number in version.items()}
    return source.versions(version)


def _resolved(source: TopicFolder, bucket: int, number: int) -> int:
    from persisting.table import versions

    dataset: Any = source.view(bucket).dataset
    return versions.NOTHING if dataset is None else versions.resolve(dataset, number)
