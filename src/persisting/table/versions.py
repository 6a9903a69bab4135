"""The versions of a table: which there are, which one is meant, and which may go."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeAlias

from persisting.errors import InvalidArgument
from persisting.table import properties
from persisting.table.lance_errors import own_handle, retry_if_removed, translated

Version: TypeAlias = "int | str | dt.datetime"
"""A number, the name of a tag, or a moment: the newest version that was there then."""


NOTHING = 0
"""Stands for the time before the first version."""


def listing(dataset: Any) -> list[dict[str, Any]]:
    """All versions that can be read, oldest first."""

    def look() -> list[dict[str, Any]]:
        return [
            {
                "version": one["version"],
                "timestamp": _moment(one),
                "rows": int(one["metadata"].get("total_rows", 0)),
                "operation": properties.operation(dataset, one["version"]),
            }
            for one in dataset.versions()
        ]

    with translated("list the versions of", dataset.uri):
        return retry_if_removed(look)


def tags(dataset: Any) -> dict[str, int]:
    """The tags and their versions, by name."""
    with translated("list the tags of", dataset.uri):
        found = retry_if_removed(own_handle(dataset).tags.list)
    return {name: int(tag["version"]) for name, tag in sorted(found.items())}


def resolve(dataset: Any, version: Version) -> int:
    """The number of the version that is meant, or raise."""
    if isinstance(version, str):
        known = tags(dataset)
        if version not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise InvalidArgument(f"there is no tag {version!r}; there are: {names}")
        return known[version]
    with translated("list the versions of", dataset.uri):
        kept = retry_if_removed(dataset.versions)
    if isinstance(version, dt.datetime):
        moment = utc(version)
        before = [one["version"] for one in kept if _moment(one) <= moment]
        if not before and kept[0]["version"] == 1:
            return NOTHING
        if not before:
            raise InvalidArgument(
                f"no version is left of {version.isoformat()}: the oldest is of "
                f"{_moment(kept[0]).isoformat()}. Tag versions to keep them"
            )
        return int(before[-1])
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidArgument(f"version must be a number, a tag or a datetime, got {version!r}")
    numbers = [one["version"] for one in kept]
    if version == NOTHING:
        return NOTHING
    if version not in numbers:
        raise InvalidArgument(
            f"version {version} of {dataset.uri} is not there: versions {numbers[0]} to "
            f"{numbers[-1]} are kept. Tag versions to keep them longer"
        )
    return version


def outdated(dataset: Any, keep_seconds: float) -> list[int]:
    """The versions that nobody should read any more: old ones without a tag.

    What each version that stays says of itself must stay readable: the commit below it that
    carries the properties stays too.
    """
    now = dt.datetime.now(dt.timezone.utc)
    kept = dataset.versions()
    tagged = set(tags(dataset).values())
    old = [
        one["version"]
        for one in kept
        if (now - _moment(one)).total_seconds() > keep_seconds
        and one["version"] not in tagged
        and one["version"] != dataset.version
    ]
    going = set(old)
    numbers = [one["version"] for one in kept]
    for index, version in enumerate(numbers[1:], 1):
        if version not in going and numbers[index - 1] in going:
            going.discard(telling(dataset, numbers[: index + 1]))
    return sorted(going)


def telling(dataset: Any, numbers: list[int]) -> int:
    """The newest of the versions whose commit carries the properties."""
    for version in reversed(numbers):
        if properties.own(dataset, version) is not None:
            return version
    return numbers[-1]


def remove(dataset: Any, going: list[int]) -> None:
    """Remove versions, and the files that only they used."""
    own_handle(dataset).cleanup_old_versions(versions=going, error_if_tagged_old_versions=False)


def check_tag(name: Any) -> str:
    """A tag's name; it becomes a file's name."""
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    if not isinstance(name, str) or not name or len(name) > 128 or not set(name) <= allowed:
        raise InvalidArgument(f"a tag is 1 to 128 letters, digits, '-', '_' or '.', got {name!r}")
    if name.startswith(".") or ".." in name or name.endswith((".", ".lock")):
        raise InvalidArgument(f"a tag does not begin or end with '.', got {name!r}")
    return name


def utc(moment: dt.datetime) -> dt.datetime:
    """A moment in UTC; what lies before year 1 or after 9999 there is the first or the last."""
    try:
        return moment.astimezone(dt.timezone.utc)
    except (OverflowError, ValueError):
        end = dt.datetime.max if moment.year > 1 else dt.datetime.min
        return end.replace(tzinfo=dt.timezone.utc)


def _moment(one: dict[str, Any]) -> dt.datetime:
    found: dt.datetime = one["timestamp"]
    return found.astimezone(dt.timezone.utc)
