"""Spark tasks that wait until a test releases them, and work in the background of a test."""

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
    """Spark work in another thread; ``join`` raises what it raised."""

    def __init__(self, spark: SparkSession, work: Callable[[], Any]) -> None:
        self._spark, self._work = spark, work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            # A new Java thread has no session, and so knows no Python data sources.
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
        assert not self._thread.is_alive(), "the work in the background never ended"

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until ``true()`` while the work continues."""
        deadline = time.monotonic() + _SECONDS
        while not true():
            self.check()
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.05)


class Gate:
    """Blocks the tasks of a DataFrame until it is opened."""

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
        """Block the tasks of ``work`` inside the block; ``work`` has ended when it is left."""
        beside = BackgroundWork(spark, work)
        try:
            beside.until(self.has_tasks)
            yield beside
        finally:
            self.let_go()
            beside.join()
