"""Run the Python snippets of a page one after another, as a reader would.

``print(...)  # text`` must print that text. Comment lines directly below a ``print`` are the output
of its calls, one line each.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from support.doc_pages import Block


class Page:
    """Runs the snippets of one page, which share their names and their event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._lines: dict[int, str] = {}
        self._printed: dict[int, list[str]] = {}
        self._names: dict[str, Any] = {"__name__": "__main__", "print": self._print}

    def run(self, block: Block) -> None:
        # Leading blank lines make a traceback name the line of the page.
        source = "\n" * (block.line - 1) + block.text
        self._lines = dict(enumerate(source.splitlines(), 1))
        self._printed = {}
        code = compile(source, str(self._path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            self._loop.run_until_complete(types.FunctionType(code, self._names)())
        else:
            exec(code, self._names)  # noqa: S102 - our own pages
        for line, texts in self._printed.items():
            self._compare(line, texts)

    def close(self) -> None:
        for value in list(self._names.values()):
            if hasattr(value, "total_count") and not isinstance(value, type):
                self._loop.run_until_complete(value.close())
        self._loop.close()

    def _print(self, *values: Any) -> None:
        line = sys._getframe(1).f_lineno
        self._printed.setdefault(line, []).append(" ".join(map(str, values)))

    def _compare(self, line: int, texts: list[str]) -> None:
        _, mark, comment = self._lines[line].partition("  # ")
        if mark:
            assert texts == [comment], f"{self._path}:{line} prints {texts}"
            return
        expected = []
        below = line + 1
        while self._lines.get(below, "").startswith("# "):
            expected.append(self._lines[below][2:])
            below += 1
        if expected:
            assert texts == expected, f"{self._path}:{line} prints {texts}"
