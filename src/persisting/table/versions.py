"""The versions of a table: lists them, resolves a reference to one, finds those to remove."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeAlias

from persisting.errors import InvalidArgument, TableError
from persisting.table import properties
from persisting.table.lance_errors import own_handle, retry_if_removed, translated

Version: TypeAlias = "int | str | dt.datetime"
"""A number, the name of a tag, or a point in time: the newest version that existed then."""

NOTHING = 0
"""Stands for the time before the first version."""


def listing(dataset: Any, *, operations: bool = True) -> list[dict[str, Any]]:
    """All versions that can be read, oldest first, except those that change nothing.

    The operation that made a version is in a file of its own: without ``operations`` it is left
    out.
    """

    def read() -> list[dict[str, Any]]:
        entries = [
            {
                "version": entry["version"],
                "timestamp": _timestamp(entry),
                "rows": int(entry["metadata"].get("total_rows", 0)),
            }
            | ({"operation": properties.operation(dataset, entry["version"])} if operations else {})
            for entry in dataset.versions()
        ]
        return [entry for entry in entries if entry.get("operation") not in properties.UNCHANGING]

    with translated("list the versions of", dataset.uri):
        return retry_if_removed(read)


def operation(dataset: Any, version: int) -> str | None:
    """What made a version, None if the version was removed meanwhile."""
    try:
        with translated("read a version of", dataset.uri):
            return properties.operation(dataset, version)
    except TableError:
        kept = [entry["version"] for entry in listing(dataset, operations=False)]
        if version in kept:
            raise
        return None


def tags(dataset: Any) -> dict[str, int]:
    """The versions of all tags, by name."""
    with translated("list the tags of", dataset.uri):
        entries = retry_if_removed(own_handle(dataset).tags.list)
    return {name: int(tag["version"]) for name, tag in sorted(entries.items())}


def resolve(dataset: Any, version: Version) -> int:
    """Return the number of the version that ``version`` refers to, or raise."""
    if isinstance(version, str):
        known = tags(dataset)
        if version not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise InvalidArgument(f"there is no tag {version!r}; there are: {names}")
        return known[version]
    with translated("list the versions of", dataset.uri):
        kept = retry_if_removed(dataset.versions)
    if isinstance(version, dt.datetime):
        point = utc(version)
        before = [entry["version"] for entry in kept if _timestamp(entry) <= point]
        if not before and kept[0]["version"] == 1:
            return NOTHING
        if not before:
            raise InvalidArgument(
                f"no version from {version.isoformat()} is left; the oldest is from "
                f"{_timestamp(kept[0]).isoformat()}. Tag versions to keep them"
            )
        return int(before[-1])
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidArgument(f"version must be a number, a tag or a datetime, got {version!r}")
    numbers = [entry["version"] for entry in kept]
    if version == NOTHING:
        return NOTHING
    if version not in numbers:
        raise InvalidArgument(
            f"version {version} of {dataset.uri} does not exist: versions {numbers[0]} to "
            f"{numbers[-1]} are kept. Tag versions to keep them longer"
        )
    return version


def outdated(dataset: Any, keep_seconds: float) -> list[int]:
    """The versions to remove: old ones without a tag."""
    now = dt.datetime.now(dt.timezone.utc)
    kept = dataset.versions()
    old = {
        entry["version"]
        for entry in kept
        if (now - _timestamp(entry)).total_seconds() > keep_seconds
    }
    return removable(dataset, [entry["version"] for entry in kept], old)


def removable(dataset: Any, numbers: list[int], old: set[int]) -> list[int]:
    """The ``old`` ones of all versions that can be removed: neither tagged nor the newest.

    The properties of a version that stays must stay readable, so the commit below it that carries
    them stays too.
    """
    old = old - set(tags(dataset).values()) - {dataset.version}
    for index, version in enumerate(numbers[1:], 1):
        if version not in old and numbers[index - 1] in old:
            old.discard(with_properties(dataset, numbers[: index + 1]))
    return sorted(old)


def with_properties(dataset: Any, numbers: list[int]) -> int:
    """The newest of these versions whose commit carries the properties."""
    for version in reversed(numbers):
        if properties.own(dataset, version) is not None:
            return version
    return numbers[-1]


def remove(dataset: Any, numbers: list[int]) -> None:
    """Remove versions, and the files that only they use."""
    own_handle(dataset).cleanup_old_versions(versions=numbers, error_if_tagged_old_versions=False)


def check_tag(name: Any) -> str:
    """Return the name of a tag if it is valid, or raise: it becomes a file name."""
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    if not isinstance(name, str) or not name or len(name) > 128 or not set(name) <= allowed:
        raise InvalidArgument(f"a tag is 1 to 128 letters, digits, '-', '_' or '.', got {name!r}")
    if name.startswith(".") or ".." in name or name.endswith((".", ".lock")):
        raise InvalidArgument(f"a tag does not begin or end with '.', got {name!r}")
    return name


def utc(time: dt.datetime) -> dt.datetime:
    """Convert a time to UTC, clipped to the years 1 to 9999."""
    try:
        return time.astimezone(dt.timezone.utc)
    except (OverflowError, ValueError):
        end = dt.datetime.max if time.year > 1 else dt.datetime.min
        return end.replace(tzinfo=dt.timezone.utc)


def _timestamp(entry: dict[str, Any]) -> dt.datetime:
    timestamp: dt.datetime = entry["timestamp"]
    return timestamp.astimezone(dt.timezone.utc)
