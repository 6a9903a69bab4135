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
    """``90s``, ``15m``, ``12h``, ``7d``, ``2w``, or seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
        if not found or (found[2] or "s") not in _SECONDS:
            self.fail(f"{value!r} is no length of time; write 90s, 15m, 12h, 7d or 2w", param, ctx)
        return float(found[1]) * _SECONDS[found[2] or "s"]


class Size(click.ParamType):
    """``500k``, ``10MB``, ``2G``, or bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", value.strip().lower())
        if not found:
            self.fail(f"{value!r} is no size; write 500k, 10MB or 2G", param, ctx)
        return int(float(found[1]) * _BYTES[found[2]])


class Moment(click.ParamType):
    """An ISO date or time (this machine's zone, if it names none), or ``2h`` for two hours ago."""

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
                f"{value!r} is no time; write 2026-11-15T14:30, or 2h for two hours ago", param, ctx
            )
        try:
            return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=ago)
        except OverflowError:
            self.fail(f"{value!r} lies before all time", param, ctx)


class Json(click.ParamType):
    """A JSON value."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as exc:
            self.fail(f"{value!r} is no JSON: {exc}", param, ctx)


class Setting(click.ParamType):
    """``name=value``; the value is JSON, or else text."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is no setting; write name=value", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


class OwnPath(click.Path):
    """A path in a file system of this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            local_path("path", value)
        except InvalidArgument as exc:
            self.fail(f"{exc}.", param, ctx)
        return super().convert(value, param, ctx)


class Names(click.ParamType):
    """Names with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        found = [name.strip() for name in value.split(",")]
        if not all(found):
            self.fail(f"{value!r} has an empty name in it", param, ctx)
        return found


class Place(click.ParamType):
    """``bucket:offset``."""

    name = "bucket:offset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if not found:
            self.fail(f"{value!r} is no place; write bucket:offset, as in 0:12", param, ctx)
        return int(found[1]), int(found[2])


topic = click.argument("topic")
storage = click.option(
    "--storage",
    "-s",
    metavar="DIR",
    envvar="PERSISTING_STORAGE",
    show_envvar=True,
    default="./queue_storage",
    show_default=True,
    help="Folder of the topics. A TOPIC with a slash in it is a path by itself.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON (see json-schema).")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
columns = click.option("--columns", "-c", type=Names(), metavar="A,B", help="Only these fields.")
where = click.option(
    "--where", "-w", metavar="SQL", help='Only records that meet a condition: "score > 0.5".'
)
bucket = click.option("--bucket", "-b", type=click.IntRange(0), help="Only this bucket.")
