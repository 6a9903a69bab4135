"""Child processes that use the library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def python(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run ``code`` with ``args`` in a new interpreter; kill it at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for_line(child: subprocess.Popen[str]) -> str:
    """Return the next line that the child prints; fail with its stderr if it has ended."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        child.wait()
        assert child.stderr is not None
        raise AssertionError(f"the child ended: {child.stderr.read()}")
    return line.strip()


def run(code: str, *args: object) -> str:
    """Return what ``code`` prints; fail if it exits with an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
