"""A bucket with every kind of file that verify() checks, and damage to its files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from persisting.queue import PersistingBackend


def text_rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"word {n}"} for n in range(first, first + count)]


@asynccontextmanager
async def indexed_bucket(folder: Path) -> AsyncIterator[PersistingBackend]:
    """A bucket with several fragments, a tag, an index, and a column widened after the tag."""
    async with PersistingBackend(0, str(folder), flush_interval=None) as backend:
        for n in range(3):
            await backend.put_batch(text_rows(n * 10, 10))
            await backend.flush()
        await backend.create_index("text")
        await backend.tag("x")
        await backend.put({"id": 0.5, "text": "wide"})
        await backend.flush()
        yield backend


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "data.lance" / "data").iterdir())


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
