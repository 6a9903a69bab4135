"""Shared objects that a test loads before the C library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def shared_object(source: Path, target: Path) -> Path:
    """Compile ``source`` to ``target`` unless it exists, with the machine's compiler or else
    with the one that ``make install`` takes from PyPI."""
    if not target.exists():
        found = shutil.which("cc")
        compiler = [found] if found else [sys.executable, "-m", "ziglang", "cc"]
        options = ["-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-ldl"]
        subprocess.run([*compiler, *options], check=True)
    return target
