"""Another process that owns buckets of topics and does what a test tells it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

CODE = """
import asyncio, json, os, resource, sys, time
from persisting.queue import read_queue, write_queue

async def main():
    writers = {}
    for line in sys.stdin:
        word, name, args = json.loads(line)
        try:
            if word == "own":
                writers[name] = await write_queue(**args)
                result = (await writers[name].stats())["total_count"]
            elif word == "open":
                writers[name] = await write_queue(**args)
                result = None
            elif word == "open_here":
                result = await writers[name]._topic._handle.open_bucket(args)
            elif word == "limit":
                most = args if args else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
                result = None
            elif word == "exit":
                os._exit(0)
            elif word == "fork":
                result = os.fork()
                if not result:
                    time.sleep(args)
                    os._exit(0)
            elif word == "close":
                if name in writers:
                    await writers.pop(name).close()
                result = None
            else:
                result = await getattr(writers[name], word)(*args)
            print(json.dumps(["done", result], default=str), flush=True)
        except Exception as exc:
            print(json.dumps(["failed", f"{type(exc).__name__}: {exc}"]), flush=True)

asyncio.run(main())
"""


class OwnerProcess:
    """A child that opens topics and calls the methods of their writers."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def tell(self, word: str, name: str = "t", args: Any = ()) -> Any:
        """Have the child do something; return its result. Blocking."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([word, name, args]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise AssertionError("the owner has ended")
        status, result = json.loads(line)
        if status == "failed":
            raise AssertionError(f"the owner failed: {result}")
        return result

    async def ask(self, word: str, name: str = "t", args: Any = ()) -> Any:
        """Like :meth:`tell`, but without blocking the event loop."""
        return await asyncio.to_thread(self.tell, word, name, args)

    async def own(self, folder: Path, topic: str = "t", **options: Any) -> Any:
        """Have the child open every bucket of a topic."""
        args = {"topic": topic, "storage_path": str(folder), **options}
        return await self.ask("own", topic, args)

    def __enter__(self) -> OwnerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stop(self) -> None:
        """Pause the child; return when it no longer runs."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def close(self) -> None:
        """End the child, whatever it does."""
        self._child.kill()
        self._child.communicate()
