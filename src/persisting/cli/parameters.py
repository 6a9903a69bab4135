"""Options and arguments that several commands share."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from persisting.actions.text_values import parse_duration, parse_size, parse_time
from persisting.errors import InvalidArgument
from persisting.options import local_path
from persisting.store_address import is_store_address, parse

_T = TypeVar("_T")


class ParsedText(click.ParamType):
    """A value that is parsed from text; a value that is not text was parsed before."""

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> Any:
        """Return the value, or call ``fail`` with what is wrong."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return self.parse(value, lambda message: self.fail(message, param, ctx))


class Duration(ParsedText):
    """A duration: ``90s``, ``15m``, ``12h``, ``7d``, ``2w``, or a number of seconds."""

    name = "duration"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> float:
        return _parsed(parse_duration, text, fail)


class Size(ParsedText):
    """A size: ``500k``, ``10MB``, ``2G``, or a number of bytes."""

    name = "size"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> int:
        return _parsed(parse_size, text, fail)


class Timestamp(ParsedText):
    """An ISO date or time (in the local zone unless it names one), or ``2h`` for 2 hours ago."""

    name = "time"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> dt.datetime:
        return _parsed(parse_time, text, fail)


def _parsed(parse: Callable[[str], _T], text: str, fail: Callable[[str], NoReturn]) -> _T:
    """Return a value, or fail with the message of the error that ``parse`` raises."""
    try:
        return parse(text)
    except ValueError as exc:
        fail(str(exc))


class Json(ParsedText):
    """A JSON value."""

    name = "json"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> Any:
        try:
            return json.loads(text)
        except ValueError as exc:
            fail(f"{text!r} is not JSON: {exc}")


class Setting(ParsedText):
    """``name=value``; the value is JSON if it parses, otherwise text."""

    name = "name=value"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail(f"{text!r} is not a setting; write name=value")
        try:
            return name, json.loads(value)
        except ValueError:
            return name, value


class LocalPath(click.Path):
    """A path in the local file system."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            local_path("path", value)
        except InvalidArgument as exc:
            self.fail(f"{exc}.", param, ctx)
        return super().convert(value, param, ctx)


class AnyPlace(LocalPath):
    """A path in the local file system, or the address of a prefix in an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_store_address(value):
            return super().convert(value, param, ctx)
        try:
            return str(parse(value))
        except InvalidArgument as exc:
            self.fail(f"{exc}.", param, ctx)


class Names(ParsedText):
    """Names separated by commas."""

    name = "names"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if not all(names):
            fail(f"{text!r} contains an empty name")
        return names


class Position(ParsedText):
    """The position of a record: ``bucket:offset``."""

    name = "bucket:offset"

    def parse(self, text: str, fail: Callable[[str], NoReturn]) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if not match:
            fail(f"{text!r} is not a position; write bucket:offset, as in 0:12")
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
nulls = click.option("--nulls", is_flag=True, help="Show fields without a value too, as null.")
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
metric = click.option(
    "--metric",
    type=click.Choice(["l2", "cosine", "dot"]),
    default="l2",
    show_default=True,
    help="Distance between vectors.",
)
bucket = click.option("--bucket", "-b", type=click.IntRange(0), help="Use only this bucket.")


def count(flag: str, default: int, help: str, *, least: int = 0) -> Any:
    """Return the option ``-n``, which says how many records or pairs."""
    return click.option(
        flag, "-n", default=default, show_default=True, type=click.IntRange(least), help=help
    )


def duration(flag: str, default: str, help: str) -> Any:
    """Return an option that takes a duration."""
    return click.option(flag, type=Duration(), default=default, show_default=True, help=help)


def tag(verb: str) -> Any:
    """Return the option that reads a topic as it was at a tag; ``verb`` is what is done with it."""
    return click.option("--tag", metavar="NAME", help=f"{verb} the topic as it was at a tag.")


def at(verb: str) -> Any:
    """Return the option that reads a topic as it was at a time."""
    return click.option(
        "--at",
        "timestamp",
        type=Timestamp(),
        help=f"{verb} the topic as it was at a time: 2h, or 2026-11-15.",
    )


def bundled(name: str, bundle: type, *options: Any) -> Any:
    """Return a decorator that adds options and passes them as one argument.

    The argument ``name`` is a ``bundle``, a dataclass with a field for each of the options.
    """
    fields = [field.name for field in dataclasses.fields(bundle)]

    def decorate(command: Callable[..., Any]) -> Any:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            bundled = bundle(**{field: values.pop(field) for field in fields})
            return command(**values, **{name: bundled})

        decorated = call
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
