"""A stream whose driver is killed, with all its processes, goes on from its checkpoint: every row
is in the other topic once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filled import content, ids, is_sound, load, put, rows, unreferenced, writer
from launching import plain_environment
from storing import SparkPipe

from persisting.topic.routing import bucket_of

# One Spark job after the other takes minutes: by night.
pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = """
import sys
from persisting.spark import session

folder, most = sys.argv[1:]
spark = session(master="local[2]", conf={"spark.sql.shuffle.partitions": 2})
source = spark.readStream.format("persisting").option("maxOffsetsPerTrigger", most)
query = (
    source.load(folder + "/in")
    .writeStream.format("persisting")
    .option("checkpointLocation", folder + "/pipe.checkpoint")
    .trigger(availableNow=True)
    .start(folder + "/out")
)
print("started", flush=True)
query.awaitTermination()
print("done", flush=True)
"""

DYING = """
# Dies, with the whole driver, when the bucket whose number is in the file is to be committed.
import os, signal
from persisting.storage import adoption

adopt = adoption.adopt

def dying(bucket, *args, **kwargs):
    with open(os.environ["DIES_AT"]) as file:
        number = int(file.read() or -1)
    if bucket.options.bucket_id == number:
        os.killpg(int(os.environ["DIES_WITH"]), signal.SIGKILL)
    return adopt(bucket, *args, **kwargs)

adoption.adopt = dying
"""


@contextmanager
def driver(folder: Path, most: int, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process group of its own: the driver, its Java, and its Python workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), str(most)],
        env={**plain_environment(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)
        process.communicate()


def kill(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stored_rows(folder: Path) -> int:
    """How many rows are in the other topic, without opening it."""
    from persisting.errors import StorageError
    from persisting.spark.topics import StoredTopic

    try:
        topic = StoredTopic.open(folder / "out")
        return sum(topic.view(bucket).rows for bucket in topic.buckets)
    except (StorageError, OSError):
        return 0  # it is just being made


def kill_when(process: subprocess.Popen[str], folder: Path, least: int, later: float) -> None:
    """Kill it ``later`` seconds after so many rows were stored, if it lives so long."""
    deadline = time.monotonic() + 110
    while stored_rows(folder) < least and process.poll() is None:
        assert time.monotonic() < deadline, "the stream stores nothing"
        time.sleep(0.1)
    time.sleep(later)
    kill(process)


def check(folder: Path, count: int) -> None:
    assert ids(folder, "out") == list(range(count))
    for bucket, some in content(folder, "out").items():
        assert all(bucket_of(r["id"], len(content(folder, "out"))) == bucket for r in some)
    assert is_sound(folder, "out")


def test_a_driver_killed_in_the_middle_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, rows(3000), "in", buckets=2)
    with driver(tmp_path, 100) as process:
        kill_when(process, tmp_path, 250, random.Random(1).random() / 5)
    assert 250 <= stored_rows(tmp_path) < 3000
    SparkPipe(spark, tmp_path).run({"maxOffsetsPerTrigger": 1000})
    check(tmp_path, 3000)
    assert load(spark, tmp_path, "out").count() == 3000


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_a_driver_killed_again_and_again_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    put(tmp_path, rows(6000), "in", buckets=3)
    # Versions go as soon as they may, and with them what they said of the last batches.
    put(tmp_path, [], "out", buckets=3, keep_versions=0.001, compaction=True)
    for _ in range(6):
        before = stored_rows(tmp_path)
        with driver(tmp_path, 150) as process:
            kill_when(process, tmp_path, before + chance.randint(1, 600), chance.random() / 2)
    SparkPipe(spark, tmp_path).run()
    check(tmp_path, 6000)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_driver_killed_between_two_buckets_commits_the_rest_when_it_is_back(
    spark: SparkSession, tmp_path: Path, bucket: int
) -> None:
    put(tmp_path, rows(900), "in", buckets=2)
    put(tmp_path, [], "out", buckets=3)
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(DYING)
    dies = tmp_path / "dies"
    dies.write_text(str(bucket))
    code = "import os; os.environ['DIES_WITH'] = str(os.getpgid(0))\n" + DRIVER
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "400"],
        env={
            **plain_environment(),
            "PYTHONPATH": str(hook),
            "DIES_AT": str(dies),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=300)
    assert "done" not in out, err
    assert process.returncode == -signal.SIGKILL, err
    sizes = {b: len(some) for b, some in content(tmp_path, "out").items()}
    assert [b for b, size in sizes.items() if size] == list(range(bucket))
    SparkPipe(spark, tmp_path).run()
    check(tmp_path, 900)
    assert len(unreferenced(tmp_path, "out")) <= 3 * (3 - bucket) * 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_driver_killed_while_a_queue_feeds_it_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    chance = random.Random(7)
    with writer(tmp_path, "in", flush_threshold=20, compaction=True, keep_versions=0.5) as queue:
        queue.put_batch(rows(200))
        queue.flush()
        for turn in range(1, 5):
            with driver(tmp_path, 60) as process:
                queue.put_batch(rows(200, turn * 200))
                queue.compact()
                kill_when(process, tmp_path, turn * 100, chance.random())
        queue.flush()
    SparkPipe(spark, tmp_path).run()
    check(tmp_path, 1000)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_batch_write_whose_driver_was_killed_is_completed_by_its_write_id(
    spark: SparkSession, tmp_path: Path
) -> None:
    code = """
import os, sys
os.environ["DIES_WITH"] = str(os.getpgid(0))
from persisting.spark import session
spark = session(master="local[2]")
df = spark.range(0, 1000, numPartitions=3)
df.write.format("persisting").mode("append").options(writeId="w", numBuckets="3").save(sys.argv[1])
print("done", flush=True)
"""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(DYING)
    dies = tmp_path / "dies"
    for bucket in (2, 1, 0):
        dies.write_text(str(bucket))
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"t{bucket}")],
            env={**plain_environment(), "PYTHONPATH": str(hook), "DIES_AT": str(dies)},
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        topic = f"t{bucket}"
        sizes = [len(some) for some in content(tmp_path, topic).values()]
        assert [b for b, size in enumerate(sizes) if size] == list(range(bucket))
        for _ in range(2):
            df = spark.range(0, 1000, numPartitions=3)
            df.write.format("persisting").mode("append").option("writeId", "w").save(
                str(tmp_path / topic)
            )
        assert ids(tmp_path, topic) == list(range(1000))
        assert is_sound(tmp_path, topic)
