"""Tasks of Spark that are held until a test lets them go on, and work beside the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SECONDS = 100


class BackgroundWork:
    """Work of Spark in another thread; what it raises is raised where it is waited for."""

    def __init__(self, spark: SparkSession, work: Callable[[], Any]) -> None:
        self._spark, self._work = spark, work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            # A thread of Java's own knows no Python sources until it has a session.
            self._spark._jvm.SparkSession.setActiveSession(self._spark._jsparkSession)
            self._work()
        except BaseException as exc:
            self._failure = exc

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        self._thread.join(_SECONDS)
        self.check()
        assert not self._thread.is_alive(), "the work beside the test never ended"

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something to become true while the work goes on."""
        deadline = time.monotonic() + _SECONDS
        while not true():
            self.check()
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.05)


class Gate:
    """Holds the tasks through which a DataFrame flows."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._began, self.opened = str(folder / "began"), str(folder / "open")

    def hold(self, df: DataFrame) -> DataFrame:
        began, opened = self._began, self.opened

        def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os
            import time

            open(began, "w").close()
            while not os.path.exists(opened):
                time.sleep(0.02)
            yield from batches

        return df.mapInArrow(wait, df.schema)

    def has_tasks(self) -> bool:
        return Path(self._began).exists()

    def let_go(self) -> None:
        Path(self.opened).touch()

    @contextmanager
    def holding(self, spark: SparkSession, work: Callable[[], Any]) -> Iterator[BackgroundWork]:
        """Inside, tasks of ``work`` are held; it is done when this is left."""
        beside = BackgroundWork(spark, work)
        try:
            beside.until(self.has_tasks)
            yield beside
        finally:
            self.let_go()
            beside.join()
