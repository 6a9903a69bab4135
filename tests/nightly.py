"""Run the long tests in one go: ``make nightly``.

First every test marked ``nightly``, then all tests with torch, in an environment of their own, then
the torture program with a new seed. A part that fails does not stop the others. The summary says
how long each part took and which failed; the exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
_TEST_SECONDS = 1800
"""The longest test takes minutes on a quiet machine. A test may have a limit of its own."""

TORTURE = ("topic", "bucket", "cluster", "shared", "soak", "store", "spark")


class Part(NamedTuple):
    name: str
    command: list[str]


class Result(NamedTuple):
    name: str
    status: int
    seconds: float


def parts(workers: str, seconds: int, seed: int | None) -> list[Part]:
    """Return what a night consists of; torture runs ``seconds`` for each of its parts."""
    pytest = [sys.executable, "-m", "pytest", "-n", workers, "--no-loadscope-reorder"]
    pytest += ["-v", f"--timeout={_TEST_SECONDS}"]  # a failed test is named immediately
    torture = [sys.executable, "-m", "torture", "--seconds", str(seconds)]
    if seed is not None:
        torture += ["--seed", str(seed)]
    return [
        Part("nightly tests", [*pytest, "-m", "nightly"]),
        Part("torch tests", ["make", "test-torch", "PYTEST_ARGS=-m 'nightly or not nightly'"]),
        *(Part(f"torture {name}", [*torture, "--only", name]) for name in TORTURE),
    ]


def run(part: Part) -> int:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(part.command, cwd=TESTS.parent, env=environment, check=False).returncode


def run_all(chosen: list[Part], run_part: Callable[[Part], int] = run) -> list[Result]:
    results = []
    for part in chosen:
        print(f"== {part.name}: {' '.join(part.command[1:])}", flush=True)
        started = time.monotonic()
        status = run_part(part)
        results.append(Result(part.name, status, time.monotonic() - started))
    return results


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def summary(results: list[Result]) -> str:
    failed = [result.name for result in results if result.status]
    lines = [
        f"{result.name:16} {duration(result.seconds):>8}  "
        + (f"FAILED (exit status {result.status})" if result.status else "passed")
        for result in results
    ]
    total = duration(sum(result.seconds for result in results))
    lines.append(f"{'all':16} {total:>8}  {'FAILED: ' + ', '.join(failed) if failed else 'passed'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="nightly", description="Run the long tests in one go.")
    parser.add_argument("--workers", default="2", help="pytest processes (default: 2)")
    parser.add_argument(
        "--torture-seconds",
        type=int,
        default=300,
        help="length of each part of the torture program (default: 300)",
    )
    parser.add_argument("--seed", type=int, help="seed of the torture program (default: random)")
    parser.add_argument(
        "--only", action="append", metavar="PART", help="run this part; may be repeated"
    )
    given = parser.parse_args()
    available = parts(given.workers, given.torture_seconds, given.seed)
    names = [part.name for part in available]
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [part for part in available if not given.only or part.name in given.only]
    results = run_all(chosen)
    print(f"\n{summary(results)}", flush=True)
    return int(any(result.status for result in results))


if __name__ == "__main__":
    sys.exit(main())
