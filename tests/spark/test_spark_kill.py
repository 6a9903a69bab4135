"""Writes of which all processes or one are killed, and that are repeated: every row is stored
once."""

from __future__ import annotations

import datetime as dt
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.processes import plain_environment, spark_home
from support.spark.topics import content, ids, is_sound, load, put, rows, unreferenced, writer
from support.spark.writes import SparkPipe

from persisting.topic.routing import bucket_of

# Every driver takes ten seconds to start.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = """
import sys
from persisting.spark import session

folder, master, most = sys.argv[1:]
spark = session(master=master, conf={"spark.sql.shuffle.partitions": 2})
source = spark.readStream.format("persisting").option("maxOffsetsPerTrigger", most)
source = source.option("rowsPerPartition", 100)  # so that retention finds fragments to drop
query = (
    source.load(folder + "/in")
    .writeStream.format("persisting")
    .option("checkpointLocation", folder + "/pipe.checkpoint")
    .trigger(availableNow=True)
    .start(folder + "/out")
)
query.awaitTermination()
print("done", flush=True)
"""

BATCH = """
import sys
from persisting.spark import session

folder, master, mode = sys.argv[1:]
spark = session(master=master)
df = spark.range(1000, numPartitions=4)
df = df.selectExpr("id", "concat('row ', id) text")
df.write.format("persisting").mode(mode).option("writeId", "w").save(folder + "/out")
print("done", flush=True)
"""

HOLDS = """
# The first process that reaches a point with a file takes the file and waits to be released.
import os, time
from persisting.bucket import bulk_import
from persisting.table import bulk_write

def hold(point):
    here = os.path.join(os.environ["HOLDS"], point)
    try:
        os.rename(here, f"{here}.{os.getpid()}")
    except FileNotFoundError:
        return
    while not os.path.exists(f"{here}.go"):
        time.sleep(0.02)

adopt, write_files = bulk_import.adopt, bulk_write.write_files

def adopting(bucket, *args, **kwargs):
    hold(f"commit{bucket.options.bucket_id}")
    return adopt(bucket, *args, **kwargs)

def writing(*args, **kwargs):
    found = write_files(*args, **kwargs)
    hold("written")
    return found

bulk_import.adopt, bulk_write.write_files = adopting, writing
"""


class Driver:
    """A program with its own session: the driver, its Java, and all their Python workers."""

    def __init__(self, folder: Path, code: str, *args: object, **environ: str) -> None:
        self._holds = folder / "holds"
        self._holds.mkdir(exist_ok=True)
        (self._holds / "sitecustomize.py").write_text(HOLDS)
        self._output = folder / "driver.txt"
        path = [str(self._holds), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(folder), *map(str, args)],
                env={
                    **plain_environment(),
                    "PYTHONPATH": os.pathsep.join(path),
                    "HOLDS": str(self._holds),
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def held(self, point: str) -> int:
        """Wait until a process is held at a point; return its pid."""
        self.until(lambda: any(self._holds.glob(f"{point}.*")))
        (place,) = self._holds.glob(f"{point}.*")
        return int(place.suffix[1:])

    def let_go(self, point: str) -> None:
        (self._holds / f"{point}.go").touch()

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not true():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"it never became true: {self.output}"
            time.sleep(0.05)

    def finish(self) -> None:
        assert self.process.wait(120) == 0, self.output
        assert self.output.endswith("done\n"), self.output

    def kill(self) -> None:
        """Kill all its processes; the files that they had open are closed when this returns."""
        end([pid for pid in _processes() if _session(pid) == self.process.pid])
        self.process.wait()

    def kill_alone(self) -> None:
        """Kill the driver and its Java; Python workers, which are in other groups, keep running."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def driver(
    folder: Path, code: str, *args: object, hold: str | None = None, **environ: str
) -> Iterator[Driver]:
    if hold is not None:
        (folder / "holds").mkdir(exist_ok=True)
        for old in (folder / "holds").glob(f"{hold}*"):
            old.unlink()
        (folder / "holds" / hold).touch()
    made = Driver(folder, code, *args, **environ)
    try:
        yield made
    finally:
        made.kill()


def end(pids: list[int]) -> None:
    """Kill processes and wait until all their threads have ended."""
    watched = []
    for pid in pids:
        with suppress(ProcessLookupError):
            watched.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
    for handle in watched:
        select.select([handle], [], [], 30)
        os.close(handle)


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def stored_rows(folder: Path) -> int:
    """Return how many rows the tables of the target topic have, without opening it."""
    import lance

    found = 0
    for root in (folder / "out").glob("bucket_*/data.lance"):
        with suppress(ValueError, OSError):  # the table is being created or changed
            found += lance.dataset(str(root)).count_rows()
    return found


def kill_at(stream: Driver, folder: Path, least: int, later: float) -> None:
    """Kill all processes ``later`` seconds after ``least`` rows were stored."""
    stream.until(lambda: stored_rows(folder) >= least)
    time.sleep(later)
    stream.kill()


def maintain(folder: Path, topic: str, keep: int | None = None) -> set[int]:
    """Run retention, compaction and Lance's own cleanup; return the ids that were removed."""
    import lance

    before = set(ids(folder, topic))
    with writer(folder, topic, keep_versions=0.001) as queue:
        if keep is not None:
            queue.retain(rows=keep)
        queue.compact()
    for root in (folder / topic).glob("bucket_*/data.lance"):
        lance.dataset(str(root)).cleanup_old_versions(
            older_than=dt.timedelta(0), delete_unverified=True
        )
    return before - set(ids(folder, topic))


def check(spark: SparkSession, folder: Path, wanted: list[int]) -> None:
    """Assert that the target topic has each of these rows once, complete and in its bucket."""
    found = content(folder, "out")
    assert sorted(r["id"] for some in found.values() for r in some) == wanted
    assert all(r["text"] == f"row {r['id']}" for some in found.values() for r in some)
    for bucket, some in found.items():
        assert all(bucket_of(r["id"], len(found)) == bucket for r in some)
    counted = load(spark, folder, "out").selectExpr("count(id)", "count(distinct id)")
    assert tuple(counted.first() or ()) == (len(wanted), len(wanted))
    assert is_sound(folder, "out")


def batch(spark: SparkSession) -> DataFrame:
    return spark.range(1000, numPartitions=4).selectExpr("id", "concat('row ', id) text")


def save(df: DataFrame, folder: Path, mode: str = "append") -> None:
    made = df.write.format("persisting").mode(mode).option("writeId", "w")
    made.save(str(folder / "out"))


def sizes(folder: Path) -> list[int]:
    return [len(some) for some in content(folder, "out").values()]


class TestStreamWithKilledDriver:
    def test_killed_stream_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(2000), "in", buckets=2)
        with driver(tmp_path, STREAM, "local[2]", 100) as stream:
            kill_at(stream, tmp_path, 150, random.Random(1).random() / 5)
        assert 150 <= stored_rows(tmp_path) < 2000
        SparkPipe(spark, tmp_path).run({"maxOffsetsPerTrigger": 1000})
        check(spark, tmp_path, list(range(2000)))

    @pytest.mark.parametrize("seed", range(2))
    def test_repeatedly_killed_stream_with_maintenance_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path, seed: int
    ) -> None:
        chance = random.Random(seed)
        put(tmp_path, rows(4000), "in", buckets=3)
        put(tmp_path, [], "out", buckets=3, keep_versions=0.001, compaction=True)
        removed: set[int] = set()
        for keep in (0, 10):
            before = stored_rows(tmp_path)
            with driver(tmp_path, STREAM, "local[2]", 150) as stream:
                kill_at(stream, tmp_path, before + chance.randint(1, 300), chance.random() / 2)
            removed |= maintain(tmp_path, "out", keep)
            maintain(tmp_path, "in")
        assert removed
        SparkPipe(spark, tmp_path).run()
        check(spark, tmp_path, sorted(set(range(4000)) - removed))

    @pytest.mark.parametrize("bucket", [0, 1, 2])
    def test_stream_killed_between_two_commits_completes_the_batch(
        self, spark: SparkSession, tmp_path: Path, bucket: int
    ) -> None:
        put(tmp_path, rows(900), "in", buckets=2)
        put(tmp_path, [], "out", buckets=3)
        with driver(tmp_path, STREAM, "local[2]", 400, hold=f"commit{bucket}") as stream:
            stream.held(f"commit{bucket}")
            stream.kill()
        assert [b for b, size in enumerate(sizes(tmp_path)) if size] == list(range(bucket))
        removed = maintain(tmp_path, "out", keep=10)
        assert bool(removed) == (bucket > 0)
        SparkPipe(spark, tmp_path).run()
        check(spark, tmp_path, sorted(set(range(900)) - removed))
        assert unreferenced(tmp_path, "out") == []

    def test_stream_of_a_live_queue_killed_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        chance = random.Random(7)
        with writer(
            tmp_path, "in", flush_threshold=20, compaction=True, keep_versions=0.5
        ) as queue:
            queue.put_batch(rows(200))
            queue.flush()
            for turn in (1, 2):
                with driver(tmp_path, STREAM, "local[2]", 60) as stream:
                    queue.put_batch(rows(200, turn * 200))
                    queue.compact()
                    kill_at(stream, tmp_path, turn * 100, chance.random())
            queue.flush()
        SparkPipe(spark, tmp_path).run()
        check(spark, tmp_path, list(range(600)))


class TestBatchWithKilledDriver:
    @pytest.mark.parametrize("bucket", [0, 1, 2])
    def test_write_killed_between_two_commits_is_completed_by_its_write_id(
        self, spark: SparkSession, tmp_path: Path, bucket: int
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        with driver(tmp_path, BATCH, "local[2]", "append", hold=f"commit{bucket}") as made:
            made.held(f"commit{bucket}")
            made.kill()
        assert [b for b, size in enumerate(sizes(tmp_path)) if size] == list(range(bucket))
        removed = maintain(tmp_path, "out", keep=10)
        assert bool(removed) == (bucket > 0)
        for _ in range(2):
            save(batch(spark), tmp_path)
            check(spark, tmp_path, sorted(set(range(1000)) - removed))

    def test_write_killed_in_its_tasks_stores_nothing_until_repeated(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(10, 5000), "out", buckets=3)
        with driver(tmp_path, BATCH, "local[2]", "append", hold="written") as made:
            made.held("written")
            made.kill()
        assert ids(tmp_path, "out") == list(range(5000, 5010))
        assert unreferenced(tmp_path, "out")
        save(batch(spark), tmp_path)
        check(spark, tmp_path, [*range(1000), *range(5000, 5010)])

    def test_repeatedly_killed_write_with_maintenance_stores_every_row_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        removed: set[int] = set()
        for point in ("commit1", "commit2"):
            with driver(tmp_path, BATCH, "local[2]", "append", hold=point) as made:
                made.held(point)
                made.kill()
            removed |= maintain(tmp_path, "out", keep=10)
        assert removed
        save(batch(spark), tmp_path)
        check(spark, tmp_path, sorted(set(range(1000)) - removed))
        assert unreferenced(tmp_path, "out") == []

    def test_killed_overwrite_replaces_every_bucket_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(300, 5000), "out", buckets=3)
        with driver(tmp_path, BATCH, "local[2]", "overwrite", hold="commit1") as made:
            made.held("commit1")
            made.kill()
        here = content(tmp_path, "out")
        assert {r["id"] < 1000 for r in here[0]} == {True}
        assert {r["id"] < 1000 for b in (1, 2) for r in here[b]} == {False}
        save(batch(spark), tmp_path, "overwrite")
        check(spark, tmp_path, list(range(1000)))
        put(tmp_path, rows(5, 2000), "out")
        save(batch(spark), tmp_path, "overwrite")
        check(spark, tmp_path, [*range(1000), *range(2000, 2005)])

    def test_workers_of_a_killed_driver_exit_and_release_the_bucket(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        with driver(tmp_path, BATCH, "local[2]", "append", hold="commit1") as made:
            worker = os.pidfd_open(made.held("commit1"))
            made.kill_alone()
            ended, _, _ = select.select([worker], [], [], 30)
            os.close(worker)
            assert ended, "the worker lives on and has the bucket open"
        save(batch(spark), tmp_path)
        check(spark, tmp_path, list(range(1000)))


class TestKilledTask:
    """A task is retried, four times with a master ``local[2,4]``."""

    @pytest.mark.parametrize("mode", ["append", "overwrite"])
    def test_killed_python_worker_stores_its_rows_once(
        self, spark: SparkSession, tmp_path: Path, mode: str
    ) -> None:
        put(tmp_path, rows(50, 5000) if mode == "overwrite" else [], "out", buckets=3)
        with driver(tmp_path, BATCH, "local[2,4]", mode, hold="written") as made:
            end([made.held("written")])
            made.finish()
        check(spark, tmp_path, list(range(1000)))
        maintain(tmp_path, "out")
        assert unreferenced(tmp_path, "out") == []

    def test_killed_worker_of_a_stream_stores_its_rows_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(900), "in", buckets=2)
        with driver(tmp_path, STREAM, "local[2,4]", 400, hold="written") as stream:
            end([stream.held("written")])
            stream.finish()
        check(spark, tmp_path, list(range(900)))

    def test_killed_executor_stores_its_rows_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        given = ("local-cluster[2,1,1024]", "append")
        home = str(spark_home(tmp_path / "spark"))
        with driver(tmp_path, BATCH, *given, hold="written", SPARK_HOME=home) as made:
            worker = made.held("written")
            daemon = parent(worker)
            executor = parent(daemon)
            assert "ExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_text()
            end([executor, daemon, worker])
            made.finish()
        check(spark, tmp_path, list(range(1000)))
