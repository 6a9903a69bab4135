"""The root command: its sections, and how errors become messages and exit codes."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from persisting.cli import exit_codes, output
from persisting.cli.command_group import CommandGroup
from persisting.cli.command_list import SECTIONS, all_commands
from persisting.errors import StorageError


class _SectionedGroup(CommandGroup):
    """A group whose help lists the commands by section."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # click would exit with 1, and Python would complain at exit that it cannot flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise exit_codes.CommandExit(exit_codes.BROKEN_PIPE) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, entries in SECTIONS.items():
            rows = [(name, entry.summary) for name, entry in entries.items()]
            self.write_section(formatter, title, rows)


@click.group(
    cls=_SectionedGroup,
    commands=all_commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="persisting", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Inspect, fill, search and maintain durable queues.

    \b
    Examples:
      persisting topics                               list the topics in ./queue_storage
      persisting tail events -f                       follow a topic while it is written
      persisting put events < events.jsonl            store JSON lines durably and count them
      persisting search notes --text "lost update"    find the records that match the words best
      persisting verify events                        compare every file with its checksum

    Commands that only read take no lock and do not disturb the owner of a topic. Ctrl-C stops any
    command; work that it has reported as done stays done. Exit codes: 0 success, 1 failure, 2 wrong
    usage, 3 no such topic, 4 topic is open for writing in another process, 5 damage found, 130
    interrupted.
    """


def run(argv: Sequence[str]) -> int:
    """Run a command line and return the exit code."""
    args, debug = _split_debug(list(argv))
    _prepare_output()
    _configure_logging(debug)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _WarningPrinter()
            cli.main(args=args, prog_name="persisting", standalone_mode=False, obj=debug)
        return exit_codes.OK
    except exit_codes.CommandExit as exc:
        return exc.code
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        # The exit of the interpreter flushes backends that are still open. Another Ctrl-C must
        # neither cut that short nor replace the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        output.say("stopped")
        return exit_codes.INTERRUPTED
    except Exception as exc:
        if debug:
            raise
        return _report(exc)


def _prepare_output() -> None:
    """Write UTF-8 to pipes whatever the locale; escape what a terminal cannot show."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="backslashreplace")
            else:
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _report(exc: Exception) -> int:
    """Print an error on one line and return its exit code."""
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        exc.show()
        return exit_codes.USAGE
    if isinstance(exc, click.UsageError):
        command = exc.ctx.command_path if exc.ctx else "persisting"
        message = exc.format_message()
        stop = "" if message.endswith((".", "?")) else "."
        _error(f"{message}{stop} See '{command} --help'.")
        return exit_codes.USAGE
    if isinstance(exc, click.ClickException):
        _error(exc.format_message())
        return exc.exit_code
    if isinstance(exc, (StorageError, OSError)):
        _error(_one_line(exc))
        return exit_codes.code_of(exc)
    _error(
        f"{type(exc).__name__}: {_one_line(exc)}; this should not happen: run the command with "
        "--debug to see the traceback"
    )
    return exit_codes.FAILED


def _one_line(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror and not isinstance(exc, StorageError):
        where = f"{exc.filename}: " if exc.filename else ""
        return f"{where}{exc.strerror}"
    return " ".join(str(exc).split()) or type(exc).__name__


def _error(text: str) -> None:
    output.say(text, label="error:")


class _WarningPrinter:
    """Prints each warning of the library once."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def __call__(self, message: Any, *_: Any, **__: Any) -> None:
        if str(message) not in self._printed:
            self._printed.add(str(message))
            output.say(f"warning: {message}")


def _configure_logging(debug: bool) -> None:
    """Print log messages of the library in the style of the command's own messages."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.ERROR, "error")
    log = logging.getLogger("persisting")
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if debug else logging.WARNING)


def _split_debug(args: list[str]) -> tuple[list[str], bool]:
    """Take ``--debug``, which may stand anywhere, out of the arguments."""
    end = args.index("--") if "--" in args else len(args)
    debug = "--debug" in args[:end] or bool(os.environ.get("PERSISTING_DEBUG"))
    return [arg for at, arg in enumerate(args) if arg != "--debug" or at >= end], debug
