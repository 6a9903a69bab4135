"""Four processes that share a topic by its socket, killed, paused, closed and restarted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.crash.checks import PromiseBroken

from persisting.queue import read_queue

PROCESSES = 4
BUCKETS = 3
PATIENCE = 120.0
"""Seconds in which a process must store its first records, and in which it must end."""

WORKER = """
import asyncio, faulthandler, random, signal, sys
from persisting.queue import write_queue

folder, name, seed, buckets = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)

async def main():
    writer = await write_queue(topic="t", storage_path=folder, num_buckets=buckets,
        bucket_column="key", backend="persisting",
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0})
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), stop.set)
    faulthandler.register(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR2, lambda: [t.print_stack() for t in asyncio.all_tasks()])
    number = 0
    while not stop.is_set():
        count = chance.choice([1, 1, 1, 5, 200])
        rows = [{"key": chance.randrange(50), "writer": name, "n": number + i}
                for i in range(count)]
        await writer.put(rows[0] if count == 1 else rows)
        number += count
        print(number, flush=True)
        if chance.random() < 0.01:
            await writer.flush()
    await writer.close()

asyncio.run(main())
"""


class _Worker:
    """A process that puts numbered records until it is told to stop."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.name = name
        self._printed = folder / f"{name}.acknowledged"
        self._errors = folder / f"{name}.errors"
        with self._printed.open("wb") as out, self._errors.open("wb") as errors:
            self.child = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(folder), name, str(seed), str(BUCKETS)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
            )
        self.was_killed = False

    @property
    def acknowledged(self) -> int:
        """How many records the process was told are stored."""
        lines = self._printed.read_bytes().split(b"\n")[:-1]
        return int(lines[-1]) if lines else 0

    def kill(self) -> None:
        self.was_killed = True
        self.child.kill()
        self.child.wait()
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):
            self.child.stdin.close()

    def close(self) -> None:
        """Let the process end its last put and close the topic."""
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):
            self.child.stdin.write(b"\n")
            self.child.stdin.close()

    def check_exit(self, seconds: float = PATIENCE) -> None:
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise PromiseBroken(f"{self.name} does not end") from None
        if code and not self.was_killed:
            raise PromiseBroken(f"{self.name} failed")

    def report(self) -> str:
        """Return what the process wrote about errors; of a running one also its stacks."""
        if self.child.poll() is None:
            for dump in (signal.SIGUSR1, signal.SIGUSR2):
                self.child.send_signal(dump)
                time.sleep(0.5)
        written = self._errors.read_text()[-12000:]
        return f"{self.name}, process {self.child.pid}: {written}" if written else ""


async def torture(seed: int, seconds: float, tally: Counter[str]) -> None:
    """Torture one topic for a while, then check what it holds."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="torture-socket-") as folder:
        await _run(Path(folder), chance, seconds, tally)


async def _run(folder: Path, chance: random.Random, seconds: float, tally: Counter[str]) -> None:
    every: list[_Worker] = []

    def started() -> _Worker:
        every.append(_Worker(folder, f"w{len(every)}", chance.randrange(1 << 30)))
        return every[-1]

    workers = [started() for _ in range(PROCESSES)]
    begun = time.monotonic()
    try:
        while not all(worker.acknowledged for worker in workers):
            if time.monotonic() > begun + PATIENCE:
                raise PromiseBroken("not all processes store records")
            await asyncio.sleep(0.05)
        # Half of the time is left for faults, however long the processes took to start.
        deadline = max(begun + seconds, time.monotonic() + seconds / 2)
        while time.monotonic() < deadline:
            await asyncio.sleep(chance.uniform(0.1, 1.5))
            victim = chance.randrange(PROCESSES)
            worker = workers[victim]
            if worker.child.poll() is not None:
                worker.check_exit()
            fault = chance.choice(["kill", "kill", "pause", "pause", "close"])
            tally[f"{fault}s"] += 1
            if fault == "pause":
                os.kill(worker.child.pid, signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(0.05, 2.0))
                os.kill(worker.child.pid, signal.SIGCONT)
            else:
                if fault == "kill":
                    worker.kill()
                else:
                    worker.close()
                workers[victim] = started()
        for worker in workers:
            worker.close()
        for worker in every:
            await asyncio.to_thread(worker.check_exit)
    except PromiseBroken as exc:
        reports = [worker.report() for worker in every if not worker.was_killed]
        raise PromiseBroken("\n\n".join([str(exc), *filter(None, reports)])) from exc
    finally:
        for worker in every:
            worker.kill()
    tally["records"] += await _check(folder, every)


async def _check(folder: Path, workers: list[_Worker]) -> int:
    """Raise unless everything acknowledged is stored, once and in order; return the count."""
    found: dict[str, dict[int, list[int]]] = {worker.name: {} for worker in workers}
    total = 0
    for bucket in range(BUCKETS):
        async with await read_queue(
            topic="t", storage_path=str(folder), bucket_id=bucket
        ) as reader:
            records: list[dict[str, Any]] = await reader.get(None)
        total += len(records)
        for record in records:
            found[record["writer"]].setdefault(bucket, []).append(record["n"])
    for worker in workers:
        for bucket, numbers in found[worker.name].items():
            if numbers != sorted(set(numbers)):
                wrong = [b for a, b in pairwise(numbers) if b <= a]
                raise PromiseBroken(
                    f"{worker.name}, bucket {bucket}: duplicated or reordered {wrong}"
                )
        stored = {number for numbers in found[worker.name].values() for number in numbers}
        lost = set(range(worker.acknowledged)) - stored
        if lost:
            raise PromiseBroken(f"{worker.name} has lost {sorted(lost)[:20]}")
    return total


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    asyncio.run(torture(int(sys.argv[1]), float(sys.argv[2]), counts))
    print(dict(counts))
