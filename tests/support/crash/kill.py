"""Run a process that works on a bucket and kill it with SIGKILL at a random time."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import TESTS

PROGRAM = TESTS / "support" / "crash" / "writer_process.py"
LOG: dict[str, Any] = {"enable_wal": True, "flush_interval": None}


class Mode(NamedTuple):
    """What a process does, and the options of its backend."""

    name: str
    options: dict[str, Any]


class Killed(NamedTuple):
    """What a process printed before it was killed."""

    lines: list[str]
    status: int
    errors: str


def run_and_kill(
    folder: Path, number: int, mode: Mode, rng: random.Random, *, after_lines: int, delay: float
) -> Killed:
    """Kill a process up to ``delay`` seconds after it has printed ``after_lines`` lines."""
    child = subprocess.Popen(
        [
            sys.executable,
            str(PROGRAM),
            str(folder),
            str(number),
            mode.name,
            json.dumps(mode.options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    lines: list[bytes] = []
    enough = threading.Event()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if len(lines) >= after_lines:
                enough.set()
        enough.set()

    reader = threading.Thread(target=read)
    reader.start()
    enough.wait(60)
    time.sleep(rng.uniform(0, delay))
    child.send_signal(signal.SIGKILL)
    assert child.stderr is not None
    errors = child.stderr.read().decode()
    child.wait()
    reader.join()
    child.stdout.close()  # type: ignore[union-attr]
    child.stderr.close()
    whole = [line.decode().removesuffix("\n") for line in lines if line.endswith(b"\n")]
    return Killed(whole, child.returncode, errors)
