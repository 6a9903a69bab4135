"""``bench``: measures durable puts and reads on the disk of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints

_SYNCS = 200
_BATCH = 1000
_PRODUCERS = 64


class Measured(msgspec.Struct):
    """One measurement."""

    name: str
    records: int
    seconds: float
    per_second: float
    of_syncs: float | None = None
    """Records per sync that the disk could have done in the same time."""


class BenchResult(msgspec.Struct):
    """All measurements; only those of the same run are comparable."""

    folder: str
    syncs_per_second: float
    measured: list[Measured]


@click.command()
@parameters.count("--records", 50_000, "Number of records to put.", least=1000)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    help="Folder on the disk to measure.  [default: temporary folder]",
)
@parameters.as_json
@prints("bench", "persisting.cli.commands.bench:BenchResult")
def bench(records: int, folder: str | None, as_json: bool) -> None:
    """Measure durable puts and reads, compared with the sync rate of the disk.

    Works in a new folder below --folder and removes it at the end.

    \b
    Examples:
      persisting bench
      persisting bench --folder /data --records 200000
    """
    place = Path(tempfile.mkdtemp(prefix="persisting-bench-", dir=folder))
    try:
        syncs = _sync_rate(place)
        measured = topics_access.run(_measure(place, records, syncs, quiet=as_json))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    result = BenchResult(str(place.parent), syncs, measured)
    output.show(result, as_json, lambda: _print_result(result))


def _print_result(result: BenchResult) -> None:
    output.line(f"{result.folder}: {result.syncs_per_second:,.0f} syncs of 4 kB per second")
    output.table(
        ["measurement", "#records", "#seconds", "#records/s", "#per sync"],
        [
            [
                row.name,
                row.records,
                f"{row.seconds:.2f}",
                f"{row.per_second:,.0f}",
                None if row.of_syncs is None else f"{row.of_syncs:,.1f}",
            ]
            for row in result.measured
        ],
    )


def _sync_rate(folder: Path) -> float:
    """Return how many appends of 4 kB per second the disk can sync."""
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, bytes(4096))
        os.fdatasync(fd)
        started = time.perf_counter()
        for _ in range(_SYNCS):
            os.write(fd, bytes(4096))
            os.fdatasync(fd)
        return _SYNCS / (time.perf_counter() - started)
    finally:
        os.close(fd)


def _records(count: int) -> list[dict[str, Any]]:
    text = "the quick brown fox jumps over the lazy dog today"
    return [
        {"id": f"record-{n:08d}", "value": n, "text": text, "score": n / 7} for n in range(count)
    ]


async def _measure(folder: Path, records: int, syncs: float, *, quiet: bool) -> list[Measured]:
    from persisting.queue import PersistingBackend

    measured: list[Measured] = []
    rows = _records(records)
    singles, shared = rows[: max(200, records // 50)], rows[: records // 2]

    async def timed(name: str, count: int, work: Awaitable[Any], *, synced: bool = True) -> None:
        started = time.perf_counter()
        await work
        seconds = time.perf_counter() - started
        per_sync = count / seconds / syncs if synced else None
        measured.append(Measured(name, count, seconds, count / seconds, per_sync))
        progress.advance(1)

    with topics_access.progress("measuring", 6, quiet=quiet) as progress:
        async with _backend(PersistingBackend, folder / "synced", 0.0) as backend:
            await timed("put, each durable", len(singles), _one_by_one(backend, singles))
            name = f"put, {_PRODUCERS} producers, each durable"
            await timed(name, len(shared), _together(backend, shared))
            await timed(f"put_batch of {_BATCH:,}, durable", len(rows), _batches(backend, rows))
            await timed("flush to the table", len(rows), backend.flush(), synced=False)
            total = backend.total_count()
            await timed("read as dicts", total, _drain(backend), synced=False)
        async with _backend(PersistingBackend, folder / "interval", 1.0) as backend:
            name = f"put_batch of {_BATCH:,}, synced every second"
            await timed(name, len(rows), _batches(backend, rows), synced=False)
    return measured


def _backend(cls: Callable[..., Any], folder: Path, interval: float) -> Any:
    return cls(0, str(folder), enable_wal=True, wal_sync_interval=interval)


async def _one_by_one(backend: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        await backend.put(row)


async def _together(backend: Any, rows: list[dict[str, Any]]) -> None:
    async def producer(first: int) -> None:
        for row in rows[first::_PRODUCERS]:
            await backend.put(row)

    await asyncio.gather(*map(producer, range(_PRODUCERS)))


async def _batches(backend: Any, rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), _BATCH):
        await backend.put_batch(rows[start : start + _BATCH])


async def _drain(backend: Any) -> None:
    async for _ in backend.get_stream():
        pass
