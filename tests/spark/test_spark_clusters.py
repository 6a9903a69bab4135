"""Source, sink and jobs with tasks outside of the driver's process: in a local cluster, on a
standalone master with a worker, and through a Spark Connect server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.spark.processes import Run, plain_environment, spark_home
from support.spark.topics import content, ids, is_sound, rows, unreferenced, writer

import persisting
from persisting.spark import java
from persisting.topic.routing import bucket_of

# Every cluster takes minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

LOCAL, STANDALONE, CONNECT = "local-cluster", "standalone", "connect"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
MASTER_READY = re.compile(r"Starting Spark master at (spark://\S+)")
WORKER_READY = re.compile(r"Successfully registered with master (\S+)")
CONNECT_READY = re.compile(r"Spark Connect server started at: (\S+)")
PATIENCE = 120


class Driver(Run):
    """A driver that takes all processes it started with it when it ends."""

    def __init__(self, folder: Path, code: str, *args: object, **env: str) -> None:
        super().__init__(folder, code, *args, command=["setsid", sys.executable], **env)

    def __exit__(self, *exc: object) -> None:
        kill(self.process)
        super().__exit__(*exc)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process group by its leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def server(folder: Path, command: list[str], ready: re.Pattern[str], **env: str) -> Iterator[str]:
    """Run a program of the pyspark package during the block; yield what it prints when ready."""
    import pyspark

    home = Path(pyspark.__file__).parent
    folder.mkdir()
    log = folder / "log"
    environ = {
        **plain_environment(),
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java.java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(folder),
        **env,
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(home / "bin" / command[0]), *command[1:]],
            cwd=folder,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (found := ready.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        kill(process)
        process.wait()


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """Run a master and a worker with two cores; yield the master's address."""
    deploy = "org.apache.spark.deploy"
    here = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    master = ["spark-class", f"{deploy}.master.Master", *here]
    with server(folder / "master", master, MASTER_READY) as address:
        place = ["--cores", "2", "--memory", "1g", "--work-dir", str(folder / "work")]
        worker = ["spark-class", f"{deploy}.worker.Worker", *here, *place, address]
        with server(folder / "worker", worker, WORKER_READY):
            yield address


@contextmanager
def connect(folder: Path, *arguments: str, **env: str) -> Iterator[str]:
    """Run a Spark Connect server with two cores; yield its address."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
    }
    command = ["spark-submit", "--master", "local[2]", *arguments]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with server(folder / "connect", command, CONNECT_READY, **env) as address:
        yield f"sc://{address}"


class Cluster:
    """The results of a driver that did everything once on one kind of cluster."""

    def __init__(self, kind: str, folder: Path, run: Run) -> None:
        self.kind, self.folder, self._run = kind, folder, run

    def result(self, part: str) -> Any:
        """Return the result of a part of the program; raise if it failed."""
        found = self._run.result[part]
        assert "error" not in found, found["error"]
        return found["result"]


@pytest.fixture(scope="module", params=[LOCAL, STANDALONE, CONNECT])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp(request.param)
    topics = folder / "topics"
    topics.mkdir()
    with pytest.MonkeyPatch.context() as patch, writer(topics, "held") as owner:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        owner.put_batch(rows(5))
        owner.flush()
        if request.param == LOCAL:
            home = str(spark_home(folder / "spark"))
            run = drive(folder, EVERYTHING, LOCAL_CLUSTER, topics, SPARK_HOME=home)
        else:
            with {STANDALONE: standalone, CONNECT: connect}[request.param](folder) as address:
                run = drive(folder, EVERYTHING, address, topics, SPARK_LOCAL_IP="127.0.0.1")
    return Cluster(request.param, topics, run)


def drive(folder: Path, code: str, master: str, topics: Path, **env: str) -> Run:
    """Run a program that can import the helpers of these tests."""
    place = folder / "driver"
    place.mkdir()
    helpers = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Driver(place, code, master, topics, os.getpid(), PYTHONPATH=helpers, **env) as run:
        run.finish()
    return run


HEAD = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.spark.topics import load, records, refused, save
from persisting.spark import jobs, read_topic, session
from support.spark.writes import SparkPipe

master, folder, owner = sys.argv[1], Path(sys.argv[2]), f"process {sys.argv[3]} on "
spark = session(master=master)
result = {}


def part(work):
    try:
        result[work.__name__] = {"result": work()}
    except Exception as exc:
        result[work.__name__] = {"error": f"{type(exc).__name__}: {exc}"}


def numbers(start, end):
    return spark.range(start, end, numPartitions=4).selectExpr("id", "concat('row ', id) AS text")


if master.startswith("local-cluster"):
    status = spark.sparkContext._jsc.sc().statusTracker()
    while len(status.getExecutorInfos()) < 3:
        time.sleep(0.1)

"""

EVERYTHING = (
    HEAD
    + """
@part
def write():
    for _ in range(2):
        save(numbers(0, 100), folder, "in", numBuckets=2)


@part
def read():
    whole = load(spark, folder, "in", rowsPerPartition=30)
    some = read_topic(spark, folder, "in", columns=["text"], where="id < 2")
    spark.sql(f"CREATE TEMPORARY VIEW seen USING persisting OPTIONS (path '{folder}/in')")
    return {
        "ids": sorted(row["id"] for row in records(whole)),
        "some": sorted(row["text"] for row in records(some)),
        "sql": spark.sql("SELECT count(DISTINCT id) AS n FROM seen").first().n,
    }


@part
def metadata():
    df = load(spark, folder, "in", includeMetadata=True)
    places = [[row["_bucket"], row["_offset"], row["id"]] for row in records(df)]
    return {"columns": df.columns, "places": sorted(places)}


@part
def executors():
    def where(batches):
        import os
        import persisting
        import pyarrow as pa

        for batch in batches:
            each = [[text] * batch.num_rows for text in (os.getcwd(), persisting.__file__)]
            yield pa.record_batch(each, ["folder", "file"])

    df = load(spark, folder, "in", rowsPerPartition=30)
    found = records(df.mapInArrow(where, "folder string, file string").distinct())
    return {name: sorted({row[name] for row in found}) for name in ("folder", "file")}


@part
def unregistered():
    fresh = spark.newSession()
    return load(fresh, folder, "in").count()


@part
def joined():
    return session() is spark


@part
def stream():
    pipe = SparkPipe(spark, folder)
    pipe.run({"maxOffsetsPerTrigger": 150}, numBuckets=3)
    first = load(spark, folder, "out").count()
    save(numbers(100, 150), folder, "in")
    pipe.run()
    pipe.run()
    return first


@part
def repeated():
    pipe = SparkPipe(spark, folder)
    pipe.forget_last_commit()
    pipe.run()


@part
def incremental():
    done = jobs.incremental(spark, folder / "in", folder / "copy", quiet=True)
    return [done.rows, done.written, sum(done.lag.values())]


@part
def compact():
    before = records(load(spark, folder, "in", includeMetadata=True))
    done = jobs.compact(spark, folder, "in")
    after = records(load(spark, folder, "in", includeMetadata=True))
    key = lambda row: (row["_bucket"], row["_offset"])
    same = sorted(before, key=key) == sorted(after, key=key)
    return [done["fragments_before"], done["fragments_after"], done["rows"], same]


@part
def index():
    done = jobs.build_index(spark, folder, "in", column="id")
    return [done["kind"], done["rows"], done["behind"]]


@part
def deduplicate():
    df = load(spark, folder, "in", includeMetadata=True)
    return sorted(row["id"] for row in records(jobs.deduplicate(df, "id", keep="last")))


@part
def threads():
    def work():
        session()
        save(numbers(0, 7), folder, "threaded")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    return load(spark, folder, "threaded").count()


@part
def held():
    save(spark.range(100, 103), folder, "held")
    with refused("BucketLocked", owner):
        jobs.compact(spark, folder, "held")
    with refused("BucketLocked", owner):
        jobs.build_index(spark, folder, "held", column="id")
    return load(spark, folder, "held").count()


@part
def missing():
    with refused("NoSuchTopic", f"there is no topic 'nothing' in {folder}"):
        load(spark, folder, "nothing").count()


@part
def in_a_task():
    save(spark.sql("SELECT 1 AS id, array(1D, 2D) AS v"), folder, "vectors", vectors="v:2")
    with refused("SchemaError", "field 'v' holds vectors of 2 floats"):
        save(spark.sql("SELECT 2 AS id, array(1D, 2D, 3D) AS v"), folder, "vectors")
    return load(spark, folder, "vectors").count()


spark.stop()
"""
)

LOST = (
    HEAD
    + """
def dying(df, mark):
    mark = str(mark)

    def die(batches):
        yield from batches
        try:
            open(mark, "x").close()
        except FileExistsError:
            return
        with open(f"/proc/{os.getppid()}/stat") as daemon:
            executor = int(daemon.read().rpartition(")")[2].split()[1])
        os.kill(executor, signal.SIGKILL)
        time.sleep(60)

    return df.mapInArrow(die, df.schema)


@part
def write():
    rows = numbers(0, 600_000).coalesce(2)
    save(dying(rows, folder / "died1"), folder, "in", numBuckets=1)
    return load(spark, folder, "in").distinct().count()


@part
def stream():
    pipe = SparkPipe(spark, folder)
    pipe.run(change=lambda df: dying(df, folder / "died2"), numBuckets=1)
    return load(spark, folder, "out").distinct().count()


spark.stop()
"""
)

INSIDE = """
import io, sys
from contextlib import redirect_stdout
from pathlib import Path

from support.spark.topics import load, records, save
from persisting.spark import session

master, folder = sys.argv[1], Path(sys.argv[2])
spark = session(master=master, conf={"spark.api.mode": "connect"})
save(spark.range(5).coalesce(1), folder, numBuckets=1)
df = load(spark, folder, includeMetadata=True).where("id = 4").drop("_time")
plan = io.StringIO()
with redirect_stdout(plan):
    df.select("id").explain()
result = {"module": type(spark).__module__, "rows": records(df), "plan": plan.getvalue()}
"""

NAMED = """
import io, logging, sys
from contextlib import redirect_stdout
from pathlib import Path

from support.spark.topics import put, rows
from persisting.errors import StorageError
from persisting.spark import install_pruning, session

master, folder = sys.argv[1], Path(sys.argv[2])
put(folder, rows(20), "steps")
heard = logging.StreamHandler(io.StringIO())
logging.getLogger("persisting.spark").addHandler(heard)
logging.getLogger("persisting.spark").setLevel(logging.DEBUG)
spark = session(master=master)
df = spark.read.format("persisting").load(str(folder / "steps")).where("score > 3").select("id")
plan = io.StringIO()
with redirect_stdout(plan):
    df.explain()
result = {
    "installed": [install_pruning(spark), install_pruning(spark)],
    "plan": plan.getvalue(),
    "rows": sorted(row["id"] for row in df.collect()),
    "said": heard.stream.getvalue().splitlines(),
}
try:
    named = session(master=master, topics=folder)
    result["count"] = named.sql("SELECT count(*) FROM persisting.steps WHERE id < 5").first()[0]
except StorageError as exc:
    result["error"] = str(exc)
"""

SENT = (
    HEAD
    + """
import shutil

import persisting
from persisting.spark.source import PersistingSource

try:
    save(spark.range(5), folder)
except Exception as exc:
    result["missing"] = str(exc)


@part
def sent():
    home = Path(persisting.__file__).parent
    packed = shutil.make_archive(str(folder / "persisting"), "zip", home.parent, home.name)
    spark.addArtifacts(packed, pyfile=True)
    spark.dataSource.register(PersistingSource)
    save(spark.range(5), folder)
    return load(spark, folder).count()


spark.stop()
"""
)

WRITTEN = sorted([*range(100), *range(100), *range(100, 150)])


class TestBatch:
    def test_executors_write_an_ordinary_topic(self, cluster: Cluster) -> None:
        cluster.result("write")
        assert ids(cluster.folder, "in") == WRITTEN
        for bucket, some in content(cluster.folder, "in").items():
            assert {bucket_of(record["id"], 2) for record in some} == {bucket}
        assert is_sound(cluster.folder, "in")
        assert unreferenced(cluster.folder, "in") == []

    def test_executors_read_a_topic_whole_and_in_part(self, cluster: Cluster) -> None:
        assert cluster.result("read") == {
            "ids": sorted([*range(100), *range(100)]),
            "some": ["row 0", "row 0", "row 1", "row 1"],
            "sql": 100,
        }

    def test_executors_read_the_metadata_of_rows(self, cluster: Cluster) -> None:
        found = cluster.result("metadata")
        assert found["columns"] == ["id", "text", "_bucket", "_offset", "_time"]
        stored = content(cluster.folder, "in")
        for bucket, offset, number in found["places"]:
            assert stored[bucket][offset]["id"] == number
        assert len(found["places"]) == 200


class TestExecutors:
    def test_executors_import_the_persisting_of_the_driver(self, cluster: Cluster) -> None:
        found = cluster.result("executors")
        assert found["file"] == [persisting.__file__]
        assert len(found["folder"]) == (2 if cluster.kind == LOCAL else 1)
        assert not any("driver" in place for place in found["folder"])

    def test_executors_find_the_format_without_registration(self, cluster: Cluster) -> None:
        assert cluster.result("unregistered") == 200


class TestStream:
    def test_cluster_stream_stores_every_row_once_over_several_runs(self, cluster: Cluster) -> None:
        assert cluster.result("stream") == 200
        cluster.result("repeated")
        assert ids(cluster.folder, "out") == WRITTEN
        assert len(content(cluster.folder, "out")) == 3
        assert is_sound(cluster.folder, "out")
        assert unreferenced(cluster.folder, "out") == []

    def test_incremental_job_on_a_cluster_returns_its_summary(self, cluster: Cluster) -> None:
        assert cluster.result("incremental") == [250, 250, 0]
        assert ids(cluster.folder, "copy") == WRITTEN


class TestJobs:
    def test_compaction_on_executors_keeps_offsets(self, cluster: Cluster) -> None:
        before, after, changed, same = cluster.result("compact")
        assert before > after == 2
        assert (changed, same) == (250, True)

    def test_index_is_built_on_executors(self, cluster: Cluster) -> None:
        assert cluster.result("index") == ["btree", 250, 0]
        with writer(cluster.folder, "in") as queue:
            assert [(one["column"], one["rows"]) for one in queue.indexes()] == [("id", 250)]

    def test_duplicates_are_removed_on_executors(self, cluster: Cluster) -> None:
        assert cluster.result("deduplicate") == list(range(150))


class TestSession:
    def test_session_of_a_cluster_is_returned_again(self, cluster: Cluster) -> None:
        assert cluster.result("joined") is True


class TestNewThread:
    def test_new_thread_can_write_after_calling_session(self, cluster: Cluster) -> None:
        assert cluster.result("threads") == 7
        assert ids(cluster.folder, "threaded") == list(range(7))


class TestErrors:
    def test_error_for_an_open_topic_names_its_process(self, cluster: Cluster) -> None:
        assert cluster.result("held") == 8
        assert ids(cluster.folder, "held") == [*range(5), *range(100, 103)]

    def test_error_for_a_missing_topic_names_its_folder(self, cluster: Cluster) -> None:
        cluster.result("missing")

    def test_error_in_a_task_names_the_field_and_leaves_no_files(self, cluster: Cluster) -> None:
        assert cluster.result("in_a_task") == 1
        assert ids(cluster.folder, "vectors") == [1]
        assert unreferenced(cluster.folder, "vectors") == []


class TestLostExecutor:
    def test_executor_lost_during_a_write_loses_and_repeats_no_row(self, tmp_path: Path) -> None:
        home = spark_home(tmp_path / "spark")
        run = drive(tmp_path, LOST, LOCAL_CLUSTER, tmp_path, SPARK_HOME=str(home))
        executors = list((home / "work").glob("app-*/*"))
        assert len(executors) >= 4
        for part, topic in (("write", "in"), ("stream", "out")):
            assert run.result[part] == {"result": 600_000}
            assert ids(tmp_path, topic) == list(range(600_000))
            assert is_sound(tmp_path, topic)


class TestConnectServer:
    def test_connect_server_in_the_driver_reads_and_writes_silently(self, tmp_path: Path) -> None:
        run = drive(tmp_path, INSIDE, "local[2]", tmp_path)
        assert run.result["module"] == "pyspark.sql.connect.session"
        assert run.result["rows"] == [{"id": 4, "_bucket": 0, "_offset": 4}]
        assert "pushed: [(id IS NOT NULL), (id = 4L)]" in run.result["plan"]
        assert "_offset#" not in run.result["plan"]
        assert (run.stdout, run.stderr) == ("", "")

    def test_connect_server_with_the_extension_prunes_and_knows_names(self, tmp_path: Path) -> None:
        """Its classes are compiled with the command of the guide."""
        command = [sys.executable, "-m", "persisting.spark.compile_classes"]
        environ = {**plain_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        with connect(tmp_path, *done.stdout.split()) as address:
            run = drive(tmp_path, NAMED, address, tmp_path)
        assert run.result["installed"] == [True, True]
        assert "pushed: [(score IS NOT NULL), (score > 3.0D)]" in run.result["plan"]
        assert "text#" not in run.result["plan"]
        assert run.result["rows"] == [row["id"] for row in rows(20) if row["score"] > 3]
        assert run.result["said"] == []
        assert run.result["count"] == 5

    def test_connect_server_without_the_extension_reads_all_columns_and_says_so_once(
        self, tmp_path: Path
    ) -> None:
        with connect(tmp_path) as address:
            run = drive(tmp_path, NAMED, address, tmp_path)
        assert run.result["installed"] == [False, False]
        assert "pushed" not in run.result["plan"]
        assert run.result["rows"] == [row["id"] for row in rows(20) if row["score"] > 3]
        assert run.result["said"] == [
            "Spark reads all columns of topics: the Spark Connect server was started without our "
            "extension"
        ]
        assert "topics= needs our catalog" in run.result["error"]

    def test_connect_server_without_persisting_can_be_sent_it(self, tmp_path: Path) -> None:
        import pyspark

        library = str(Path(pyspark.__file__).parents[1])
        base = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
        with connect(tmp_path, PYSPARK_PYTHON=base, PYTHONPATH=library) as address:
            run = drive(tmp_path, SENT, address, tmp_path)
        assert "No module named 'persisting'" in run.result["missing"]
        assert run.result["sent"] == {"result": 5}
        assert ids(tmp_path) == list(range(5))
