"""Runs the console as a process and asks it over HTTP."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Console:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def server_ms(self, path: str) -> float:
        """Ask for a page; return the milliseconds that the server took to answer."""
        return self.ask(path)[0]

    def ask(self, path: str) -> tuple[float, str]:
        """Ask for a page; return the milliseconds that the server took, and the page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            text = reply.read().decode()
            if reply.status != 200:
                raise RuntimeError(f"{path} was answered with {reply.status}")
            return float(reply.headers["Server-Timing"].rpartition("=")[2]), text
        finally:
            connection.close()

    def resident_mb(self) -> float:
        """Return the memory of the console and of the processes that it has started."""
        if self.process.poll() is not None:
            raise RuntimeError("the console has ended")
        return sum(map(_resident_mb, [self.process.pid, *_children(self.process.pid)]))


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def _resident_mb(pid: int) -> float:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/status").read_text().splitlines():
            if entry.startswith("VmRSS:"):
                return int(entry.split()[1]) / 1024
    return 0.0


@contextmanager
def running(storage: Path) -> Iterator[Console]:
    process = subprocess.Popen(
        [sys.executable, "-m", "persisting.cli", "ui", "-s", str(storage), "-p", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        yield Console(process, int(address.rstrip("/").rpartition(":")[2]))
    finally:
        process.terminate()
        process.wait(30)
