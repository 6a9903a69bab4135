"""Puts that survive power loss when they return, compared with SQLite in WAL mode."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from corebench import records
from corebench.ingest import PUT
from corebench.report import Run, Target, rate, stopwatch
from persisting.queue import PersistingBackend

PRODUCERS = 64
SQLITE = "SQLite WAL, synchronous=FULL"

_INSERT = "INSERT INTO records VALUES (:id, :value, :text, :score)"


def durable(run: Run) -> None:
    """Measure batches, one producer, and many concurrent producers."""
    _batches(run)
    singles = list(records.stream(max(500, run.records // 200)))
    many = list(records.stream(max(5_000, run.records // 20)))
    one, crowd, sqlite = run.best(
        lambda folder: asyncio.run(_put_singles(folder, singles, 1)),
        lambda folder: asyncio.run(_put_singles(folder, many, PRODUCERS)),
        lambda folder: _sqlite_singles(folder, singles),
    )
    for name, found, least in (
        ("single puts, one producer, synced", one, 0.4),
        (f"single puts, {PRODUCERS} producers, synced", crowd, 6),
    ):
        run.add("durable", name, found, "rec/s", SQLITE, sqlite, Target("ratio", at_least=least))
    few = singles[:300]
    found, raw = run.best(
        lambda folder: asyncio.run(_put_singles(folder, few, 1)),
        lambda folder: _lance_singles(folder, few),
    )
    name = "single puts, one producer, synced"
    run.add("durable", name, found, "rec/s", "Lance append, not synced", raw)


def _batches(run: Run) -> None:
    made = records.batches(run.records, PUT)
    in_table: dict[float, list[float]] = {0.0: [], 1.0: []}

    def ours(interval: float) -> Callable[[Path], float]:
        def measure(folder: Path) -> float:
            acked, closed = asyncio.run(_put_batches(folder, made, interval))
            in_table[interval].append(rate(run.records, closed))
            return rate(run.records, acked)

        return measure

    synced, default, sqlite = run.best(
        ours(0.0), ours(1.0), lambda folder: _sqlite_batches(folder, made)
    )
    for name, acked, interval, least in (
        ("synced", synced, 0.0, 2),
        ("default interval", default, 1.0, 3),
    ):
        title, target = f"put_batch({PUT:,}), {name}, to last ack", Target("ratio", at_least=least)
        run.add("durable", title, acked, "rec/s", SQLITE, sqlite, target)
        title = "… until everything is in the table"
        run.add("durable", title, max(in_table[interval]), "rec/s", SQLITE, sqlite)


async def _put_batches(
    folder: Path, made: list[list[dict[str, Any]]], interval: float
) -> tuple[float, float]:
    backend = PersistingBackend(
        bucket_id=0, storage_path=str(folder / "b"), enable_wal=True, wal_sync_interval=interval
    )
    with stopwatch() as seconds:
        for batch in made:
            await backend.put_batch(batch)
        acked = seconds()
        await backend.close()
    return acked, seconds()


async def _put_singles(folder: Path, rows: list[dict[str, Any]], producers: int) -> float:
    backend = PersistingBackend(
        bucket_id=0, storage_path=str(folder / "b"), enable_wal=True, wal_sync_interval=0.0
    )

    async def produce(share: list[dict[str, Any]]) -> None:
        for record in share:
            await backend.put(record)

    with stopwatch() as seconds:
        await asyncio.gather(*(produce(rows[i::producers]) for i in range(producers)))
        result = rate(len(rows), seconds())
    await backend.close()
    return result


def _sqlite(folder: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(folder / "records.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE records (id TEXT, value INTEGER, text TEXT, score REAL)")
    return connection


def _sqlite_batches(folder: Path, made: list[list[dict[str, Any]]]) -> float:
    connection = _sqlite(folder)
    with stopwatch() as seconds:
        for batch in made:
            connection.execute("BEGIN")
            connection.executemany(_INSERT, batch)
            connection.execute("COMMIT")
    connection.close()
    return rate(sum(map(len, made)), seconds())


def _sqlite_singles(folder: Path, rows: list[dict[str, Any]]) -> float:
    connection = _sqlite(folder)
    with stopwatch() as seconds:
        for record in rows:
            connection.execute(_INSERT, record)
    connection.close()
    return rate(len(rows), seconds())


def _lance_singles(folder: Path, rows: list[dict[str, Any]]) -> float:
    uri = str(folder / "raw.lance")
    with stopwatch() as seconds:
        for number, record in enumerate(rows):
            table = pa.Table.from_pylist([record])
            lance.write_dataset(table, uri, mode="append" if number else "create")
    return rate(len(rows), seconds())
