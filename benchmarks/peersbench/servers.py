"""Starts and stops the server of a system for one measurement."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PATIENCE = 20.0


def find(program: str, *further: Path) -> str | None:
    """Return the program from PATH, from the folder of this Python, or from ``further``."""
    for place in (shutil.which(program), Path(sys.executable).with_name(program), *further):
        if place is not None and Path(place).is_file():
            return str(place)
    return None


def version(program: str | None) -> str:
    if program is None:
        return ""
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


class Server:
    """A process that is ready when ``answers`` no longer raises ``OSError``."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        answers: Callable[[], object],
        *,
        user: str | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it in ``folder``, as ``user`` if given: some servers refuse to run as root."""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                user=user,
                group=user,
                cwd=folder,
            )
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                answers()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until:
                    self.stop()
                    raise SystemExit(f"{command[0]} did not start: {log.read_text()}") from None
                time.sleep(0.01)

    def stop(self, ending: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(ending)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
