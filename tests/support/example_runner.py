"""Run the programs in examples/ and benchmarks/ as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.doc_pages import ROOT

EXAMPLES = ROOT / "examples"


def run_example(name: str, *args: str, folder: Path | None = None, seconds: float = 280) -> str:
    """Run an example in ``folder``, with warnings as errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
