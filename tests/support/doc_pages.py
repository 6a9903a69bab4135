"""Read the fenced blocks and tables of the documentation pages."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page where it starts."""

    language: str
    text: str
    line: int


def english_pages() -> list[Path]:
    return sorted(page for page in DOCS.rglob("*.md") if not page.name.endswith(".zh.md"))


def chinese(page: Path) -> Path:
    return page.with_name(page.name.removesuffix(".md") + ".zh.md")


def both(name: str) -> list[Path]:
    """Return a page in both languages, given its path below docs/."""
    return [DOCS / name, chinese(DOCS / name)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def tables(page: Path) -> list[list[list[str]]]:
    """Return the tables of a page as rows of cells: the header first, without the ruler."""
    found: list[list[list[str]]] = []
    inside = False
    for line in _FENCE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not inside:
            found.append([])
            inside = True
        if not all(set(cell) <= set("-: ") and cell for cell in cells):
            found[-1].append(cells)
    return found


def code(cell: str) -> str:
    """Return the text in the first backticks of a cell."""
    match = re.search(r"`([^`]+)`", cell)
    return match[1] if match else ""


def table_with(page: Path, *names: str) -> list[list[str]]:
    """Return the rows of the table whose first column has all these names in backticks."""
    for table in tables(page):
        first = {code(row[0]) for row in table}
        if set(names) <= first:
            return table[1:]
    raise AssertionError(f"{page} has no table with {names} in its first column")


def option_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of an option class by field; MISSING for required fields."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(kind)
    }
