"""Where our time goes: repeats the work of Spark's Python processes without Spark.

The same parts are read by as many threads as Spark runs tasks. The same rows are written by one
thread, so that Python's lock does not matter, and its time is divided by the number of tasks. The
time of a reading step is the time up to its end minus that of the steps before. The rest of Spark's
time is Java, and the transfer between Java and Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lance
import lance.fragment
import pyarrow as pa
import pyarrow.parquet as pq
from corebench.report import stopwatch

from sparkbench.batches import into_nothing
from sparkbench.rows import COLUMNS, PRUNED, Bench, append_to_topic

Batches = Iterable[pa.RecordBatch]
_BATCH = 65_536
_SPARKS_BATCH = 10_000


def profile(bench: Bench, parts: list[str]) -> None:
    if "read" in parts or "stream" in parts:
        for name, columns in (("2 of 6 columns", PRUNED), ("all columns", COLUMNS)):
            _show(bench, f"reading {name}", *_reading(bench, columns))
    if "write" in parts or "stream" in parts:
        _show(bench, "writing", *_writing(bench))


def _show(bench: Bench, title: str, steps: dict[str, float], whole: float) -> None:
    """Add a line for every step, and one for the rest, which is Spark's."""
    rest = {"Spark itself": whole - sum(steps.values())}
    for name, seconds in {**steps, **rest}.items():
        bench.run.add("profile", f"{title}: {name}", seconds, "s", "all of it", whole)


def _reading(bench: Bench, columns: list[str]) -> tuple[dict[str, float], float]:
    from persisting.spark.batch_reader import TopicReader
    from persisting.spark.source import read_schema
    from persisting.spark.source_options import read_options

    options = read_options({"path": bench.topic, "columns": ",".join(columns)})
    with stopwatch() as planning:
        reader = TopicReader(options, read_schema(options))
        parts = reader.partitions()
    tables = sorted(Path(bench.topic).glob("bucket_*/data.lance"))
    lances = _best(bench, tables, lambda table: _drain(_lance(table, columns)))
    ours = _best(bench, parts, lambda part: _drain(reader.read(part)))
    sent = _best(bench, parts, lambda part: _serialize(reader.read(part)))
    whole = []
    for _ in range(bench.run.repeat + 1):
        with stopwatch() as seconds:
            into_nothing(bench.topic_rows(columns))
        whole.append(seconds())
    return {
        f"planning {len(parts)} tasks": planning(),
        "Lance alone": lances,
        "offsets and types": max(0.0, ours - lances),
        "Arrow's stream": max(0.0, sent - ours),
    }, min(whole)


def _lance(table: Path, columns: list[str]) -> Batches:
    """Read the rows of a bucket with Lance alone."""
    scanner = lance.dataset(str(table)).scanner(columns=columns, batch_size=_BATCH)
    found: Batches = scanner.to_batches()
    return found


def _drain(batches: Batches) -> None:
    for _ in batches:
        pass


def _serialize(batches: Batches) -> None:
    writer = None
    for batch in batches:
        writer = writer or pa.ipc.new_stream(pa.PythonFile(_Nowhere(), "w"), batch.schema)
        writer.write_batch(batch)


class _Nowhere:
    """A file that discards its input after a copy, as a socket makes one."""

    closed = False

    def write(self, data: bytes) -> int:
        return len(bytes(data))

    def flush(self) -> None:
        pass


def _writing(bench: Bench) -> tuple[dict[str, float], float]:
    from persisting.spark import sink, write_task
    from persisting.spark.source_options import write_options
    from persisting.spark.write_plan import plan_write
    from persisting.table import checksums, files

    parts = [_batches(path) for path in sorted(Path(bench.parquet).glob("*.parquet"))]
    inner = {
        "types": (write_task, "accept"),
        "dividing by bucket": (write_task, "table_by_bucket"),
        "Lance alone": (lance.fragment, "write_fragments"),
        "checksums": (checksums, "sign"),
        "syncing": (files, "sync_data"),
    }
    found: list[tuple[float, dict[str, float]]] = []
    whole = []
    for _ in range(bench.run.repeat):
        with bench.run.scratch() as folder:
            with stopwatch() as seconds:
                append_to_topic(bench, bench.parquet_rows(), str(folder / "spark"))
            whole.append(seconds())
            given = {"path": str(folder / "replay"), "numBuckets": str(bench.buckets)}
            options = write_options(given)
            with stopwatch() as planning:
                plan = plan_write(options, parts[0][0].schema)
            with _timed(inner) as within, stopwatch() as all_tasks:
                written = [write_task.write_task(plan, iter(one)) for one in parts]
            with stopwatch() as committing:
                sink.commit(options, written, ("spark:replay", 0))
        within["the rest of the tasks"] = all_tasks() - sum(within.values())
        steps = {name: took / _tasks(bench) for name, took in within.items()}
        steps = {"planning": planning(), **steps, "commit": committing()}
        found.append((sum(steps.values()), steps))
    return min(found, key=lambda one: one[0])[1], min(whole)


def _batches(path: Path) -> list[pa.RecordBatch]:
    return pq.read_table(path).to_batches(_SPARKS_BATCH)


@contextmanager
def _timed(functions: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """Measure the seconds that functions take, each given by its module and name."""
    seconds = dict.fromkeys(functions, 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    with ExitStack() as stack:
        for name, (module, attribute) in functions.items():
            function = timed(name, getattr(module, attribute))
            stack.enter_context(patch.object(module, attribute, function))
        yield seconds


def _best(bench: Bench, slices: list[Any], work: Callable[[Any], None]) -> float:
    found = []
    for _ in range(bench.run.repeat):
        with stopwatch() as seconds, _threads(bench) as pool:
            list(pool.map(work, slices))
        found.append(seconds())
    return min(found)


def _threads(bench: Bench) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_tasks(bench))


def _tasks(bench: Bench) -> int:
    return bench.spark.sparkContext.defaultParallelism
