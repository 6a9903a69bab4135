"""Workers in processes of their own, which start together."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workbench.crowd import WORKERS, Crowd


async def connect(module: str, address: str, workers: int) -> Any:
    """Return the connected workers of a system."""
    return await importlib.import_module(f"workbench.{module}").connect(address, workers)


def run(module: str, address: str, count: int, seconds: float) -> list[Crowd]:
    """Let 64 workers of ``count`` processes finish what there is."""
    command = [sys.executable, "-m", __spec__.name, module, address]
    command += [str(WORKERS // count), str(seconds)]
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(Path(__file__).parents[1]), *given])
    environment = {**os.environ, "PYTHONPATH": path}
    children = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(count)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "READY\n":
                raise SystemExit("a process of the benchmark did not start")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        crowds = []
        for child in children:
            assert child.stdout is not None
            crowd = Crowd(WORKERS // count, 0.0)
            crowd.seconds, crowd.finished, crowd.claimed = json.loads(child.stdout.readline())
            crowds.append(crowd)
        return crowds
    finally:
        for child in children:
            child.communicate(timeout=60)


async def _child(module: str, address: str, workers: int, seconds: float) -> None:
    connected = await connect(module, address, workers)
    try:
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        crowd = Crowd(workers, seconds)
        await connected.work(crowd)
    finally:
        await connected.close()
    print(json.dumps([crowd.seconds, crowd.finished, crowd.claimed]), flush=True)


if __name__ == "__main__":
    name, place, number, limit = sys.argv[1:]
    asyncio.run(_child(name, place, int(number), float(limit)))
