"""Spark reads topics in an object store; credentials are in the environment of its workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from support.object_stores import SeaweedFS, environment_of, url

from persisting.queue import write_queue

_PROGRAM = """
import json, sys
from persisting.spark import read_topic, session

with session("local[2]") as spark:
    root = sys.argv[1]
    rows = read_topic(spark, root, "orders", includeMetadata=True)
    found = {
        "count": rows.count(),
        "ids": sorted(row.id for row in rows.where("kind = 'even'").collect()),
        "tagged": read_topic(spark, root, "orders", tag="first").count(),
        "path": spark.read.format("persisting").load(root + "/orders").count(),
        "buckets": rows.select("_bucket").distinct().count(),
    }
    print("FOUND " + json.dumps(found))
"""


def run_program(server: SeaweedFS, root: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, root],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **environment_of(server.options()),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_spark_reads_a_topic_in_batches(server: SeaweedFS, prefix: str) -> None:
    where = {"storage_path": url(prefix), "storage_options": server.options()}
    async with await write_queue(topic="orders", durable=True, num_buckets=3, **where) as writer:
        await writer.put([{"id": n, "kind": "even" if n % 2 == 0 else "odd"} for n in range(30)])
        await writer.tag("first")
        await writer.put([{"id": n, "kind": "even"} for n in range(30, 40)])
    done = await asyncio.to_thread(run_program, server, url(prefix))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [""]
    assert line, done.stderr[-3000:]
    assert json.loads(line.removeprefix("FOUND ")) == {
        "count": 40,
        "ids": [*range(0, 30, 2), *range(30, 40)],
        "tagged": 30,
        "path": 40,
        "buckets": 3,
    }
