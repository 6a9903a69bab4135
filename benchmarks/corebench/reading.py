"""Read rates, compared with reading the same rows with raw Lance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import lance

from corebench import records
from corebench.ingest import FLUSH, PUT
from corebench.report import Run, Target, rate, stopwatch
from persisting.queue import LanceBackend

PAGE = 1000
SMALL_PAGE = 100

Reader = Callable[[LanceBackend], Awaitable[int]]


def reading(run: Run) -> None:
    """Read one bucket in four ways; Lance reads the same table."""
    with run.scratch() as folder:
        asyncio.run(_fill(folder, run.records))
        dataset = lance.dataset(str(folder / "data.lance"))
        offsets = _offsets(run.records)
        for name, unit, ours, beside, theirs, least in (
            ("get_stream of dicts", "rows/s", _stream, "to_batches + to_pylist", _batches, 0.5),
            (f"paged get({PAGE:,})", "rows/s", _pages, "paged scan + to_pylist", _scans, 0.8),
            ("get_arrow of everything", "rows/s", _arrow, "to_table", _table, 0.8),
            (
                f"random get({SMALL_PAGE})",
                "pages/s",
                lambda b: _random_pages(b, offsets),
                "random scan + to_pylist",
                lambda d: _random_scans(d, offsets),
                0.8,
            ),
        ):
            found, raw = _in_turns(run, folder, dataset, ours, theirs)
            target = Target("ratio", at_least=least)
            run.add("reading", name, found, unit, beside, raw, target)


def _in_turns(
    run: Run, folder: Path, dataset: Any, ours: Reader, theirs: Callable[[Any], int]
) -> list[float]:
    return run.best(
        lambda _: asyncio.run(_timed(folder, ours)), lambda _: _timed_raw(dataset, theirs)
    )


async def _fill(folder: Path, count: int) -> None:
    async with LanceBackend(
        bucket_id=0, storage_path=str(folder), flush_threshold=FLUSH
    ) as backend:
        for batch in records.batches(count, PUT):
            await backend.put_batch(batch)


def _offsets(count: int) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(max(1, count - SMALL_PAGE)) for _ in range(500)]


async def _timed(folder: Path, read: Reader) -> float:
    async with LanceBackend(bucket_id=0, storage_path=str(folder)) as backend:
        with stopwatch() as seconds:
            found = await read(backend)
        return rate(found, seconds())


def _timed_raw(dataset: Any, read: Callable[[Any], int]) -> float:
    with stopwatch() as seconds:
        found = read(dataset)
    return rate(found, seconds())


async def _stream(backend: LanceBackend) -> int:
    found = 0
    async for _ in backend.get_stream():
        found += 1
    return found


def _batches(dataset: Any) -> int:
    found = 0
    for batch in dataset.to_batches(columns=list(records.FIELDS), batch_size=4096):
        for _ in batch.to_pylist():
            found += 1
    return found


async def _pages(backend: LanceBackend) -> int:
    found = 0
    while page := await backend.get(found, PAGE):
        found += len(page)
    return found


def _scans(dataset: Any) -> int:
    found = 0
    while page := _scan(dataset, found, PAGE):
        found += len(page)
    return found


def _scan(dataset: Any, offset: int, limit: int) -> list[dict[str, Any]]:
    table = dataset.scanner(columns=list(records.FIELDS), offset=offset, limit=limit).to_table()
    return table.to_pylist()


async def _arrow(backend: LanceBackend) -> int:
    return (await backend.get_arrow()).num_rows


def _table(dataset: Any) -> int:
    return dataset.to_table(columns=list(records.FIELDS)).num_rows


async def _random_pages(backend: LanceBackend, offsets: list[int]) -> int:
    for offset in offsets:
        await backend.get(offset, SMALL_PAGE)
    return len(offsets)


def _random_scans(dataset: Any, offsets: list[int]) -> int:
    for offset in offsets:
        _scan(dataset, offset, SMALL_PAGE)
    return len(offsets)
