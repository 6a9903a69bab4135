"""Several processes and one topic in an object store: what one leaves behind, another continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, storage_options, url
from support.owner_process import OwnerProcess
from support.store_places import topic_store
from support.topic_places import numbered

from persisting.bucket.store_ownership import owner_register
from persisting.queue import read_queue, write_queue

LEASE = 1.5
_WRITER = """
import asyncio, json, sys
from persisting.queue import write_queue

async def main(path, options):
    writer = await write_queue(
        topic="orders", storage_path=path, storage_options=options, durable=True, num_buckets=3,
        backend_options={"lease": %s, "flush_interval": 0.3},
    )

    async def produce(who):
        for number in range(100_000):
            await writer.put({"id": f"{who}-{number}", "who": who, "n": number})
            print(f"{who}-{number}", flush=True)

    await asyncio.gather(*(produce(who) for who in range(4)))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def acknowledged_by_a_killed_process(server: SeaweedFS, prefix: str, least: int) -> list[str]:
    """Return the ids of the records that a process has acknowledged before it was killed."""
    command = [sys.executable, "-c", _WRITER % LEASE, url(prefix), json.dumps(server.options())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        seen = [child.stdout.readline() for _ in range(least)]
        child.send_signal(signal.SIGKILL)
        seen += child.stdout.readlines()
    return [line.strip() for line in seen if line.endswith("\n")]


@pytest.mark.timeout(300)
async def test_second_process_takes_over_after_a_kill_with_every_acknowledged_record_once(
    server: SeaweedFS, prefix: str
) -> None:
    acknowledged = acknowledged_by_a_killed_process(server, prefix, 150)
    assert len(acknowledged) >= 150
    where: dict[str, Any] = {
        "topic": "orders",
        "storage_path": url(prefix),
        "storage_options": server.options(),
    }
    began = time.monotonic()
    async with await write_queue(**where) as writer:
        await writer.put([{"id": f"new-{n}", "who": -1, "n": n} for n in range(10)])
        print(f"taken over after {time.monotonic() - began:.1f} s, the lease is {LEASE} s")
    async with await read_queue(**where) as reader:
        records = await reader.get(None)
    ids = [record["id"] for record in records]
    assert len(set(ids)) == len(ids)
    assert set(acknowledged) | {f"new-{n}" for n in range(10)} <= set(ids)
    for bucket in range(3):
        async with await read_queue(**where, bucket_id=bucket) as reader:
            last: dict[int, int] = {}
            for record in await reader.get(None):
                assert record["n"] > last.get(record["who"], -1)
                last[record["who"]] = record["n"]


async def test_requests_of_a_take_over_after_a_kill_are_bounded(
    where: dict[str, Any], proxy: FaultProxy
) -> None:
    """The owner of 4 buckets had flushed some of its records, and others not."""
    options = {"lease": LEASE, "flush_interval": None}
    new = {"durable": True, "num_buckets": 4, "backend_options": options}
    with OwnerProcess() as owner:
        await owner.ask("own", args={**where, **new})
        await owner.ask("put", args=[numbered(100)])
        await owner.ask("flush")
        await owner.ask("put", args=[numbered(100, 100)])
        owner.kill()
    held = owner_register(topic_store(where), 0).read()
    assert held is not None
    dead = held.content.log
    proxied = {**where, "storage_options": storage_options(proxy.port, timeout="120s")}
    began = time.monotonic()
    async with await write_queue(**proxied) as writer:
        await writer.put(numbered(100, 200))
        seconds = time.monotonic() - began
        # Another test of this process may have probed the store before.
        seen = [kind for kind in proxy.seen if "/probe/" not in kind]
    counts: Counter[str] = Counter()
    for kind in seen:
        method = kind.partition(" ")[0].partition("-")[0]
        if kind.endswith("/lease.json"):
            method += " of the dead lease" if dead in kind else " of the new lease"
        counts[method] += 1
    beats = 1 + 3 * seconds / LEASE  # heartbeats; an owner also checks whether it is replaced
    print(f"take-over after {seconds:.1f} s: {dict(counts)}")
    assert counts.pop("GET of the dead lease") <= 4 * 15  # while each bucket waits for its end
    assert counts.pop("PUT of the dead lease") <= 4 + 3 + 2 + 1  # the first of the buckets takes it
    assert counts.pop("GET of the new lease", 0) <= 4 + beats
    assert counts.pop("PUT of the new lease") <= 4 + beats
    assert counts.pop("GET") <= 54 + 2 * beats
    assert counts.pop("PUT") <= 36
    assert counts.pop("LIST") <= 28
    assert not counts - Counter(DELETE=2)  # of the dead log
    async with await read_queue(**where) as reader:
        assert sorted(record["id"] for record in await reader.get(None)) == list(range(300))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("round_", range(5))
async def test_acknowledged_records_survive_kills_again_and_again(
    server: SeaweedFS, prefix: str, tmp_path: Path, round_: int
) -> None:
    acknowledged: list[str] = []
    for generation in range(3):
        acknowledged += [
            f"{generation}/{name}"
            for name in acknowledged_by_a_killed_process(server, prefix, 50 + 40 * round_)
        ]
    where: dict[str, Any] = {
        "topic": "orders",
        "storage_path": url(prefix),
        "storage_options": server.options(),
    }
    async with await write_queue(**where):
        pass
    async with await read_queue(**where) as reader:
        found = [record["id"] for record in await reader.get(None)]
    wanted = [name.partition("/")[2] for name in acknowledged]
    for name in set(wanted):  # each generation counts from 0 on
        assert found.count(name) >= wanted.count(name)
    assert len(found) <= len(wanted) + 3 * 4  # one put per producer may be unanswered
