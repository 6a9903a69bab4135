"""A line of a terminal that shows what a job is doing, and is overwritten."""

from __future__ import annotations

import sys
from typing import IO


class StatusLine:
    """Shows one line at a time; the block's end erases it.

    ``quiet`` None means: unless ``out`` (stderr) is a terminal.
    """

    def __init__(self, quiet: bool | None = None, out: IO[str] | None = None) -> None:
        out = sys.stderr if out is None else out
        self._out = None if (not out.isatty() if quiet is None else quiet) else out

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("")

    def show(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
