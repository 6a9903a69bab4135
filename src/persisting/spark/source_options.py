"""The options of the format ``persisting``, parsed and checked."""

from __future__ import annotations

import datetime as dt
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from persisting.errors import InvalidArgument
from persisting.store_address import StoreAddress, is_store_address, parse
from persisting.topic.handover import OWNER_SECONDS
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
    "flush",
    "ownerTimeout",
)
WRITE = (
    "path",
    "topic",
    "numBuckets",
    "bucketColumn",
    "compression",
    "vectors",
    "writeId",
    "ownerTimeout",
)
DROP_TOPIC = "dropTopic"
"""Set by our catalog only: Spark has no call for Python sources to drop a table."""
ADD_FIELDS = "addFields"
"""Set by our catalog only: Spark has no call for Python sources to add columns."""
LIST_TOPICS = "listTopics"
"""Set by our catalog only, with an address in an object store, which Java cannot open."""

_SPARK_OPTIONS = {
    "checkpointlocation",
    "queryname",
    "__dataframe_query_context",
    "serialization.format",
}

_CREDENTIALS = re.compile(
    r"(?:aws|azure|google|gcp|s3|fs)[_.]|storage_?options|"
    r".*(?:access_?key|secret|token|password|credential|allow_http|endpoint)"
)
"""Names that storage_options may have, and others that may stand for a secret."""

ROWS_PER_PARTITION = 1_000_000
"""The most rows that a task reads; starting a task costs some 50 ms."""

BYTES_PER_PARTITION = 128 * 1024 * 1024
"""The most bytes on disk that a task reads, so that long rows make more tasks, as with files."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a read."""

    folder: Path | StoreAddress
    columns: tuple[str, ...] | None = None
    where: str | None = None
    starting: str | dict[int, int] | dt.datetime = EARLIEST
    ending: str | dict[int, int] | dt.datetime = LATEST
    version: int | str | dt.datetime | None = None
    """A version (of a topic with one bucket), the name of a tag, or a point in time."""
    metadata: bool = False
    rows_per_partition: int | None = None
    max_per_trigger: int | None = None
    fail_on_loss: bool = True
    flush: bool = False
    """Whether owners first write to the tables what they have acknowledged."""
    owner_seconds: float = OWNER_SECONDS


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options of a write."""

    place: Path | StoreAddress
    """The folder of the topic, or its address in an object store."""
    num_buckets: int | None = None
    bucket_column: str | None = None
    compression: str | None = None
    vectors: Mapping[str, int] | None = None
    write_id: str | None = None
    owner_seconds: float = OWNER_SECONDS


def read_options(options: Mapping[str, str]) -> ReadOptions:
    given = _by_proper_name(options, READ)
    travel = [name for name in ("version", "timestamp", "tag") if name in given]
    if len(travel) > 1:
        raise InvalidArgument(f"options {travel[0]} and {travel[1]} contradict each other")
    for offsets, timestamp in (
        ("startingOffsets", "startingTimestamp"),
        ("endingOffsets", "endingTimestamp"),
    ):
        if offsets in given and timestamp in given:
            raise InvalidArgument(f"options {offsets} and {timestamp} contradict each other")
    columns = given.get("columns")
    flush = _flag(given, "flush", default=False)
    if flush and travel:
        raise InvalidArgument(
            f"options flush and {travel[0]} contradict each other: a flush adds rows to the newest "
            "version"
        )
    place = _place(given)
    return ReadOptions(
        folder=place,
        columns=None if columns is None else _names("columns", columns),
        where=given.get("filter"),
        starting=_position(given, "startingOffsets", "startingTimestamp", EARLIEST),
        ending=_position(given, "endingOffsets", "endingTimestamp", LATEST),
        version=_version(given),
        metadata=_flag(given, "includeMetadata", default=False),
        rows_per_partition=_count(given, "rowsPerPartition"),
        max_per_trigger=_count(given, "maxOffsetsPerTrigger"),
        fail_on_loss=_flag(given, "failOnDataLoss", default=True),
        flush=flush,
        owner_seconds=_seconds(given, "ownerTimeout"),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    given = _by_proper_name(options, WRITE)
    return WriteOptions(
        place=_place(given),
        num_buckets=_count(given, "numBuckets"),
        bucket_column=given.get("bucketColumn"),
        compression=given.get("compression"),
        vectors=_vectors(given),
        write_id=given.get("writeId"),
        owner_seconds=_seconds(given, "ownerTimeout"),
    )


def drops_topic(options: Mapping[str, str]) -> bool:
    """Whether our catalog asks for the deletion of the topic."""
    return any(name.lower() == DROP_TOPIC.lower() for name in options)


def adds_fields(options: Mapping[str, str]) -> bool:
    """Whether our catalog asks for new fields of the topic."""
    return any(name.lower() == ADD_FIELDS.lower() for name in options)


def lists_topics(options: Mapping[str, str]) -> bool:
    """Whether our catalog asks for the names of topics."""
    return any(name.lower() == LIST_TOPICS.lower() for name in options)


def parse_timestamp(name: str, text: str) -> dt.datetime:
    """Parse a timestamp: ISO 8601, or milliseconds of Unix time, as in Kafka's options."""
    try:
        if _is_number(text.strip().lstrip("-")):
            return dt.datetime.fromtimestamp(int(text) / 1000, dt.timezone.utc)
        parsed = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError) as exc:
        raise InvalidArgument(
            f"option {name}={text!r} is not a timestamp: use ISO 8601, such as "
            "2026-01-31T12:00:00Z, or milliseconds of Unix time"
        ) from exc
    return parsed.astimezone(dt.timezone.utc)


def _by_proper_name(options: Mapping[str, str], known: tuple[str, ...]) -> dict[str, str]:
    """Return the options under the spelling of our docs; Spark passes names in lower case.

    Raises for unknown and empty options.
    """
    proper = {name.lower(): name for name in known}
    given = {}
    for name, value in options.items():
        lower = name.lower()
        if lower in proper:
            if not str(value).strip():
                raise InvalidArgument(
                    f"option {proper[lower]} is empty; give it a value, or leave it out"
                )
            given[proper[lower]] = value
        elif _CREDENTIALS.match(lower):
            raise InvalidArgument(
                f"{name!r}: settings and credentials are not options, since Spark shows options in "
                "its plans and logs. Set them in the environment of the driver and of the "
                "executors, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        elif lower not in _SPARK_OPTIONS:
            near = difflib.get_close_matches(lower, list(proper), n=1)
            hint = f"; did you mean {proper[near[0]]}?" if near else "."
            raise InvalidArgument(
                f"unknown option {name!r}{hint} The options are: {', '.join(known)}"
            )
    return given


def _place(given: Mapping[str, str]) -> Path | StoreAddress:
    """Return the folder of a topic, or its address in an object store."""
    path = given.get("path", "")
    if not is_store_address(path):
        return _folder(given)
    address = parse(path)
    return address / check_name("topic", given["topic"]) if "topic" in given else address


def _folder(given: Mapping[str, str]) -> Path:
    path = given.get("path")
    if not path:
        raise InvalidArgument(
            "the topic is missing: load or save <storage_path>/<topic>, or give the options path "
            "and topic"
        )
    scheme, separator, rest = path.partition(":/")
    if separator and scheme != "file" and "/" not in scheme:
        raise InvalidArgument(
            f"path {path!r}: Spark reads and writes topics in a file system, or in an object store "
            f"at s3://, gs:// or az://; not under {scheme}:"
        )
    folder = Path("/" + rest.lstrip("/") if separator and scheme == "file" else path).absolute()
    return folder / check_name("topic", given["topic"]) if "topic" in given else folder


def _names(option: str, text: str) -> tuple[str, ...]:
    """Parse names separated by commas, or a JSON list, for names that contain a comma."""
    if text.lstrip().startswith("["):
        try:
            names = tuple(msgspec.json.decode(text, type=list[str]))
        except msgspec.DecodeError as exc:
            raise InvalidArgument(
                f"option {option}={text!r} is not a list of names: {exc}"
            ) from exc
    else:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidArgument(f"option {option}={text!r} names no field")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidArgument(f"option {option} names {twice[0]!r} twice")
    return names


def _position(
    given: Mapping[str, str], offsets: str, timestamp: str, default: str
) -> str | dict[int, int] | dt.datetime:
    if timestamp in given:
        return parse_timestamp(timestamp, given[timestamp])
    text = given.get(offsets, default).strip()
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        by_bucket = msgspec.json.decode(text, type=dict[int, int])
        if any(offset < 0 for offset in by_bucket.values()):
            raise InvalidArgument(f"option {offsets}={text!r}: an offset is a number from 0")
        return by_bucket
    except msgspec.DecodeError as exc:
        raise InvalidArgument(
            f"option {offsets}={text!r} must be earliest, latest, or an offset by bucket such as "
            '{"0": 100}'
        ) from exc


def _version(given: Mapping[str, str]) -> int | str | dt.datetime | None:
    if "tag" in given:
        return given["tag"]
    if "timestamp" in given:
        return parse_timestamp("timestamp", given["timestamp"])
    if "version" not in given:
        return None
    if not _is_number(given["version"]):
        raise InvalidArgument(f"option version={given['version']!r} must be a number")
    return int(given["version"])


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"option {name}={given[name]!r} must be true or false")
    return text == "true"


def _count(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    if not _is_number(given[name]) or not int(given[name]):
        raise InvalidArgument(f"option {name}={given[name]!r} must be a whole number from 1")
    return int(given[name])


def _seconds(given: Mapping[str, str], name: str) -> float:
    if name not in given:
        return OWNER_SECONDS
    try:
        seconds = float(given[name])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"option {name}={given[name]!r} must be a number of seconds above 0")
    return seconds


def _vectors(given: Mapping[str, str]) -> dict[str, int] | None:
    if "vectors" not in given:
        return None
    vectors: dict[str, int] = {}
    for part in given["vectors"].split(","):
        name, _, size = part.strip().rpartition(":")
        if not name or not _is_number(size) or not int(size):
            raise InvalidArgument(
                f"option vectors={given['vectors']!r} must be name:length, such as embedding:768"
            )
        vectors[name] = int(size)
    return vectors


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def option_text(value: Any) -> str:
    """Return the value of an option as text, as Spark takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
