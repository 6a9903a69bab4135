"""Lance is imported lazily, possibly by two threads at the same time."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import persisting

SOURCE = Path(persisting.__file__).parent


def test_every_lazy_import_of_lance_imports_the_package_first() -> None:
    """Python resolves the deadlock of two such threads with a partially initialized module."""
    for path in SOURCE.rglob("*.py"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for before, line in itertools.pairwise(lines):
            if line.startswith(("from lance.", "import lance.")):
                assert before in ("import lance", "from lance import LanceOperation"), path


def test_a_first_flush_and_a_first_search_can_run_concurrently(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from persisting.queue import PersistingBackend

async def main():
    backend = PersistingBackend(0, sys.argv[1], enable_wal=True)
    await backend.put({"i": 1})
    await asyncio.gather(backend.flush(), backend.lookup("i", 1), backend.lookup("i", 2))
    await backend.close()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "b")], check=True, timeout=60)
