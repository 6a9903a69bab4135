"""The command itself: its parts, and what becomes of errors."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from persisting.cli import exit_codes, output
from persisting.cli.commands import (
    backup,
    bench,
    demo,
    export,
    groups,
    maintenance,
    metrics,
    pipeline,
    read,
    schemas,
    search,
    topics,
    versions,
    wal,
    write,
)
from persisting.errors import StorageError

_SECTIONS: dict[str, list[click.Command]] = {
    "Look": [topics.topics, topics.describe, read.head, read.tail, read.get],
    "Find": [search.search, search.query],
    "Write": [write.put, write.import_, export.export],
    "Versions": [versions.tag, versions.versions, versions.restore],
    "Consumers": [groups.groups],
    "Upkeep": [
        maintenance.compact,
        maintenance.retain,
        maintenance.verify,
        backup.backup,
        wal.wal,
        metrics.metrics,
    ],
    "Spark": [pipeline.pipeline],
    "Try": [demo.demo, bench.bench],
    "Tools": [schemas.json_schema, schemas.completion],
}


class _Sections(click.Group):
    """Lists its commands by what they are for."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except BrokenPipeError:
            # Here, since click would end with 1; and Python complains if it cannot flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise exit_codes.Ended(exit_codes.BROKEN_PIPE) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        ((one.name or "").ljust(width), one.get_short_help_str(1000))
                        for one in commands
                    ]
                )


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="persisting", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Durable queues: look into topics, put records, search them, keep them well.

    \b
    Examples:
      persisting topics                               what is in ./queue_storage
      persisting tail events -f                       follow a topic while it is written
      persisting put events < events.jsonl            durable, with a count of what was stored
      persisting search notes --text "lost update"    the best records for words
      persisting verify events                        compare every file with its checksum

    Reading needs no lock and disturbs no owner. Ctrl-C stops any command; what it has said is done
    stays done. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such topic, 4 owned by another
    process, 5 damage found, 130 stopped.
    """


for _commands in _SECTIONS.values():
    for _command in _commands:
        cli.add_command(_command)


def run(argv: Sequence[str]) -> int:
    """Run a command line; the exit code."""
    args, debug = _without_debug(list(argv))
    _prepare_output()
    _quiet(debug)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _Remarks()
            cli.main(args=args, prog_name="persisting", standalone_mode=False, obj=debug)
        return exit_codes.OK
    except exit_codes.Ended as exc:
        return exc.code
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.say("stopped")
        return exit_codes.INTERRUPTED
    except Exception as exc:
        if debug:
            raise
        return _told(exc)


def _prepare_output() -> None:
    """JSON is UTF-8, whatever the machine's locale; on a terminal, what it cannot show is told."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="backslashreplace")
            else:
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _told(exc: Exception) -> int:
    """Say in one line what went wrong."""
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        exc.show()
        return exit_codes.USAGE
    if isinstance(exc, click.UsageError):
        asked = exc.ctx.command_path if exc.ctx else "persisting"
        _error(f"{exc.format_message()} See '{asked} --help'.")
        return exit_codes.USAGE
    if isinstance(exc, click.ClickException):
        _error(exc.format_message())
        return exc.exit_code
    if isinstance(exc, (StorageError, OSError)):
        _error(_one_line(exc))
        return exit_codes.code_of(exc)
    _error(f"{type(exc).__name__}: {_one_line(exc)}; this should not happen: see it with --debug")
    return exit_codes.FAILED


def _one_line(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror and not isinstance(exc, StorageError):
        where = f"{exc.filename}: " if exc.filename else ""
        return f"{where}{exc.strerror}"
    return " ".join(str(exc).split()) or type(exc).__name__


def _error(text: str) -> None:
    output.err().print("error:", style="bold red", end=" ")
    output.say(text)


class _Remarks:
    """Warnings of the library, each once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, message: Any, *_: Any, **__: Any) -> None:
        if str(message) not in self._said:
            self._said.add(str(message))
            output.say(f"warning: {message}")


def _quiet(debug: bool) -> None:
    """Warnings of the library as remarks of the command."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.ERROR, "error")
    log = logging.getLogger("persisting")
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if debug else logging.WARNING)


def _without_debug(args: list[str]) -> tuple[list[str], bool]:
    """``--debug`` counts wherever it stands."""
    end = args.index("--") if "--" in args else len(args)
    found = "--debug" in args[:end] or bool(os.environ.get("PERSISTING_DEBUG"))
    return [arg for at, arg in enumerate(args) if arg != "--debug" or at >= end], found
