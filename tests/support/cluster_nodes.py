"""Real processes on the loopback, each a node; every one of them is gone when the test is."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import TESTS

HERE = Path(__file__).parent
MARK = "PERSISTING_TEST_SESSION"
SESSION = uuid.uuid4().hex
READY_SECONDS = 60.0


def environment() -> dict[str, str]:
    """The children's environment: they find the tests' modules, and can be found by the mark."""
    path = str(TESTS)
    return {**os.environ, MARK: SESSION, "PYTHONPATH": path}


class Process:
    """A child whose output is read all the time; an unread pipe would stop it."""

    def __init__(self, *command: str, cwd: Path | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=cwd,
        )
        self._said: list[str] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._more:
                self._said.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    @property
    def output(self) -> str:
        with self._more:
            return "\n".join(self._said)

    def lines(self, word: str) -> list[str]:
        """What it said after ``word``, line by line."""
        with self._more:
            return [s.removeprefix(word).strip() for s in self._said if s.startswith(word)]

    def wait_for(self, word: str, count: int = 1, seconds: float = READY_SECONDS) -> list[str]:
        """The first ``count`` lines that begin with ``word``; fails with all it said."""
        deadline = time.monotonic() + seconds
        while len(found := self.lines(word)) < count:
            ended = self.popen.poll() is not None and not self._thread.is_alive()
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no {count} lines {word!r} from the child:\n{self.output}")
            with self._more:
                self._more.wait(0.1)
        return found[:count]

    async def hears(self, word: str, count: int = 1, seconds: float = READY_SECONDS) -> list[str]:
        """:meth:`wait_for` without stopping the event loop."""
        return await asyncio.to_thread(self.wait_for, word, count, seconds)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()

    async def ended(self, seconds: float = 30.0) -> int:
        """Its exit code."""
        try:
            return await asyncio.to_thread(self.popen.wait, seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the child does not end:\n{self.output}") from None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGCONT)
        self.kill()
        self._thread.join(10)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Node(Process):
    """A node of a cluster."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(str(HERE / "cluster_node.py"), *arguments)
        self.address = self.id = ""

    def ready(self) -> Node:
        self.address, self.id = self.wait_for("READY")[0].split()
        return self


class Cluster:
    """Some nodes that know each other; more can be started, killed and paused."""

    def __init__(self, passphrase: str | None = None) -> None:
        self.nodes: list[Node] = []
        self._others: list[Process] = []
        self._extra = ["--passphrase", passphrase] if passphrase else []

    def start(self, count: int = 1, *arguments: str) -> list[Node]:
        """Start nodes and wait until each is ready."""
        first = [] if self.nodes else [self._launch(*arguments).ready()]
        others = [self._launch(*arguments) for _ in range(count - len(first))]
        return [*first, *(node.ready() for node in others)]

    def _launch(self, *arguments: str) -> Node:
        seeds = ["--seeds", self.nodes[0].address] if self.nodes else []
        self.nodes.append(Node(*seeds, *self._extra, *arguments))
        return self.nodes[-1]

    def run(self, *command: str, cwd: Path | None = None) -> Process:
        """Another process, which ends with the cluster at the latest."""
        self._others.append(Process(*command, cwd=cwd))
        return self._others[-1]

    @property
    def seeds(self) -> list[str]:
        return [node.address for node in self.nodes if node.popen.poll() is None]

    def owner(self, stats: dict[str, Any]) -> Node:
        """The node that owns a bucket, from the bucket's statistics."""
        return next(node for node in self.nodes if node.id == stats["node"])

    def close(self) -> None:
        for process in [*self._others, *self.nodes]:
            process.close()


def left_over() -> Iterator[str]:
    """Command lines of processes of this test session that still live."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={SESSION}".encode() in (entry / "environ").read_bytes():
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
