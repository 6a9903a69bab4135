"""Prints results and messages.

A terminal gets tables and colours, a pipe the same as plain text that is never cut, and ``--json``
the result itself.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_FOLDED = 30
"""Cells longer than this are folded if the terminal is too narrow."""

_ANSI = {"bold": "1", "dim": "2", "cyan": "36", "green": "32", "error": "1;31"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_terminal(stream: IO[str]) -> bool:
    """Return whether people read the stream; a pipe gets plain text."""
    return stream.isatty()


def _styled(text: str, style: str, stream: IO[str]) -> str:
    """Return text with the escape codes of a style if the stream shows colours."""
    coloured = is_terminal(stream) and os.environ.get("TERM") != "dumb"
    if not coloured or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_ANSI[style]}m{text}\x1b[0m"


@cache
def _out() -> Console:
    """Return the console for tables."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


@cache
def err() -> Console:
    """Return the console for progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def show(result: Any, as_json: bool, print_text: Callable[[], None]) -> None:
    """Print a result as JSON, or as readable text."""
    if as_json:
        import msgspec

        line(msgspec.json.format(encoded(result), indent=2).decode())
    else:
        print_text()


def encoded(result: Any) -> bytes:
    """Encode as JSON: bytes as base64, times as ISO 8601, decimals as text."""
    import msgspec

    return msgspec.json.encode(result, enc_hook=str)


def json_line(result: Any) -> None:
    """Print one line of JSON immediately."""
    line(encoded(result).decode())


def line(text: str = "") -> None:
    """Print a line of output unchanged, whatever characters it contains."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def part(text: str, style: str) -> None:
    """Print the beginning of a line."""
    sys.stdout.write(f"{_styled(text, style, sys.stdout)}  ")


def say(text: str, label: str = "") -> None:
    """Print a message on the error output, after a label that a terminal highlights."""
    if sys.stderr is None:
        return
    if label:
        label = f"{_styled(label, 'error', sys.stderr)} "
    visible = _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    sys.stdout.flush()
    sys.stderr.write(f"{label}{visible}\n")
    sys.stderr.flush()


def heading(text: str) -> None:
    line(_styled(printable(text), "bold", sys.stdout))


def facts(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one pair per line."""
    known = [(name, printable(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        part(f"{name:<{width}}", "dim")
        line(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headings; a column whose name begins with ``#`` is right-aligned."""
    cells = [[_text(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout) or not _draw_table(columns, cells):
        _print_plain(columns, cells)


def _print_plain(columns: Sequence[str], cells: list[list[str]]) -> None:
    names = [name.lstrip("#") for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in [names, *cells]:
        padded = (
            cell.rjust(width) if column.startswith("#") else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        )
        line("  ".join(padded).rstrip())


def _draw_table(columns: Sequence[str], cells: list[list[str]]) -> bool:
    """Draw a table, folding only long texts; return False if the terminal is too narrow."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names = [name.lstrip("#") for name in columns]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    if sum(min(width, _FOLDED) + 2 for width in widths) - 2 > _out().width:
        return False
    drawn = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for column, name, width in zip(columns, names, widths, strict=True):
        justify: Any = "right" if column.startswith("#") else "left"
        drawn.add_column(name, justify=justify, overflow="fold", no_wrap=width <= _FOLDED)
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    _out().print(drawn, soft_wrap=False)
    return True


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return printable(str(cell))


def printable(text: str) -> str:
    """Escape control characters in stored text, so that it cannot control the terminal."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def seconds(count: float) -> str:
    """Format a duration as readable text."""
    if count < 1:
        return f"{count * 1000:.0f} ms"
    if count < 100:
        return f"{count:.1f} s"
    if count < 5400:
        return f"{count / 60:.0f} min"
    return f"{count / 3600:.1f} h" if count < 172800 else f"{count / 86400:.0f} days"


def local_time(when: dt.datetime) -> str:
    """Format a timestamp in the time zone of this machine."""
    return when.astimezone().isoformat(sep=" ", timespec="milliseconds")


def plural(count: int, singular: str, plural: str | None = None) -> str:
    """Format a count with its noun."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def outcome(count: int, noun: str, participle: str, *, dry_run: bool) -> str:
    """Say how many things were changed, or would be changed."""
    return f"{plural(count, noun)} {'would be ' if dry_run else ''}{participle}"
