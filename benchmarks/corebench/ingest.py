"""Ingest rates, and whether flushes stay as fast as the table grows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from corebench import records
from corebench.report import Run, Target, percentile, rate, stopwatch
from persisting.queue import LanceBackend, PersistingBackend

PUT = 1000
FLUSH = 50_000


def ingest(run: Run) -> None:
    """Put dicts and Arrow into LanceBackend, compared with a Lance write of the same rows."""
    made = records.batches(run.records, PUT)
    rows = [record for batch in made for record in batch]
    ours, bulk = run.best(
        lambda folder: asyncio.run(_put_dicts(folder, made)),
        lambda folder: _bulk_write(folder, rows),
    )
    run.add(
        "ingest",
        f"LanceBackend put_batch({PUT:,}), flushes of {FLUSH:,}",
        ours,
        "rec/s",
        "from_pylist + one Lance write",
        bulk,
        Target("ratio", at_least=0.6),
    )
    tables = [pa.Table.from_pylist(rows[i : i + FLUSH]) for i in range(0, len(rows), FLUSH)]
    plain, compacted, raw = run.best(
        lambda folder: asyncio.run(_put_arrow(folder, tables, compaction=False)),
        lambda folder: asyncio.run(_put_arrow(folder, tables)),
        lambda folder: _append_each(folder, tables),
    )
    beside = ("rec/s", "Lance append, not synced", raw)
    name = f"LanceBackend put_arrow({FLUSH:,}) + flush"
    run.add("ingest", f"{name}, not compacted", plain, *beside, Target("ratio", at_least=0.8))
    run.add("ingest", f"{name}, compacted", compacted, *beside)


async def _put_dicts(folder: Path, made: list[list[dict[str, Any]]]) -> float:
    backend = LanceBackend(bucket_id=0, storage_path=str(folder / "b"), flush_threshold=FLUSH)
    with stopwatch() as seconds:
        for batch in made:
            await backend.put_batch(batch)
        await backend.close()
    return rate(sum(map(len, made)), seconds())


def _bulk_write(folder: Path, rows: list[dict[str, Any]]) -> float:
    with stopwatch() as seconds:
        lance.write_dataset(pa.Table.from_pylist(rows), str(folder / "raw.lance"))
    return rate(len(rows), seconds())


async def _put_arrow(folder: Path, tables: list[pa.Table], **options: Any) -> float:
    backend = LanceBackend(
        bucket_id=0,
        storage_path=str(folder / "b"),
        flush_threshold=10 * len(tables) * FLUSH,
        **options,
    )
    with stopwatch() as seconds:
        for table in tables:
            await backend.put_arrow(table)
            await backend.flush()
        await backend.close()
    return rate(sum(t.num_rows for t in tables), seconds())


def _append_each(folder: Path, tables: list[pa.Table]) -> float:
    uri = str(folder / "raw.lance")
    with stopwatch() as seconds:
        for number, table in enumerate(tables):
            lance.write_dataset(table, uri, mode="append" if number else "create")
    return rate(sum(t.num_rows for t in tables), seconds())


def growth(run: Run) -> None:
    """Flush 1,000 records at a time and compare the last tenth of the flushes with the first."""
    made = records.batches(run.records, PUT)
    with run.scratch() as folder:
        for kind, options in (
            (LanceBackend, {}),
            (PersistingBackend, {"enable_wal": True, "wal_sync_interval": 0.0}),
        ):
            times = asyncio.run(_flush_each(kind, folder / kind.__name__, made, options))
            _report_growth(run, kind.__name__, times)
        _report_growth(run, "raw Lance append", _append_timed(folder / "raw.lance", made))
        _reopen(run, folder / "LanceBackend", len(made))
    _pauses(run)


def _report_growth(run: Run, name: str, times: list[float]) -> None:
    tenth = max(1, len(times) // 10)
    first, last = sum(times[:tenth]) / tenth, sum(times[-tenth:]) / tenth
    run.add(
        "growth",
        f"{name}, flush of {PUT:,}, last tenth",
        last * 1000,
        "ms",
        "its first tenth",
        first * 1000,
        None if name.startswith("raw") else Target("ratio", at_most=1.2),
    )


async def _flush_each(
    kind: Any, path: Path, made: list[list[dict[str, Any]]], options: dict[str, Any]
) -> list[float]:
    backend = kind(bucket_id=0, storage_path=str(path), flush_threshold=1 << 40, **options)
    times = []
    for batch in made:
        started = time.perf_counter()
        await backend.put_batch(batch)
        await backend.flush()
        times.append(time.perf_counter() - started)
    await backend.close()
    return times


def _append_timed(path: Path, made: list[list[dict[str, Any]]]) -> list[float]:
    times = []
    for number, batch in enumerate(made):
        started = time.perf_counter()
        table = pa.Table.from_pylist(batch)
        lance.write_dataset(table, str(path), mode="append" if number else "create")
        times.append(time.perf_counter() - started)
    return times


def _reopen(run: Run, path: Path, flushes: int) -> None:
    opened = []
    for _ in range(5):
        with stopwatch() as seconds:
            backend = LanceBackend(bucket_id=0, storage_path=str(path))
        opened.append(seconds() * 1000)
        asyncio.run(backend.close())
    run.add(
        "growth",
        f"reopening {flushes * PUT:,} rows of {flushes:,} flushes",
        min(opened),
        "ms",
        target=Target("value", at_most=50),
    )


def _pauses(run: Run) -> None:
    """Measure how long puts wait while flushes run."""
    made = records.batches(run.records, 100)
    with run.scratch() as folder:
        waits = asyncio.run(_put_timed(folder, made))
    run.add(
        "growth",
        "PersistingBackend put_batch(100), 99.9 % wait",
        percentile(waits, 0.999) * 1000,
        "ms",
        "the longest wait",
        max(waits) * 1000,
        Target("value", at_most=100),
    )


async def _put_timed(folder: Path, made: list[list[dict[str, Any]]]) -> list[float]:
    backend = PersistingBackend(bucket_id=0, storage_path=str(folder / "b"), enable_wal=True)
    waits = []
    for batch in made:
        started = time.perf_counter()
        await backend.put_batch(batch)
        waits.append(time.perf_counter() - started)
    await backend.close()
    return waits
