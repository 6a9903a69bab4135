"""Processes that stop at named points of their work, to be killed there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import TESTS
from support.waiting import until_true

HOLD = """
# The first process that reaches a point with a file takes the file and waits to be released.
import os, time

def hold(point):
    here = os.path.join(os.environ["HOLDS"], point)
    try:
        os.rename(here, f"{here}.{os.getpid()}")
    except FileNotFoundError:
        return
    while not os.path.exists(f"{here}.go"):
        time.sleep(0.02)

def held(module, name, before=None, after=None, when=lambda *args: True):
    call = getattr(module, name)
    def wrapped(*args, **kwargs):
        here = when(*args)
        if before is not None and here:
            hold(before(*args) if callable(before) else before)
        found = call(*args, **kwargs)
        if after is not None and here:
            hold(after)
        return found
    setattr(module, name, wrapped)
"""
"""Defines ``held(module, name, before, after, when)``, which makes points of the calls of a
function."""


class Points:
    """Named points of the work of Python programs. The first process that reaches an armed point
    waits there."""

    def __init__(self, folder: Path, code: str) -> None:
        """``code`` calls ``held``, see :data:`HOLD`; programs with :attr:`environment` run it."""
        self._folder = folder / "holds"
        self._folder.mkdir(exist_ok=True)
        (self._folder / "sitecustomize.py").write_text(HOLD + code)

    @property
    def environment(self) -> dict[str, str]:
        path = [str(self._folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), "HOLDS": str(self._folder)}

    def arm(self, point: str) -> None:
        for old in self._folder.glob(f"{point}*"):
            old.unlink()
        (self._folder / point).touch()

    def held_at(self, point: str) -> list[int]:
        """Return the pid of the process that is held at a point, if there is one."""
        suffixes = [path.suffix[1:] for path in self._folder.glob(f"{point}.*")]
        return [int(suffix) for suffix in suffixes if suffix.isdigit()]

    def let_go(self, point: str) -> None:
        (self._folder / f"{point}.go").touch()


class HeldProcess:
    """A program with points; it waits at the point ``hold``, if it is given. As a context manager
    it is killed at the end."""

    tries = 6000
    """How many times :meth:`until` polls, see :func:`until_true`."""

    def __init__(
        self,
        folder: Path,
        code: str,
        *args: object,
        points: str,
        hold: str = "",
        environ: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> None:
        self._points = Points(folder, points)
        if hold:
            self._points.arm(hold)
        self._output = folder / f"{hold or 'process'}.{time.time_ns()}.txt"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(folder), *map(str, args)],
                env={
                    **(os.environ if environ is None else environ),
                    **self._points.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=new_session,
            )

    def __enter__(self) -> HeldProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, true: Callable[[], Any]) -> None:
        """Wait for a condition; fail if the process ends before that."""

        def true_while_alive() -> bool:
            if true():
                return True
            assert self.process.poll() is None, self.output
            return False

        until_true(true_while_alive, lambda: self.output, self.tries)

    def is_held(self, point: str) -> bool:
        return bool(self._points.held_at(point))

    def until_held(self, point: str) -> int:
        """Wait until a process is held at a point; return its pid."""
        self.until(lambda: self._points.held_at(point))
        (pid,) = self._points.held_at(point)
        return pid

    def let_go(self, point: str) -> None:
        self._points.let_go(point)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Pause the process; return when it no longer runs."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    @property
    def acknowledged(self) -> int:
        """The last number that the process has printed, 0 if there is none."""
        lines = [line for line in self.output.splitlines() if line.isdigit()]
        return int(lines[-1]) if lines else 0


@contextmanager
def killed_at(process: HeldProcess, point: str) -> Iterator[None]:
    """Kill a process when it reaches a point, while the block runs."""

    def kill() -> None:
        process.until_held(point)
        process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()
