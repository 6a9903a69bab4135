"""Sessions: their settings, which settings win, and that they leave no files behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spark.processes import Run, spark_home

import persisting
from persisting.errors import StorageError
from persisting.spark import java, session, settings

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession

ELSEWHERE = "spark://elsewhere:7077"
C1 = "-XX:TieredStopAtLevel=1"
SERIAL = "-XX:+UseSerialGC"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "PYSPARK_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(name, raising=False)


class TestMasters:
    @pytest.mark.parametrize(
        ("master", "cores"),
        [
            ("local", 1),
            ("local[3]", 3),
            ("local[*]", len(os.sched_getaffinity(0))),
            ("local[4, 2]", 4),
            ("local-cluster[2,3,1024]", 6),
            ("local-cluster[2, 1, 1024]", 2),
            (ELSEWHERE, None),
            ("yarn", None),
            ("k8s://https://host", None),
            ("localhost", None),
        ],
    )
    def test_local_masters_are_recognized_with_their_cores(
        self, master: str, cores: int | None
    ) -> None:
        assert settings.local_cores(master) == cores


class TestDefaults:
    def test_quick_flags_are_for_masters_on_this_machine(self, tmp_path: Path) -> None:
        here = settings.defaults("local-cluster[2,1,1024]", tmp_path, {})
        there = settings.defaults(ELSEWHERE, tmp_path, {})
        for role in ("driver", "executor"):
            assert here[f"spark.{role}.defaultJavaOptions"].endswith(f" {C1} {SERIAL}")
        assert C1 not in there["spark.driver.defaultJavaOptions"]
        assert "log4j2.properties" in there["spark.driver.defaultJavaOptions"]
        assert "spark.executor.defaultJavaOptions" not in there
        assert "spark.sql.shuffle.partitions" not in there

    def test_garbage_collector_of_the_caller_replaces_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        conf = {"spark.driver.extraJavaOptions": "-Xss4m -XX:+UseG1GC"}
        chosen = settings.defaults("local[2]", tmp_path, conf)
        assert SERIAL not in chosen["spark.driver.defaultJavaOptions"]
        assert SERIAL in chosen["spark.executor.defaultJavaOptions"]
        monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UseZGC")
        assert SERIAL not in str(settings.defaults("local[2]", tmp_path, {}))

    @pytest.mark.parametrize(("master", "partitions"), [("local", "2"), ("local[6]", "6")])
    def test_shuffles_have_one_partition_per_core(
        self, tmp_path: Path, master: str, partitions: str
    ) -> None:
        chosen = settings.defaults(master, tmp_path, {})
        assert chosen["spark.sql.shuffle.partitions"] == partitions


class TestEnvironment:
    def test_spark_binds_to_this_machine_unless_configured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert settings.variables("local[2]", {})["SPARK_LOCAL_IP"] == "127.0.0.1"
        assert "SPARK_LOCAL_IP" not in settings.variables(ELSEWHERE, {})
        monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.1")
        assert settings.variables("local[2]", {})["SPARK_LOCAL_IP"] == "10.0.0.1"

    def test_workers_run_this_python_unless_another_is_configured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = settings.variables("local[2]", {})
        assert chosen["PYSPARK_PYTHON"] == chosen["PYSPARK_DRIVER_PYTHON"] == sys.executable
        monkeypatch.setenv("PYSPARK_PYTHON", "/env/python")
        assert settings.variables("local[2]", {})["PYSPARK_PYTHON"] == "/env/python"
        conf = {"spark.pyspark.python": "/conf/python"}
        assert settings.variables("local[2]", conf)["PYSPARK_PYTHON"] == "/conf/python"

    def test_locale_lets_java_open_files_with_any_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LC_ALL", "LC_CTYPE", "LANG"):
            monkeypatch.delenv(name, raising=False)
        assert settings.variables("local[2]", {})["LC_ALL"] == "C.UTF-8"
        monkeypatch.setenv("LANG", "de_DE.UTF-8")
        assert "LC_ALL" not in settings.variables("local[2]", {})
        monkeypatch.setenv("LC_ALL", "C")
        assert settings.variables("local[2]", {})["LC_ALL"] == "C.UTF-8"

    def test_environment_is_restored_after_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONE", "1")
        monkeypatch.delenv("TWO", raising=False)
        before = dict(os.environ)
        with settings.environment({"ONE": "one", "TWO": "two"}):
            assert (os.environ["ONE"], os.environ["TWO"]) == ("one", "two")
        assert dict(os.environ) == before


class TestWithoutSpark:
    def test_missing_pyspark_raises_with_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyspark", None)
        with pytest.raises(StorageError, match=r"pip install 'persisting\[spark\]'"):
            session()


class TestRunningSession:
    @pytest.fixture(autouse=True)
    def shuffle_partitions(self, spark: SparkSession) -> Iterator[None]:
        yield
        spark.conf.set("spark.sql.shuffle.partitions", "2")

    def test_running_session_is_returned_with_changed_settings(self, spark: SparkSession) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same = session(
                master="local[2]",
                conf={"spark.sql.shuffle.partitions": 7, "spark.ui.enabled": False},
            )
        assert same is spark
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"

    def test_running_session_keeps_settings_that_conf_does_not_name(
        self, spark: SparkSession
    ) -> None:
        spark.conf.set("spark.sql.shuffle.partitions", "11")
        session(master="local[2]", conf={"spark.sql.warehouse.dir": None})
        assert spark.conf.get("spark.sql.shuffle.partitions") == "11"

    def test_different_master_of_a_running_session_warns(self, spark: SparkSession) -> None:
        with pytest.warns(UserWarning, match=r"already running with master 'local\[2\]'") as caught:
            assert session(master="local[1]") is spark
        assert [warning.filename for warning in caught] == [__file__]

    def test_running_session_is_returned_without_a_master(self, spark: SparkSession) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert session() is spark

    def test_settings_that_cannot_be_changed_warn(self, spark: SparkSession) -> None:
        late = {"spark.executor.memory": "3g", "spark.sql.warehouse.dir": "/elsewhere"}
        wanted = r"memory, spark\.sql\.warehouse\.dir"
        with pytest.warns(UserWarning, match=wanted) as caught:
            session(master="local[2]", conf={**late, "spark.sql.shuffle.partitions": "5"})
        assert spark.conf.get("spark.sql.shuffle.partitions") == "5"
        assert [warning.filename for warning in caught] == [__file__]


class TestWorkers:
    def test_workers_import_the_same_persisting(self, spark: SparkSession) -> None:
        def where(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
            import pyarrow as pa

            import persisting

            for batch in batches:
                yield pa.record_batch({"file": [persisting.__file__] * batch.num_rows})

        found = spark.range(2, numPartitions=2).mapInArrow(where, "file string").distinct()
        assert [row.file for row in found.collect()] == [persisting.__file__]

    def test_workers_know_the_format(self, spark: SparkSession, tmp_path: Path) -> None:
        with pytest.raises(Exception, match=str(tmp_path)) as raised:
            spark.read.format("persisting").load(str(tmp_path / "no" / "topic"))
        assert "DATA_SOURCE_NOT_FOUND" not in str(raised.value)


HEAD = """
import os, sys
from persisting.spark import session
"""


class TestSessionInANewProcess:
    def test_new_session_prints_nothing(self, alone: Run) -> None:
        assert alone.result["rows"] == 10
        assert (alone.stdout, alone.stderr) == ("", "")

    def test_new_session_leaves_no_files_behind(self, alone: Run) -> None:
        folder = Path(alone.result["conf"]["spark.local.dir"]).parent
        assert folder.parent == alone.temporary
        assert sorted(alone.result["folder"]) == ["local", "warehouse"]
        assert list(alone.temporary.iterdir()) == []
        assert list(alone.cwd.iterdir()) == []

    def test_settings_of_the_caller_override_ours(self, alone: Run) -> None:
        conf = alone.result["conf"]
        assert alone.result["master"] == "local[1]"
        assert conf["spark.sql.shuffle.partitions"] == "5"
        assert "spark.executor.defaultJavaOptions" not in conf
        assert alone.result["set.by"] == "me"
        assert C1 in conf["spark.driver.defaultJavaOptions"]

    def test_our_settings_apply_by_default(self, alone: Run) -> None:
        assert alone.result["app"] == "persisting"
        assert alone.result["arrow"] == "true"
        assert alone.result["conf"]["spark.ui.enabled"] == "false"
        assert alone.result["conf"]["spark.driver.host"] in ("localhost", "127.0.0.1")

    def test_new_session_whose_pruning_is_off_reads_all_columns(self, alone: Run) -> None:
        by_path, by_name = alone.result["plans"]
        assert re.search(r"RelationV2\[id#\d+L, text#\d+\] persisting\n", by_path)
        assert re.search(r"RelationV2\[id#\d+L, text#\d+\] persisting\.t\n", by_name)

    def test_new_session_has_our_daemon_and_unix_sockets(self, alone: Run) -> None:
        conf = alone.result["conf"]
        assert conf["spark.python.daemon.module"] == "persisting.spark.worker_daemon"
        assert conf["spark.python.unix.domain.socket.enabled"] == "true"

    def test_new_session_does_not_change_the_environment(self, alone: Run) -> None:
        assert alone.result["environ"] == []


@pytest.mark.nightly
@pytest.mark.timeout(400)
class TestOtherWaysToRun:
    def test_no_files_are_left_when_python_is_killed(self, tmp_path: Path) -> None:
        code = HEAD + (
            'session(master="local[1]").range(3).count(); print(flush=True); sys.stdin.read()'
        )
        with Run(tmp_path, code) as run:
            assert run.process.stdout is not None
            run.process.stdout.readline()
            assert [p.name[:17] for p in run.temporary.iterdir()] == ["persisting-spark-"]
            run.process.send_signal(signal.SIGKILL)
            run.finish()
            assert list(run.temporary.iterdir()) == []

    def test_no_files_are_left_when_java_is_killed(self, tmp_path: Path) -> None:
        code = HEAD + (
            "from pyspark import SparkContext\n"
            'session(master="local[1]")\n'
            "SparkContext._gateway.proc.kill(); SparkContext._gateway.proc.wait(); result = {}"
        )
        with Run(tmp_path, code) as run:
            run.finish()
            assert run.result == {}
            assert list(run.temporary.iterdir()) == []

    def test_exit_with_a_running_stream_prints_nothing(self, tmp_path: Path) -> None:
        code = HEAD + (
            'rate = session(master="local[2]").readStream.format("rate").load()\n'
            'query = rate.writeStream.format("noop").start()\n'
            "while not query.lastProgress: pass\n"
            "result = {}"
        )
        with Run(tmp_path, code) as run:
            run.finish()
            assert run.result == {}
            assert (run.stdout, run.stderr) == ("", "")
            assert list(run.temporary.iterdir()) == []

    def test_second_session_starts_after_the_first_was_stopped(self, tmp_path: Path) -> None:
        code = HEAD + (
            "result = {}\n"
            "for cores in (1, 2):\n"
            '    spark = session(master=f"local[{cores}]")\n'
            "    result[spark.sparkContext.master] = spark.range(3).count()\n"
            "    spark.stop()\n"
        )
        with Run(tmp_path, code) as run:
            run.finish()
            assert run.result == {"local[1]": 3, "local[2]": 3}
            assert (run.stdout, run.stderr) == ("", "")
            assert list(run.temporary.iterdir()) == []

    def test_executors_of_a_cluster_import_persisting_from_the_path_of_the_driver(
        self, tmp_path: Path
    ) -> None:
        # A copy that is not installed.
        package = Path(persisting.__file__).parent
        shutil.copytree(package, tmp_path / "copy" / "persisting")
        code = f"import sys; sys.path.insert(0, {str(tmp_path / 'copy')!r})" + HEAD + IN_A_CLUSTER
        with Run(tmp_path, code, SPARK_HOME=str(spark_home(tmp_path / "spark"))) as run:
            run.finish()
            assert run.result["executors"] == 2
            assert run.result["files"] == [str(tmp_path / "copy" / "persisting" / "__init__.py")]
            assert (run.stdout, run.stderr) == ("", "")
            assert list(run.temporary.iterdir()) == []
            assert list(run.cwd.iterdir()) == []

    def test_settings_of_spark_submit_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = HEAD + (
            "spark = session()\n"
            'result = {"master": spark.sparkContext.master, "rows": spark.range(3).count(),\n'
            '  "partitions": spark.conf.get("spark.sql.shuffle.partitions"),\n'
            '  "arrow": spark.conf.get("spark.sql.execution.arrow.pyspark.enabled")}'
        )
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own cache"))
        env = {"JAVA_HOME": str(java.java_home()), "PYSPARK_PYTHON": sys.executable}
        submit = str(Path(sys.executable).with_name("spark-submit"))
        command = [submit, "--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=9"]
        with Run(tmp_path, code, command=command, **env) as run:
            run.finish()
            assert run.result == {
                "master": "local[1]",
                "rows": 3,
                "partitions": "9",
                "arrow": "true",
            }


IN_A_CLUSTER = """
def where(batches):
    import os, time
    import persisting
    import pyarrow as pa

    for batch in batches:
        found = [persisting.__file__] * batch.num_rows
        yield pa.record_batch({"file": found, "executor": [os.getcwd()] * batch.num_rows})

spark = session(master="local-cluster[2,1,1024]")
# Both executors get work only if both have started.
status = spark.sparkContext._jsc.sc().statusTracker()
while len(status.getExecutorInfos()) < 3:
    pass
rows = spark.range(8, numPartitions=8).mapInArrow(where, "file string, executor string").collect()
result = {
    "files": sorted({row.file for row in rows}),
    "executors": len({row.executor for row in rows}),
}
"""
