"""Three nodes on the loopback that die, pause and come back while producers and a group work.

Producers repeat what was not acknowledged, under their own names: all that was acknowledged is
stored once. Members of the group say what they got before they commit it: no commit skips a record.
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
from support.crash.checking import Broken

from persisting import fs
from persisting.bucket.group_offsets import read_committed
from persisting.queue import read_queue, write_queue
from torture.repeating import again

BUCKETS = 4
DEEDS = (
    "kill node",
    "kill two nodes",
    "pause node",
    "stop node",
    "kill producer",
    "kill member",
)
QUIET = 20.0
"""How long the drain may take when nothing is struck any more."""

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

KEEPER = """
import asyncio, random, sys
import pulsing as pul
from persisting.errors import StorageError
from persisting.queue import write_queue

async def main():
    root, seed, *seeds = sys.argv[1:]
    dice = random.Random(seed)
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds)
    writer = await write_queue(system, topic="t", storage_path=root)
    while True:
        await asyncio.sleep(0.3)
        deed = dice.choice(("flush", "compact", "tag", "verify", "create_index", "query"))
        words = {"tag": ("now",), "create_index": ("n",), "query": ("n = 3",)}.get(deed, ())
        try:
            found = await getattr(writer, deed)(*words)
        except StorageError as exc:
            print("FAILED", deed, str(exc).replace(chr(10), " ")[:200], flush=True)
            continue
        print("KEPT", deed, flush=True)
        if deed == "verify" and not found["ok"]:
            print("DAMAGED", found, flush=True)

asyncio.run(main())
"""


class Actors:
    """Processes beside the nodes; a dead one is replaced, and what it said still counts."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.producers: list[Process] = []
        self.members: list[Process] = []
        self.living: list[Process] = []
        self.keeper: Process | None = None

    def keep(self, seed: int) -> None:
        self.keeper = self._run(KEEPER, str(self._folder), str(seed))

    def produce(self) -> None:
        name = f"p{len(self.producers)}"
        self.producers.append(self._run(PRODUCER, str(self._folder), name, str(BUCKETS)))

    def consume(self) -> None:
        self.members.append(self._run(MEMBER, str(self._folder)))

    def _run(self, code: str, *args: str) -> Process:
        process = self._cluster.run("-c", code, *args, *self._cluster.seeds)
        self.living.append(process)
        return process

    def kill(self, process: Process) -> None:
        self.living.remove(process)
        process.kill()
        (self.produce if process in self.producers else self.consume)()

    def acknowledged(self) -> dict[str, int]:
        """By producer, how many puts."""
        return {f"p{n}": len(p.lines("DONE")) for n, p in enumerate(self.producers)}

    def begun(self) -> dict[str, int]:
        return {f"p{n}": len(set(p.lines("BEGUN"))) for n, p in enumerate(self.producers)}

    def got(self) -> set[str]:
        return {line for member in self.members for line in member.lines("GOT")}


async def torture(seed: int, seconds: float, tally: Counter[str]) -> None:
    """Strike for so long, then check; the topic is kept if something is broken."""
    folder = Path(tempfile.mkdtemp(prefix="torture-cluster-"))
    cluster = Cluster()
    actors = Actors(cluster, folder)
    try:
        try:
            await _work(seed, seconds, cluster, actors, tally)
        finally:
            cluster.close()
        await _check(actors, folder, tally)
    except AssertionError as exc:
        said = "\n".join(node.output[-1500:] for node in cluster.nodes)
        raise Broken(
            f"seed {seed}: {exc}\n{again('cluster', seed, f'--seconds {seconds:.0f}')}\n"
            f"the topic is kept in {folder}\n{said}"
        ) from exc
    shutil.rmtree(folder)


async def _work(
    seed: int, seconds: float, cluster: Cluster, actors: Actors, tally: Counter[str]
) -> None:
    await asyncio.to_thread(cluster.start, 3)
    for _ in range(3):
        actors.produce()
    for _ in range(2):
        actors.consume()
    await asyncio.to_thread(actors.producers[0].wait_for, "DONE")
    actors.keep(seed)
    await _strike(random.Random(f"cluster/{seed}"), seconds, cluster, actors, tally)
    await _drained(actors)


async def _strike(
    dice: random.Random, seconds: float, cluster: Cluster, actors: Actors, tally: Counter[str]
) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(dice.uniform(0.2, 2.0))
        deed = dice.choice(DEEDS)
        nodes = [node for node in cluster.nodes if node.popen.poll() is None]
        node, length = dice.choice(nodes), dice.choice((0.2, 1.0, 3.0, 8.0))
        which = dice.randrange(1000)
        if deed == "pause node":
            node.signal(signal.SIGSTOP)
            await asyncio.sleep(length)
            node.signal(signal.SIGCONT)
        elif deed == "kill two nodes":
            next(other for other in nodes if other is not node).kill()
            await _replaced(node, cluster, "kill node")
            await asyncio.to_thread(cluster.start, 1)
        elif deed in ("kill node", "stop node"):
            await _replaced(node, cluster, deed)
        else:
            group = actors.producers if deed == "kill producer" else actors.members
            there = [process for process in group if process in actors.living]
            actors.kill(there[which % len(there)])
        tally[deed] += 1


async def _replaced(node: Any, cluster: Cluster, deed: str) -> None:
    """It goes, and another one comes in its place."""
    if deed == "kill node":
        node.kill()
    else:
        node.signal(signal.SIGTERM)
        code = await node.ended()
        if code != 0:
            raise Broken(f"a node that was told to stop ended with {code}:\n{node.output[-2000:]}")
    cluster.nodes.sort(key=lambda one: one.popen.poll() is not None)  # the living are asked first
    await asyncio.to_thread(cluster.start, 1)


async def _drained(actors: Actors) -> None:
    """Nothing is struck any more: every producer gets on, and the group reaches the end."""
    before = actors.acknowledged()
    living = [n for n, p in enumerate(actors.producers) if p in actors.living]
    deadline = time.monotonic() + 3 * QUIET
    while not all(actors.acknowledged()[f"p{n}"] > before[f"p{n}"] for n in living):
        if time.monotonic() > deadline:
            stuck = [actors.producers[n].output[-600:] for n in living]
            raise Broken(f"producers do not get on: {stuck}")
        await asyncio.sleep(0.1)
    for process in actors.producers:
        process.kill()
    wanted = {
        f"{name}.{number}.{part}"
        for name, count in actors.acknowledged().items()
        for number in range(count)
        for part in range(5)
    }
    while wanted - actors.got():
        if time.monotonic() > deadline + QUIET:
            missing = sorted(wanted - actors.got())
            raise Broken(f"{len(missing)} of {len(wanted)} were never consumed: {missing[:9]}")
        await asyncio.sleep(0.1)


async def _check(actors: Actors, folder: Path, tally: Counter[str]) -> None:
    acknowledged, begun, got = actors.acknowledged(), actors.begun(), actors.got()
    stored: list[str] = []
    for bucket in range(BUCKETS):
        async with await read_queue(
            topic="t", storage_path=str(folder), bucket_id=bucket
        ) as reader:
            ids = [row["id"] for row in await reader.get(None)]
        stored += ids
        committed = read_committed(folder / "t" / "groups" / "g", bucket, fs.current()).offset
        if skipped := [name for name in ids[:committed] if name not in got]:
            raise Broken(f"bucket {bucket}: the commit {committed} skips {skipped[:9]}")
        _check_order(bucket, ids)
    counts = Counter(stored)
    if doubled := [name for name, count in counts.items() if count > 1]:
        raise Broken(f"stored twice: {sorted(doubled)[:9]}")
    for producer, count in acknowledged.items():
        for number in range(begun[producer]):
            parts = [counts[f"{producer}.{number}.{part}"] for part in range(5)]
            if number < count and sum(parts) != 5:
                raise Broken(f"lost: put {number} of {producer}, {parts}")
            if number >= count and number < begun[producer] - 1:
                raise Broken(f"put {number} of {producer} was passed over")
    await _check_keeping(actors, folder, tally)
    tally["acknowledged"] += 5 * sum(acknowledged.values())
    tally["consumed"] += len(got)


async def _check_keeping(actors: Actors, folder: Path, tally: Counter[str]) -> None:
    assert actors.keeper is not None
    if damaged := actors.keeper.lines("DAMAGED"):
        raise Broken(f"verify: {damaged}")
    tally["pieces of upkeep"] += len(actors.keeper.lines("KEPT"))
    async with await write_queue(topic="t", storage_path=str(folder)) as writer:
        if not (report := await writer.verify())["ok"]:
            raise Broken(f"verify: {report}")
        if "tag" in actors.keeper.lines("KEPT"):
            await writer.restore("now")


def _check_order(bucket: int, ids: list[str]) -> None:
    latest: dict[str, int] = {}
    for name in ids:
        producer, number, _ = name.split(".")
        if int(number) < latest.get(producer, 0):
            raise Broken(f"bucket {bucket}: {name} came after {latest[producer]}")
        latest[producer] = int(number)
