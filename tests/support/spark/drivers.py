"""Drivers of Spark in processes of their own, to be killed at named points of their work."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.handover import POINTS as HANDOVER_POINTS
from support.held_process import HeldProcess
from support.spark.processes import plain_environment

POINTS = """
from persisting.bucket import bulk_import
from persisting.table import bulk_write

held(bulk_import, "adopt", before=lambda bucket, *args: f"commit{bucket.options.bucket_id}")
held(bulk_write, "write_files", after="written")
"""


class Driver(HeldProcess):
    """A program with its own session: the driver, its Java, and all their Python workers."""

    tries = 30_000  # Spark takes minutes to start on a machine that is overloaded

    def finish(self) -> None:
        assert self.process.wait(1200) == 0, self.output
        assert self.output.endswith("done\n"), self.output

    def kill(self) -> None:
        """Kill all its processes; the files that they had open are closed when this returns."""
        end([pid for pid in _processes() if _session(pid) == self.process.pid])
        self.process.wait()

    def kill_alone(self) -> None:
        """Kill the driver and its Java; Python workers, which are in other groups, keep running."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def driver(
    folder: Path, code: str, *args: object, hold: str = "", **environ: str
) -> Iterator[Driver]:
    made = Driver(
        folder,
        code,
        *args,
        points=POINTS + HANDOVER_POINTS,
        hold=hold,
        environ={**plain_environment(), **environ},
        new_session=True,
    )
    try:
        yield made
    finally:
        made.kill()


def end(pids: list[int]) -> None:
    """Kill processes and wait until all their threads have ended."""
    watched = []
    for pid in pids:
        with suppress(ProcessLookupError):
            watched.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
    for handle in watched:
        select.select([handle], [], [], 30)
        os.close(handle)


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
