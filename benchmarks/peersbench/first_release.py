"""The first public release, ``persisting`` 0.3.0 on PyPI, in its own folder and child process.

It has the same package name, so one process cannot import both. This module is the parent's side;
run as a program it is the child, which has 0.3.0 first on its path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from peersbench import workload
from peersbench.async_store import AsyncStore
from peersbench.peer import Peer
from peersbench.record_kinds import KINDS, Kind, Record

_VERSION = "0.3.0"
_PACKAGE = Path(sys.prefix) / f"persisting-{_VERSION}"
_BENCHMARKS = Path(__file__).parents[1]


class FirstReleaseStore(AsyncStore):
    """Its backend with default options. It has no log, so each put is followed by a flush."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        super().__init__()
        self._folder = folder
        self._backend: Any = self.run(self._opened())

    async def _opened(self) -> Any:
        from persisting.queue import PersistingBackend

        return PersistingBackend(bucket_id=0, storage_path=str(self._folder / "b"))

    async def put(self, row: Record) -> None:
        await self._backend.put(row)
        await self._backend.flush()

    async def put_batch(self, rows: list[Record]) -> None:
        await self._backend.put_batch(rows)

    async def finish(self) -> None:
        await self._backend.flush()

    def prepare_read(self) -> None:
        self._backend = self.run(self._opened())

    def drain(self) -> list[Record]:
        count = self._backend.total_count()
        found: list[Record] = self.run(self._backend.get(limit=count, offset=0))
        return found


def _measured(
    folder: Path, kind: Kind, name: str, rows: list[Record], seconds: float
) -> dict[str, float]:
    """Measure in a child, which generates the same rows."""
    arguments = [str(folder), kind.name, name, str(len(rows)), str(seconds)]
    path = os.pathsep.join((str(_PACKAGE), str(_BENCHMARKS)))
    done = subprocess.run(
        [sys.executable, "-m", "peersbench.first_release", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"persisting {_VERSION} failed: {done.stdout}{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _missing() -> str | None:
    """Install it if it is missing; return why that failed."""
    if _PACKAGE.is_dir():
        return None
    draft = _PACKAGE.with_name(_PACKAGE.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    command += ["--no-deps", "--target", str(draft), f"persisting=={_VERSION}"]
    print(f"installing persisting {_VERSION} into {_PACKAGE}", flush=True)
    if subprocess.run(command, capture_output=True, check=False).returncode:
        shutil.rmtree(draft, ignore_errors=True)
        return f"persisting {_VERSION} cannot be installed from PyPI"
    shutil.rmtree(draft / "bin", ignore_errors=True)  # its programs are not used
    draft.rename(_PACKAGE)
    return None


def _child() -> None:
    import persisting

    assert persisting.__version__ == _VERSION
    folder, kind, name, count, seconds = sys.argv[1:]
    rows = KINDS[kind].rows(int(count))
    found = workload.measure(
        FirstReleaseStore, Path(folder), KINDS[kind], name, rows, float(seconds)
    )
    print(json.dumps(found))


PEER = Peer(
    f"{_VERSION} of PyPI",
    "not synced",
    _measured,
    _missing,
    lambda: f"persisting {_VERSION}",
)

if __name__ == "__main__":
    _child()
