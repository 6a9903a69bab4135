"""The options of the format ``persisting``, read and checked once."""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from persisting.errors import InvalidArgument
from persisting.topic.spec import DEFAULT_COLUMN
from persisting.topic.topic_names import check_name

EARLIEST, LATEST = "earliest", "latest"

READ = (
    "path",
    "topic",
    "columns",
    "filter",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "version",
    "timestamp",
    "tag",
    "includeMetadata",
    "rowsPerPartition",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
)
WRITE = (
    "path",
    "topic",
    "numBuckets",
    "bucketColumn",
    "compression",
    "vectors",
    "writeId",
)
_OF_SPARK = {"checkpointlocation", "queryname", "__dataframe_query_context", "serialization.format"}

ROWS_PER_PARTITION = 1_000_000
"""Rows that a task reads at most; each task costs some 50 ms to begin."""

BYTES_PER_PARTITION = 128 * 1024 * 1024
"""What they take on disk at most, so that long rows make many tasks; Spark's files do the same."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a read was told."""

    folder: Path
    columns: tuple[str, ...] | None = None
    where: str | None = None
    starting: str | dict[int, int] | dt.datetime = EARLIEST
    ending: str | dict[int, int] | dt.datetime = LATEST
    version: int | str | dt.datetime | None = None
    """A version (of a topic with one bucket), the name of a tag, or a moment."""
    metadata: bool = False
    rows_per_partition: int | None = None
    max_per_trigger: int | None = None
    fail_on_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What a write was told."""

    folder: Path
    num_buckets: int | None = None
    bucket_column: str | None = None
    compression: str | None = None
    vectors: Mapping[str, int] | None = None
    write_id: str | None = None


def read_options(given: Mapping[str, str]) -> ReadOptions:
    said = _said(given, READ)
    travel = [name for name in ("version", "timestamp", "tag") if name in said]
    if len(travel) > 1:
        raise InvalidArgument(f"options {travel[0]} and {travel[1]} contradict each other")
    for offsets, moment in (
        ("startingOffsets", "startingTimestamp"),
        ("endingOffsets", "endingTimestamp"),
    ):
        if offsets in said and moment in said:
            raise InvalidArgument(f"options {offsets} and {moment} contradict each other")
    columns = said.get("columns")
    return ReadOptions(
        folder=_folder(said),
        columns=None if columns is None else _names("columns", columns),
        where=said.get("filter"),
        starting=_position(said, "startingOffsets", "startingTimestamp", EARLIEST),
        ending=_position(said, "endingOffsets", "endingTimestamp", LATEST),
        version=_version(said),
        metadata=_flag(said, "includeMetadata", default=False),
        rows_per_partition=_count(said, "rowsPerPartition"),
        max_per_trigger=_count(said, "maxOffsetsPerTrigger"),
        fail_on_loss=_flag(said, "failOnDataLoss", default=True),
    )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    said = _said(given, WRITE)
    return WriteOptions(
        folder=_folder(said),
        num_buckets=_count(said, "numBuckets"),
        bucket_column=said.get("bucketColumn"),
        compression=said.get("compression"),
        vectors=_vectors(said),
        write_id=said.get("writeId"),
    )


def default_column(options: WriteOptions) -> str:
    return options.bucket_column or DEFAULT_COLUMN


def moment(name: str, text: str) -> dt.datetime:
    """A moment as ISO 8601, or as milliseconds of Unix time, as Kafka's options have it."""
    try:
        if _is_number(text.strip().lstrip("-")):
            return dt.datetime.fromtimestamp(int(text) / 1000, dt.timezone.utc)
        found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError) as exc:
        raise InvalidArgument(
            f"option {name}={text!r} is no moment: use ISO 8601, such as 2026-01-31T12:00:00Z, or "
            "milliseconds of Unix time"
        ) from exc
    return found.astimezone(dt.timezone.utc)


def _said(given: Mapping[str, str], known: tuple[str, ...]) -> dict[str, str]:
    """The options by their proper names; Spark has made them lower case."""
    proper = {name.lower(): name for name in known}
    said = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in proper:
            if not str(value).strip():
                raise InvalidArgument(f"option {proper[lower]} is empty; leave it out, or say more")
            said[proper[lower]] = value
        elif lower not in _OF_SPARK:
            near = difflib.get_close_matches(lower, list(proper), n=1)
            hint = f"; did you mean {proper[near[0]]}?" if near else "."
            raise InvalidArgument(
                f"unknown option {name!r}{hint} The options are: {', '.join(known)}"
            )
    return said


def _folder(said: Mapping[str, str]) -> Path:
    path = said.get("path")
    if not path:
        raise InvalidArgument(
            "the topic is missing: load or save <storage_path>/<topic>, or give the options path "
            "and topic"
        )
    scheme, found, rest = path.partition(":/")
    if found and scheme != "file" and "/" not in scheme:
        raise InvalidArgument(f"path {path!r}: topics lie in a file system, not under {scheme}:")
    folder = Path("/" + rest.lstrip("/") if found and scheme == "file" else path).absolute()
    return folder / check_name("topic", said["topic"]) if "topic" in said else folder


def _names(option: str, text: str) -> tuple[str, ...]:
    """Names with commas between them, or as a JSON list where a name has one itself."""
    if text.lstrip().startswith("["):
        try:
            names = tuple(msgspec.json.decode(text, type=list[str]))
        except msgspec.DecodeError as exc:
            raise InvalidArgument(f"option {option}={text!r} is no list of names: {exc}") from exc
    else:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidArgument(f"option {option}={text!r} names no field")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidArgument(f"option {option} names {twice[0]!r} twice")
    return names


def _position(
    said: Mapping[str, str], offsets: str, timestamp: str, default: str
) -> str | dict[int, int] | dt.datetime:
    if timestamp in said:
        return moment(timestamp, said[timestamp])
    text = said.get(offsets, default).strip()
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        found = msgspec.json.decode(text, type=dict[int, int])
        if any(offset < 0 for offset in found.values()):
            raise InvalidArgument(f"option {offsets}={text!r}: an offset is a number from 0")
        return found
    except msgspec.DecodeError as exc:
        raise InvalidArgument(
            f"option {offsets}={text!r} must be earliest, latest, or an offset by bucket such as "
            '{"0": 100}'
        ) from exc


def _version(said: Mapping[str, str]) -> int | str | dt.datetime | None:
    if "tag" in said:
        return said["tag"]
    if "timestamp" in said:
        return moment("timestamp", said["timestamp"])
    if "version" not in said:
        return None
    if not _is_number(said["version"]):
        raise InvalidArgument(f"option version={said['version']!r} must be a number")
    return int(said["version"])


def _flag(said: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = said.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"option {name}={said[name]!r} must be true or false")
    return text == "true"


def _count(said: Mapping[str, str], name: str) -> int | None:
    if name not in said:
        return None
    if not _is_number(said[name]) or not int(said[name]):
        raise InvalidArgument(f"option {name}={said[name]!r} must be a whole number from 1")
    return int(said[name])


def _vectors(said: Mapping[str, str]) -> dict[str, int] | None:
    if "vectors" not in said:
        return None
    found: dict[str, int] = {}
    for one in said["vectors"].split(","):
        name, _, size = one.strip().rpartition(":")
        if not name or not _is_number(size) or not int(size):
            raise InvalidArgument(
                f"option vectors={said['vectors']!r} must be name:length, such as embedding:768"
            )
        found[name] = int(size)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def plain(value: Any) -> Any:
    """An option's value as Spark wants it: text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
