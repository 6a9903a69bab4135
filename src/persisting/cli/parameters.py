"""Options and arguments that several commands share."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any

import click

from persisting.errors import InvalidArgument
from persisting.options import local_path

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class Duration(click.ParamType):
    """A duration: ``90s``, ``15m``, ``12h``, ``7d``, ``2w``, or a number of seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
        if not match or (match[2] or "s") not in _SECONDS:
            self.fail(f"{value!r} is not a duration; write 90s, 15m, 12h, 7d or 2w", param, ctx)
        return float(match[1]) * _SECONDS[match[2] or "s"]


class Size(click.ParamType):
    """A size: ``500k``, ``10MB``, ``2G``, or a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", value.strip().lower())
        if not match:
            self.fail(f"{value!r} is not a size; write 500k, 10MB or 2G", param, ctx)
        return int(float(match[1]) * _BYTES[match[2]])


class Timestamp(click.ParamType):
    """An ISO date or time (in the local zone unless it names one), or ``2h`` for 2 hours ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, dt.datetime):
            return value
        try:
            return dt.datetime.fromisoformat(value.replace("Z", "+00:00")).astimezone()
        except ValueError:
            pass
        try:
            ago = Duration().convert(value.removesuffix(" ago"), None, None)
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a time; write 2026-11-15T14:30, or 2h for two hours ago",
                param,
                ctx,
            )
        try:
            return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=ago)
        except OverflowError:
            self.fail(f"{value!r} is too far in the past", param, ctx)


class Json(click.ParamType):
    """A JSON value."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as exc:
            self.fail(f"{value!r} is not JSON: {exc}", param, ctx)


class Setting(click.ParamType):
    """``name=value``; the value is JSON if it parses, otherwise text."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not a setting; write name=value", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


class LocalPath(click.Path):
    """A path in the local file system."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            local_path("path", value)
        except InvalidArgument as exc:
            self.fail(f"{exc}.", param, ctx)
        return super().convert(value, param, ctx)


class Names(click.ParamType):
    """Names separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",")]
        if not all(names):
            self.fail(f"{value!r} contains an empty name", param, ctx)
        return names


class Position(click.ParamType):
    """The position of a record: ``bucket:offset``."""

    name = "bucket:offset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d+):(\d+)", value)
        if not match:
            self.fail(f"{value!r} is not a position; write bucket:offset, as in 0:12", param, ctx)
        return int(match[1]), int(match[2])


topic = click.argument("topic")
storage = click.option(
    "--storage",
    "-s",
    metavar="DIR",
    envvar="PERSISTING_STORAGE",
    show_envvar=True,
    default="./queue_storage",
    show_default=True,
    help="Folder that contains the topics; ignored if TOPIC is a path with a slash.",
)
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; 'persisting json-schema' shows its schema."
)
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
dry_run = click.option("--dry-run", is_flag=True, help="Print what would be done without doing it.")
columns = click.option(
    "--columns", "-c", type=Names(), metavar="A,B", help="Use only these fields."
)
where = click.option(
    "--where", "-w", metavar="SQL", help='Use only records that match a condition: "score > 0.5".'
)
write_id = click.option(
    "--write-id",
    metavar="NAME",
    help="Remember progress under this name, so that repeating the input adds no duplicates.",
)
buckets = click.option(
    "--buckets", type=click.IntRange(1), help="Number of buckets of a new topic.  [default: 4]"
)
bucket_column = click.option(
    "--bucket-column",
    metavar="FIELD",
    help="Field that decides the bucket of a record in a new topic.  [default: id]",
)
bucket = click.option("--bucket", "-b", type=click.IntRange(0), help="Use only this bucket.")
