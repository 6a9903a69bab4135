"""Child processes that use the library."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


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


def tell(child: subprocess.Popen[str], line: str) -> None:
    """Send a line to a child, and wait until it prints "done"."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    assert wait_for_line(child) == "done"


def interrupt(child: subprocess.Popen[Any], number: int = signal.SIGINT) -> tuple[Any, Any]:
    """Send a signal until the child ends; return what it has printed.

    A signal that arrives right before Python begins to wait is noted, but does not end the wait: on
    a busy machine that happens.
    """
    for _ in range(4):
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=60)
    raise AssertionError("the child does not end")


def run(code: str, *args: object) -> str:
    """Return what ``code`` prints; fail if it exits with an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
