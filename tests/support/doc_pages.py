"""The pages of the documentation, taken apart: fenced blocks and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which it begins."""

    language: str
    text: str
    line: int


def english_pages() -> list[Path]:
    return sorted(page for page in DOCS.rglob("*.md") if not page.name.endswith(".zh.md"))


def chinese(page: Path) -> Path:
    return page.with_name(page.name.removesuffix(".md") + ".zh.md")


def both(name: str) -> list[Path]:
    """A page in both languages, by its path below docs/."""
    return [DOCS / name, chinese(DOCS / name)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the header first, the rule left out."""
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
    """What stands in the first backticks of a cell."""
    match = re.search(r"`([^`]+)`", cell)
    return match[1] if match else ""


def table_with(page: Path, *names: str) -> list[list[str]]:
    """The table, without its header, whose first column holds all these names in backticks."""
    for table in tables(page):
        first = {code(row[0]) for row in table}
        if set(names) <= first:
            return table[1:]
    raise AssertionError(f"{page} has no table with {names} in its first column")
