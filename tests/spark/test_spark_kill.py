"""Writes of which all processes or one are killed, and that are repeated: every row is stored
once."""

from __future__ import annotations

import datetime as dt
import os
import random
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.handover import OWNER, OWNER_POINTS, files_of_handovers, held_process
from support.held_process import killed_at
from support.spark.drivers import Driver, driver, end
from support.spark.processes import spark_home
from support.spark.topics import content, ids, is_sound, load, put, rows, unreferenced, writer
from support.spark.writes import SparkPipe
from support.waiting import until_true

from persisting.topic.routing import bucket_of

# Every driver takes ten seconds to start.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

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


def write_with_a_killed_executor(folder: Path) -> None:
    """Run the batch on two executors; kill one, with its Python processes, when a task of it has
    written its files."""
    given = ("local-cluster[2,1,1024]", "append")
    home = str(spark_home(folder / "spark"))
    with driver(folder, BATCH, *given, hold="written", SPARK_HOME=home) as made:
        worker = made.until_held("written")
        daemon = parent(worker)
        executor = parent(daemon)
        assert "ExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_text()
        end([executor, daemon, worker])
        made.finish()


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
            stream.until_held(f"commit{bucket}")
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
            made.until_held(f"commit{bucket}")
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
            made.until_held("written")
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
                made.until_held(point)
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
            made.until_held("commit1")
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
            worker = os.pidfd_open(made.until_held("commit1"))
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
            end([made.until_held("written")])
            made.finish()
        check(spark, tmp_path, list(range(1000)))
        maintain(tmp_path, "out")
        assert unreferenced(tmp_path, "out") == []

    def test_killed_worker_of_a_stream_stores_its_rows_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, rows(900), "in", buckets=2)
        with driver(tmp_path, STREAM, "local[2,4]", 400, hold="written") as stream:
            end([stream.until_held("written")])
            stream.finish()
        check(spark, tmp_path, list(range(900)))

    def test_killed_executor_stores_its_rows_once(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        write_with_a_killed_executor(tmp_path)
        check(spark, tmp_path, list(range(1000)))


class TestBesideALiveQueue:
    """The target is open in a queue, to which the files are handed over."""

    @pytest.mark.parametrize(
        "point",
        [
            "written",
            "driver-sent",
            "driver-decides",
            "driver-decided",
            "driver-has-answers",
            "driver-removed-notes",
        ],
    )
    @pytest.mark.parametrize("program", ["batch", "stream"])
    def test_killed_driver_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path, program: str, point: str
    ) -> None:
        put(tmp_path, rows(1000), "in", buckets=2)
        put(tmp_path, [], "out", buckets=3)
        with writer(tmp_path, "out", local_socket=False) as queue:
            queue.put_batch(rows(20, 5000))
            given = (
                (BATCH, "local[2]", "append") if program == "batch" else (STREAM, "local[2]", 400)
            )
            with driver(tmp_path, *given, hold=point) as made:
                made.until_held(point)
                made.kill()
            until_true(lambda: files_of_handovers(tmp_path / "out") == [])
            queue.put_batch(rows(20, 5020))
            for _ in range(2):
                if program == "batch":
                    save(batch(spark), tmp_path)
                else:
                    SparkPipe(spark, tmp_path).run()
            queue.put_batch(rows(20, 5040))
        check(spark, tmp_path, [*range(1000), *range(5000, 5060)])

    @pytest.mark.parametrize("point", ["driver-decides", "driver-decided", "driver-has-answers"])
    def test_killed_driver_of_an_overwrite_replaces_every_bucket_once_or_none(
        self, spark: SparkSession, tmp_path: Path, point: str
    ) -> None:
        put(tmp_path, rows(50, 5000), "out", buckets=3)
        decided = point != "driver-decides"
        with writer(tmp_path, "out", local_socket=False) as queue:
            queue.put_batch(rows(20, 5050))
            with driver(tmp_path, BATCH, "local[2]", "overwrite", hold=point) as made:
                made.until_held(point)
                made.kill()
            until_true(lambda: files_of_handovers(tmp_path / "out") == [])
            queue.put_batch(rows(20, 6000))
            before = [*range(1000)] if decided else [*range(5000, 5070)]
            assert ids(tmp_path, "out") == [*before, *range(6000, 6020)]
            kept = [*range(6000, 6020)] if decided else []
            for _ in range(2):
                save(batch(spark), tmp_path, "overwrite")
                assert ids(tmp_path, "out") == [*range(1000), *kept]
            queue.put_batch(rows(20, 6020))
        check(spark, tmp_path, [*range(1000), *kept, *range(6020, 6040)])

    @pytest.mark.parametrize("point", ["owner-commits", "owner-committed", "owner-answers"])
    def test_killed_owner_during_an_overwrite_has_every_bucket_replaced_once(
        self, spark: SparkSession, tmp_path: Path, point: str
    ) -> None:
        """The driver takes the lock of the dead owner, and completes the write."""
        put(tmp_path, rows(50, 4000), "out", buckets=3, enable_wal=True)
        with held_process(tmp_path, OWNER, 5000, "out", hold=point) as owner:
            owner.until(lambda: owner.acknowledged > 5000)
            with killed_at(owner, point):
                save(batch(spark), tmp_path, "overwrite")
        put(tmp_path, rows(20, 1_000_000), "out")
        before = content(tmp_path, "out")
        save(batch(spark), tmp_path, "overwrite")
        assert content(tmp_path, "out") == before
        for bucket, found in before.items():
            own = [r["id"] for r in found if 5000 <= r["id"] < 1_000_000]
            put_to = [i for i in range(5000, max(own, default=0) + 1) if bucket_of(i, 3) == bucket]
            assert own == put_to[len(put_to) - len(own) :]  # what was put after the replacement
        put_since = [i for i in ids(tmp_path, "out") if i >= 5000]
        check(spark, tmp_path, [*range(1000), *put_since])

    def test_driver_that_waits_for_a_stopped_owner_says_so_on_its_terminal(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """It waits in a process that Spark has started for it."""
        put(tmp_path, [], "out", buckets=1, enable_wal=True)
        with held_process(tmp_path, OWNER, 5000, "out") as owner:
            owner.until(lambda: owner.acknowledged > 5000)
            with driver(tmp_path, BATCH, "local[2]", "append", hold="driver-sends") as made:
                made.until_held("driver-sends")
                owner.stop()
                made.let_go("driver-sends")
                words = f"waiting for process {owner.process.pid} on "
                made.until(lambda: words in made.output)
                owner.process.send_signal(signal.SIGCONT)
                made.finish()
        assert [i for i in ids(tmp_path, "out") if i < 5000] == list(range(1000))

    @pytest.mark.parametrize("program", ["batch", "stream"])
    def test_killed_task_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path, program: str
    ) -> None:
        put(tmp_path, rows(1000), "in", buckets=2)
        put(tmp_path, [], "out", buckets=3)
        with writer(tmp_path, "out") as queue:
            queue.put_batch(rows(20, 5000))
            master = "local[2,4]"
            given = (BATCH, master, "append") if program == "batch" else (STREAM, master, 400)
            with driver(tmp_path, *given, hold="written") as made:
                end([made.until_held("written")])
                made.finish()
            queue.put_batch(rows(20, 5020))
        check(spark, tmp_path, [*range(1000), *range(5000, 5040)])

    def test_killed_executor_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        put(tmp_path, [], "out", buckets=3)
        with writer(tmp_path, "out") as queue:
            queue.put_batch(rows(20, 5000))
            write_with_a_killed_executor(tmp_path)
            queue.put_batch(rows(20, 5020))
        check(spark, tmp_path, [*range(1000), *range(5000, 5040)])

    @pytest.mark.parametrize("point", OWNER_POINTS)
    @pytest.mark.parametrize("program", ["batch", "stream"])
    def test_killed_owner_loses_and_repeats_nothing(
        self, spark: SparkSession, tmp_path: Path, program: str, point: str
    ) -> None:
        put(tmp_path, rows(1000), "in", buckets=2)
        put(tmp_path, [], "out", buckets=3, enable_wal=True)
        with held_process(tmp_path, OWNER, 5000, "out", hold=point) as owner:
            owner.until(lambda: owner.acknowledged > 5000)
            with killed_at(owner, point):
                if program == "batch":
                    save(batch(spark), tmp_path)
                else:
                    SparkPipe(spark, tmp_path).run({"maxOffsetsPerTrigger": 400})
            acknowledged = owner.acknowledged
        found = ids(tmp_path, "out")
        stored = [i for i in found if i >= 5000]
        assert len(stored) >= acknowledged - 5000
        check(spark, tmp_path, [*range(1000), *range(5000, 5000 + len(stored))])
