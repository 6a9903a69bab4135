"""Three nodes that are killed, paused and restarted while producers and a consumer group work.

Producers repeat what was not acknowledged, with producer sequences: every acknowledged record is
stored once. Members print what they got before they commit it: no commit skips a record.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.cluster_nodes import Cluster, Process
from support.crash.checks import PromiseBroken

from persisting import fs
from persisting.bucket.group_offsets import read_committed
from persisting.queue import read_queue, write_queue
from torture.rerun import rerun_command

BUCKETS = 4
ACTIONS = (
    "kill node",
    "kill two nodes",
    "pause node",
    "stop node",
    "kill producer",
    "kill member",
)
DRAIN_SECONDS = 60.0
"""Unit of the time limits for draining after the last fault."""

PRODUCER = """
import asyncio, sys
import pulsing as pul
from persisting.errors import StorageError
from persisting.queue import write_queue

async def main():
    root, name, buckets, *seeds = sys.argv[1:]
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
    writer = await write_queue(
        system, topic="t", storage_path=root, backend="persisting", num_buckets=int(buckets),
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0}, writer_id=name,
    )
    number = 0
    while True:
        records = [{"id": f"{name}.{number}.{part}", "n": number} for part in range(5)]
        while True:
            print("BEGUN", number, flush=True)
            try:
                await writer.put(records, sequence=number)
                break
            except StorageError as exc:
                print("FAILED", number, str(exc).replace(chr(10), " ")[:200], flush=True)
                await asyncio.sleep(0.1)
        print("DONE", number, flush=True)
        number += 1
        await asyncio.sleep(0.01)

asyncio.run(main())
"""

MEMBER = """
import asyncio, json, sys
import pulsing as pul
from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue

async def main():
    root, *seeds = sys.argv[1:]
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
    reader = await read_queue(system, topic="t", storage_path=root, group="g", wait_for_topic=30)
    while True:
        try:
            records = await reader.get(limit=40, wait=True, timeout=0.5)
            for record in records:
                print("GOT", record["id"], flush=True)
            done = await reader.commit()
            print("COMMITTED", json.dumps(done), flush=True)
        except StorageError as exc:
            print("FAILED", str(exc).replace(chr(10), " ")[:200], flush=True)
            await asyncio.sleep(0.1)

asyncio.run(main())
"""

MAINTAINER = """
import asyncio, random, sys
import pulsing as pul
from persisting.errors import StorageError
from persisting.queue import write_queue

async def main():
    root, seed, *seeds = sys.argv[1:]
    rng = random.Random(seed)
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
    writer = await write_queue(system, topic="t", storage_path=root)
    while True:
        await asyncio.sleep(0.3)
        action = rng.choice(("flush", "compact", "tag", "verify", "create_index", "query"))
        words = {"tag": ("now",), "create_index": ("n",), "query": ("n = 3",)}.get(action, ())
        try:
            found = await getattr(writer, action)(*words)
        except StorageError as exc:
            print("FAILED", action, str(exc).replace(chr(10), " ")[:200], flush=True)
            continue
        print("MAINTAINED", action, flush=True)
        if action == "verify" and not found["ok"]:
            print("DAMAGED", found, flush=True)

asyncio.run(main())
"""


class Processes:
    """Producers, members and the maintainer. A killed process is replaced; its output still
    counts."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.producers: list[Process] = []
        self.members: list[Process] = []
        self.running: list[Process] = []
        self.maintainer: Process | None = None

    def maintain(self, seed: int) -> None:
        self.maintainer = self._run(MAINTAINER, str(self._folder), str(seed))

    def produce(self) -> None:
        name = f"p{len(self.producers)}"
        self.producers.append(self._run(PRODUCER, str(self._folder), name, str(BUCKETS)))

    def consume(self) -> None:
        self.members.append(self._run(MEMBER, str(self._folder)))

    def _run(self, code: str, *args: str) -> Process:
        process = self._cluster.run("-c", code, *args, *self._cluster.seeds)
        self.running.append(process)
        return process

    def kill(self, process: Process) -> None:
        self.running.remove(process)
        process.kill()
        (self.produce if process in self.producers else self.consume)()

    def acknowledged(self) -> dict[str, int]:
        """Return the number of acknowledged puts of each producer."""
        return {f"p{n}": len(p.lines("DONE")) for n, p in enumerate(self.producers)}

    def begun(self) -> dict[str, int]:
        return {f"p{n}": len(set(p.lines("BEGUN"))) for n, p in enumerate(self.producers)}

    def got(self) -> set[str]:
        return {line for member in self.members for line in member.lines("GOT")}


async def torture(seed: int, seconds: float, tally: Counter[str]) -> None:
    """Inject faults for ``seconds``, then check. If a promise is broken, the topic is kept on
    disk."""
    folder = Path(tempfile.mkdtemp(prefix="torture-cluster-"))
    cluster = Cluster()
    processes = Processes(cluster, folder)
    try:
        try:
            await _work(seed, seconds, cluster, processes, tally)
        finally:
            cluster.close()
        await _check(processes, folder, tally)
    except AssertionError as exc:
        said = "\n".join(node.output[-1500:] for node in cluster.nodes)
        raise PromiseBroken(
            f"seed {seed}: {exc}\n{rerun_command('cluster', seed, f'--seconds {seconds:.0f}')}\n"
            f"topic kept in {folder}\n{said}"
        ) from exc
    shutil.rmtree(folder)


async def _work(
    seed: int, seconds: float, cluster: Cluster, processes: Processes, tally: Counter[str]
) -> None:
    await asyncio.to_thread(cluster.start, 3)
    for _ in range(3):
        processes.produce()
    for _ in range(2):
        processes.consume()
    await asyncio.to_thread(processes.producers[0].wait_for, "DONE")
    processes.maintain(seed)
    await _inject_faults(random.Random(f"cluster/{seed}"), seconds, cluster, processes, tally)
    await _drain(processes)


async def _inject_faults(
    rng: random.Random, seconds: float, cluster: Cluster, processes: Processes, tally: Counter[str]
) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.2, 2.0))
        action = rng.choice(ACTIONS)
        nodes = [node for node in cluster.nodes if node.popen.poll() is None]
        node, length = rng.choice(nodes), rng.choice((0.2, 1.0, 3.0, 8.0))
        which = rng.randrange(1000)
        if action == "pause node":
            node.signal(signal.SIGSTOP)
            await asyncio.sleep(length)
            node.signal(signal.SIGCONT)
        elif action == "kill two nodes":
            next(other for other in nodes if other is not node).kill()
            await _replace(node, cluster, "kill node")
            await asyncio.to_thread(cluster.start, 1)
        elif action in ("kill node", "stop node"):
            await _replace(node, cluster, action)
        else:
            group = processes.producers if action == "kill producer" else processes.members
            alive = [process for process in group if process in processes.running]
            processes.kill(alive[which % len(alive)])
        tally[action] += 1


async def _replace(node: Any, cluster: Cluster, action: str) -> None:
    """Kill or stop a node and start another one."""
    if action == "kill node":
        node.kill()
    else:
        node.signal(signal.SIGTERM)
        code = await node.ended()
        if code != 0:
            raise PromiseBroken(f"a stopped node exited with status {code}:\n{node.output[-2000:]}")
    cluster.nodes.sort(
        key=lambda other: other.popen.poll() is not None
    )  # a new node joins the first
    await asyncio.to_thread(cluster.start, 1)


async def _drain(processes: Processes) -> None:
    """After the last fault: wait until every producer makes progress and the group reaches the
    end."""
    before = processes.acknowledged()
    running = [n for n, p in enumerate(processes.producers) if p in processes.running]
    deadline = time.monotonic() + 3 * DRAIN_SECONDS
    while not all(processes.acknowledged()[f"p{n}"] > before[f"p{n}"] for n in running):
        if time.monotonic() > deadline:
            stuck = [processes.producers[n].output[-600:] for n in running]
            raise PromiseBroken(f"producers make no progress: {stuck}")
        await asyncio.sleep(0.1)
    for process in processes.producers:
        process.kill()
    acknowledged = {
        f"{name}.{number}.{part}"
        for name, count in processes.acknowledged().items()
        for number in range(count)
        for part in range(5)
    }
    while acknowledged - processes.got():
        if time.monotonic() > deadline + DRAIN_SECONDS:
            missing = sorted(acknowledged - processes.got())
            raise PromiseBroken(
                f"{len(missing)} of {len(acknowledged)} records were never consumed: {missing[:9]}"
            )
        await asyncio.sleep(0.1)


async def _check(processes: Processes, folder: Path, tally: Counter[str]) -> None:
    acknowledged, begun, got = processes.acknowledged(), processes.begun(), processes.got()
    stored: list[str] = []
    for bucket in range(BUCKETS):
        async with await read_queue(
            topic="t", storage_path=str(folder), bucket_id=bucket
        ) as reader:
            ids = [row["id"] for row in await reader.get(None)]
        stored += ids
        committed = read_committed(folder / "t" / "groups" / "g", bucket, fs.current()).offset
        if skipped := [name for name in ids[:committed] if name not in got]:
            raise PromiseBroken(f"bucket {bucket}: the commit {committed} skips {skipped[:9]}")
        _check_order(bucket, ids)
    counts = Counter(stored)
    if duplicated := [name for name, count in counts.items() if count > 1]:
        raise PromiseBroken(f"stored twice: {sorted(duplicated)[:9]}")
    for producer, count in acknowledged.items():
        for number in range(begun[producer]):
            parts = [counts[f"{producer}.{number}.{part}"] for part in range(5)]
            if number < count and sum(parts) != 5:
                raise PromiseBroken(f"lost: put {number} of {producer}, {parts}")
            if number >= count and number < begun[producer] - 1:
                raise PromiseBroken(f"put {number} of {producer} was skipped")
    await _check_maintenance(processes, folder, tally)
    tally["acknowledged"] += 5 * sum(acknowledged.values())
    tally["consumed"] += len(got)


async def _check_maintenance(processes: Processes, folder: Path, tally: Counter[str]) -> None:
    assert processes.maintainer is not None
    if damaged := processes.maintainer.lines("DAMAGED"):
        raise PromiseBroken(f"verify: {damaged}")
    tally["maintenance steps"] += len(processes.maintainer.lines("MAINTAINED"))
    async with await write_queue(topic="t", storage_path=str(folder)) as writer:
        if not (report := await writer.verify())["ok"]:
            raise PromiseBroken(f"verify: {report}")
        if "tag" in processes.maintainer.lines("MAINTAINED"):
            await writer.restore("now")


def _check_order(bucket: int, ids: list[str]) -> None:
    latest: dict[str, int] = {}
    for name in ids:
        producer, number, _ = name.split(".")
        if int(number) < latest.get(producer, 0):
            raise PromiseBroken(f"bucket {bucket}: {name} is stored after {latest[producer]}")
        latest[producer] = int(number)
