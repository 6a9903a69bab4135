"""Real processes on the loopback, each a node; all of them end with the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import TESTS

HERE = Path(__file__).parent
MARK = "PERSISTING_TEST_SESSION"
"""The environment variable that marks processes of this test session."""
SESSION = uuid.uuid4().hex
READY_SECONDS = 120.0


def environment() -> dict[str, str]:
    """Return an environment in which children find the test modules and carry the mark."""
    paths = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    return {**os.environ, MARK: SESSION, "PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A child process whose output is read continuously: a full pipe would block it."""

    def __init__(
        self,
        *command: str,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``variables`` are added to the environment; ``prefix`` is a command that runs Python."""
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment(), **(variables or {})},
            cwd=cwd,
        )
        self._lines: list[str] = []
        self._rest = ""
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._more:
                if line.endswith("\n"):
                    self._lines.append(line.removesuffix("\n"))
                else:  # it was killed while it wrote the line
                    self._rest = line
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    @property
    def output(self) -> str:
        with self._more:
            return "\n".join([*self._lines, self._rest])

    def lines(self, word: str) -> list[str]:
        """Return the whole lines so far that begin with ``word``, without it."""
        with self._more:
            return [s.removeprefix(word).strip() for s in self._lines if s.startswith(word)]

    def wait_for(self, word: str, count: int = 1, seconds: float = READY_SECONDS) -> list[str]:
        """Wait for ``count`` lines that begin with ``word``; fail with the whole output."""
        deadline = time.monotonic() + seconds
        while len(found := self.lines(word)) < count:
            ended = self.popen.poll() is not None and not self._thread.is_alive()
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"the child did not print {count} lines {word!r}:\n{self.output}"
                )
            with self._more:
                self._more.wait(0.1)
        return found[:count]

    async def await_lines(
        self, word: str, count: int = 1, seconds: float = READY_SECONDS
    ) -> list[str]:
        """:meth:`wait_for` without blocking the event loop."""
        return await asyncio.to_thread(self.wait_for, word, count, seconds)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()

    async def ended(self, seconds: float = READY_SECONDS) -> int:
        """Wait for the exit code, and for all that the process has printed."""
        try:
            code = await asyncio.to_thread(self.popen.wait, seconds)
            await asyncio.to_thread(self._thread.join, 10)
            return code
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the child did not exit within {seconds:g} s:\n{self.output}"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGCONT)
        self.kill()
        self._thread.join(10)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Node(Process):
    """A node of a cluster."""

    def __init__(self, *arguments: str, **how: Any) -> None:
        super().__init__(str(HERE / "cluster_node.py"), *arguments, **how)
        self.address = self.id = ""

    def ready(self) -> Node:
        self.address, self.id = self.wait_for("READY")[0].split()
        return self


class Cluster:
    """Nodes of one cluster; the test starts, kills and pauses them."""

    def __init__(
        self, passphrase: str | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """``variables`` are added to the environment of the nodes."""
        self.variables = dict(variables or {})
        self.nodes: list[Node] = []
        self._others: list[Process] = []
        self._extra = ["--passphrase", passphrase] if passphrase else []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, count: int = 1, *arguments: str) -> list[Node]:
        """Start nodes and wait until each is ready."""
        first = [] if self.nodes else [self._launch(*arguments).ready()]
        others = [self._launch(*arguments) for _ in range(count - len(first))]
        return [*first, *(node.ready() for node in others)]

    def _launch(self, *arguments: str) -> Node:
        seeds = ["--seeds", self.nodes[0].address] if self.nodes else []
        self.nodes.append(Node(*seeds, *self._extra, *arguments, variables=self.variables))
        return self.nodes[-1]

    def run(self, *command: str, cwd: Path | None = None) -> Process:
        """Start another process, which ends with the cluster at the latest."""
        self._others.append(Process(*command, cwd=cwd))
        return self._others[-1]

    @property
    def seeds(self) -> list[str]:
        return [node.address for node in self.nodes if node.popen.poll() is None]

    def owner(self, stats: dict[str, Any]) -> Node:
        """Return the node that owns a bucket, given the bucket's stats."""
        return next(node for node in self.nodes if node.id == stats["node"])

    def close(self) -> None:
        for process in [*self._others, *self.nodes]:
            process.close()


def surviving_processes() -> Iterator[str]:
    """Yield the command lines of processes of this test session that still run."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={SESSION}".encode() in (entry / "environ").read_bytes():
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
