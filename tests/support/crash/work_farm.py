"""A farm of worker processes on one topic that are killed at random: run as a program.

Arguments: the folder, the number of records, of workers and of kills, a seed, and what to do:
"acknowledge" every record, or "reject" all of them and then "redrive" the dead letters once. The
variable FARM_WHERE has the place of the topic.

Every worker appends lines to ``events``, each with one write: ``d id token`` when a record was
delivered, ``a id token`` when its ``ack`` returned. Whoever keeps the group is killed as well.

A worker that ends in any other way than by a kill of this program, or when all is done, is reported
on stderr: its exit code or signal, and everything it has printed. The program then fails.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import lance  # noqa: F401 (imported once: most kills would hit the imports of the children)

import persisting.local_socket.open_shared
import persisting.local_socket.socket_groups  # noqa: F401
from persisting.queue import LeaseLost, read_queue, write_queue
from persisting.store_address import is_store_address
from persisting.work.delivery import Delivery

LEASE = 1.0
FETCH = 32
"""Records that a worker handles at the same time."""
PAUSE = 0.02
"""Seconds before a kill, on average, so that it hits any point of the work."""

STUCK_SECONDS = 10.0
"""A kill comes at the latest after this time without any progress."""

DONE = "kills-are-done"
"""A file; workers continue until it exists."""
WHERE = json.loads(os.environ["FARM_WHERE"])
LOGGED: dict[str, Any] = {"enable_wal": True, "wal_sync_interval": 0.0}
if is_store_address(WHERE["storage_path"]):
    LOGGED["lease"] = 0.5  # the next keeper waits for it


class Events:
    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, number: int, token: int) -> None:
        os.write(self._fd, f"{kind} {number} {token}\n".encode())


async def put(count: int) -> None:
    writer = await write_queue("tasks", **WHERE, backend="persisting", backend_options=LOGGED)
    await writer.put([{"id": number} for number in range(count)])
    await writer.close()


async def work(folder: Path, task: str, seed: int) -> None:
    """Handle records until the kills are over and all records are finished."""
    rng = random.Random(seed)
    events = Events(folder)
    reader = await read_queue(
        "tasks",
        **WHERE,
        group="farm",
        mode="work",
        lease=LEASE,
        max_deliveries=1_000_000,
        breaker=False,
    )
    if task == "redrive":
        await reader.redrive()

    async def handle(delivery: Delivery) -> None:
        number, token = delivery.record["id"], delivery.key[2]
        events.write("d", number, token)
        await asyncio.sleep(rng.uniform(0, 0.004))
        try:
            if task == "reject":
                await delivery.reject("on purpose")
            else:
                await delivery.ack()
        except LeaseLost:
            return
        events.write("a", number, token)

    while True:
        deliveries = await reader.fetch(FETCH, wait=True, timeout=0.5)
        await asyncio.gather(*(handle(delivery) for delivery in deliveries))
        if not deliveries and (folder / DONE).exists():
            if not (await reader.stats())["unacknowledged"]:
                break
    await reader.close()


def wait_for_progress(folder: Path, finished: int) -> None:
    """Wait until this many records are finished: kills are spread over all of the work."""
    events, count = folder / "events", -1
    deadline = time.monotonic() + STUCK_SECONDS
    while time.monotonic() < deadline:
        before, count = count, events.read_bytes().count(b"\na ") if events.exists() else 0
        if count >= finished:
            return
        if count > before:
            deadline = time.monotonic() + STUCK_SECONDS
        time.sleep(0.02)


def fork(folder: Path, main: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> int:
    """Run a coroutine in a child whose output goes to a file of its own."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            output = os.open(output_of(folder, os.getpid()), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.enable(file=2)
            asyncio.run(main(*args))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def output_of(folder: Path, child: int) -> Path:
    return folder / f"output-{child}"


def ended_well(folder: Path, child: int, status: int, task: str) -> bool:
    """Whether a child has ended with exit code 0; else report why it ended, and what it printed."""
    path = output_of(folder, child)
    output = path.read_text(errors="replace") if path.exists() else ""
    path.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    if code:
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        print(f"a worker ({task}, process {child}) ended with {how}:", file=sys.stderr)
        print(output or "it has printed nothing", file=sys.stderr, flush=True)
    return not code


class Farm:
    """The workers of one task, which are killed until ``kills`` of them were."""

    def __init__(self, folder: Path, task: str, records: int, kills: int, rng: random.Random):
        self._folder, self._task, self._records, self._kills = folder, task, records, kills
        self._rng = rng
        self._running: set[int] = set()
        self.killed = self.failed = 0

    def run(self, workers: int) -> None:
        for _ in range(workers):
            self._start()
        while self.killed < self._kills and self._running:
            self._pause()
            self._kill(self._rng.choice(sorted(self._running)))
        (self._folder / DONE).touch()
        while self._running:
            child, status = os.waitpid(-1, 0)
            self._ended(child, status)
        (self._folder / DONE).unlink()
        (self._folder / "events").rename(self._folder / f"events-{self._task}")

    def _start(self) -> None:
        seed = self._rng.random()
        self._running.add(fork(self._folder, work, self._folder, self._task, seed))

    def _pause(self) -> None:
        """Wait so that the kills are spread over all of the work."""
        if self._task == "redrive" and self.killed % 2:  # every worker begins with the re-drive
            time.sleep(self._rng.uniform(0.0, 1.0))
        else:
            wait_for_progress(self._folder, self._records * self.killed // self._kills)
            time.sleep(self._rng.uniform(0.0, 2 * PAUSE))

    def _kill(self, child: int) -> None:
        """Kill a worker and start another one, unless it has ended by itself."""
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            self._running.discard(child)
            output_of(self._folder, child).unlink(missing_ok=True)
            self.killed += 1
            self._start()
        else:
            self._ended(child, status)

    def _ended(self, child: int, status: int) -> None:
        self._running.discard(child)
        self.failed += not ended_well(self._folder, child, status, self._task)


def main() -> int:
    folder, records, workers, kills, seed = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    tasks = sys.argv[6].split(",")
    rng = random.Random(seed)
    child = fork(folder, put, records)
    failed = int(not ended_well(folder, child, os.waitpid(child, 0)[1], "put"))
    for task in tasks:
        farm = Farm(folder, task, records, kills // len(tasks), rng)
        farm.run(workers)
        failed += farm.failed
        print(f"{task}: {farm.killed} kills", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
