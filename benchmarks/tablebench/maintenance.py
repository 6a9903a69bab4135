"""What maintenance costs during an ingest, and what it saves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
from corebench import records
from corebench.report import Run, percentile, stopwatch

from persisting.queue import LanceBackend
from tablebench.lance_tables import LANCE
from tablebench.sizes import Sizes

_FLUSHES = 1000
_OFF = "compaction=False"


class Ingested(NamedTuple):
    """The result of one ingest."""

    seconds: float
    flushes: list[float]
    fragments: int
    nbytes: int
    """On disk right after the ingest, with all versions of the last ten minutes."""
    least: int
    """On disk after compaction and the cleanup of old versions."""


def maintenance(run: Run, sizes: Sizes) -> None:
    """Ingest all records in 1000 flushes: with compaction, without it, and with raw Lance."""
    size = max(1000, sizes.records // _FLUSHES)
    rows = list(records.stream(sizes.records))
    tables = [pa.Table.from_pylist(rows[i : i + size]) for i in range(0, len(rows), size)]
    del rows
    found = {}
    for name, options in (
        ("on", {}),
        ("off", {"compaction": False}),
        ("on, btree", {"index": "scalar"}),
        ("off, btree", {"compaction": False, "index": "scalar"}),
    ):
        with run.scratch() as folder:
            found[name] = asyncio.run(_ingest(folder, tables, **options))
    with run.scratch() as folder:
        raw = _append_raw(folder, tables)
    million = sizes.records / 1e6
    for index in ("", ", btree"):
        on, off = found[f"on{index}"], found[f"off{index}"]
        _report(run, index, on, off, million)
    _report_raw(run, found["off"], raw, million)


async def _ingest(
    folder: Path, tables: list[pa.Table], *, index: str | None = None, **options: Any
) -> Ingested:
    backend = _open(folder, **options)
    flushes = []
    with stopwatch() as seconds:
        for number, table in enumerate(tables):
            started = time.perf_counter()
            await backend.put_arrow(table)
            await backend.flush()
            flushes.append(time.perf_counter() - started)
            if index and number == 0:
                await backend.create_index("id", index)
        await backend.close()
    dataset = lance.dataset(str(folder / "data.lance"))
    expected = sum(table.num_rows for table in tables)
    if dataset.count_rows() != expected:
        raise SystemExit(f"stored {dataset.count_rows()} of {expected} rows")
    fragments, nbytes = len(dataset.get_fragments()), _bytes(folder)
    async with _open(folder, keep_versions=0.001, **options) as backend:
        await backend.compact()
        await backend.compact()  # the first one keeps the version that it replaced
    return Ingested(seconds(), flushes, fragments, nbytes, _bytes(folder))


def _open(folder: Path, **options: Any) -> LanceBackend:
    return LanceBackend(bucket_id=0, storage_path=str(folder), flush_threshold=1 << 40, **options)


def _append_raw(folder: Path, tables: list[pa.Table]) -> Ingested:
    """Append with raw Lance, which syncs nothing and keeps every version."""
    uri, flushes = str(folder / "raw.lance"), []
    with stopwatch() as seconds:
        for number, table in enumerate(tables):
            started = time.perf_counter()
            lance.write_dataset(table, uri, mode="append" if number else "create")
            flushes.append(time.perf_counter() - started)
    fragments, nbytes = len(lance.dataset(uri).get_fragments()), _bytes(folder)
    return Ingested(seconds(), flushes, fragments, nbytes, nbytes)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(run: Run, index: str, on: Ingested, off: Ingested, million: float) -> None:
    ms = 1000
    for name, ours, theirs, unit in (
        ("total per million", on.seconds / million, off.seconds / million, "s"),
        ("median flush", _share(on, 0.5) * ms, _share(off, 0.5) * ms, "ms"),
        ("99 % flush", _share(on, 0.99) * ms, _share(off, 0.99) * ms, "ms"),
        ("longest flush", max(on.flushes) * ms, max(off.flushes) * ms, "ms"),
        ("fragments", on.fragments, off.fragments, ""),
        ("on disk at the end", on.nbytes / 1e6, off.nbytes / 1e6, "MB"),
        ("least on disk", on.least / 1e6, off.nbytes / 1e6, "MB"),
    ):
        run.add("maintenance", f"{name}, compaction on{index}", ours, unit, _OFF + index, theirs)


def _report_raw(run: Run, off: Ingested, raw: Ingested, million: float) -> None:
    beside = f"{LANCE}, nothing synced"
    seconds, theirs = off.seconds / million, raw.seconds / million
    run.add("maintenance", "total per million, compaction off", seconds, "s", beside, theirs)
    longest, theirs = max(off.flushes) * 1000, max(raw.flushes) * 1000
    run.add("maintenance", "longest flush, compaction off", longest, "ms", beside, theirs)
    run.add(
        "maintenance", "on disk, compaction off", off.nbytes / 1e6, "MB", beside, raw.nbytes / 1e6
    )


def _share(found: Ingested, share: float) -> float:
    return percentile(found.flushes, share)
