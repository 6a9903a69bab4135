"""What people and programs get to see.

On a terminal: tables and colours. In a pipe: the same as plain text, never cut. With ``--json``:
the result itself.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

_FOLDED = 30
"""Longer cells are folded where a terminal is too narrow for them."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@cache
def out() -> Console:
    """Where results go."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


@cache
def err() -> Console:
    """Where everything else goes: progress, questions, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def show(result: Any, as_json: bool, tell: Callable[[], None]) -> None:
    """A result: as JSON, or told to a person."""
    if as_json:
        line(msgspec.json.format(encoded(result), indent=2).decode())
    else:
        tell()


def encoded(result: Any) -> bytes:
    """JSON: bytes as base64, moments as ISO 8601, decimals as text."""
    return msgspec.json.encode(result, enc_hook=str)


def json_line(result: Any) -> None:
    """One line of JSON, at once."""
    line(encoded(result).decode())


def line(text: str = "") -> None:
    """A line of output as it is, whatever it contains."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A remark, beside the output."""
    err().print(text, markup=False)


def heading(text: str) -> None:
    out().print(text, style="bold", markup=False)


def facts(pairs: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair a line."""
    known = [(name, shown(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        out().print(f"{name:<{width}}", end="  ", style="dim", markup=False)
        out().print(value, markup=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows under headings; a column whose name begins with ``#`` holds numbers."""
    cells = [[_text(cell) for cell in row] for row in rows]
    if not out().is_terminal or not _drawn(columns, cells):
        _plain(columns, cells)


def _plain(columns: Sequence[str], cells: list[list[str]]) -> None:
    names = [name.lstrip("#") for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in [names, *cells]:
        padded = (
            cell.rjust(width) if column.startswith("#") else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        )
        line("  ".join(padded).rstrip())


def _drawn(columns: Sequence[str], cells: list[list[str]]) -> bool:
    """Draw a table unless the terminal is too narrow; only long texts are folded."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names = [name.lstrip("#") for name in columns]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    if sum(min(width, _FOLDED) + 2 for width in widths) - 2 > out().width:
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
    out().print(drawn, soft_wrap=False)
    return True


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return shown(str(cell))


def shown(text: str) -> str:
    """Text from outside, with characters that would steer a terminal made visible."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def seconds(count: float) -> str:
    """A length of time as people read it."""
    if count < 1:
        return f"{count * 1000:.0f} ms"
    if count < 100:
        return f"{count:.1f} s"
    if count < 5400:
        return f"{count / 60:.0f} min"
    return f"{count / 3600:.1f} h" if count < 172800 else f"{count / 86400:.0f} days"


def moment(when: dt.datetime) -> str:
    """A moment in the time of this machine."""
    return when.astimezone().isoformat(sep=" ", timespec="milliseconds")


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def happens(count: int, one: str, done: str, *, dry_run: bool) -> str:
    """What is done to so many things, or would be."""
    verb = "would be" if dry_run else "is" if count == 1 else "are"
    return f"{plural(count, one)} {verb} {done}"
