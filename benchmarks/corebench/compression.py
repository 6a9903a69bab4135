"""Bytes on disk for each ``compression`` option, in the log and in the table."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

from corebench import records
from corebench.ingest import PUT
from corebench.report import Run
from persisting.queue import PersistingBackend

OPTIONS = (None, "snappy", "lz4", "zstd")


def compression(run: Run) -> None:
    """Measure three kinds of records; ratios are to the size without compression."""
    count = min(20_000, run.records)
    for kind, made in (
        ("text", list(islice(records.docstrings(), count))),
        ("JSON", list(records.events(count))),
        ("small records", list(records.stream(count))),
    ):
        plain: dict[str, int] = {}
        for option in OPTIONS:
            with run.scratch() as folder:
                sizes = asyncio.run(_sizes(folder, made, option))
            for place, size in sizes.items():
                plain.setdefault(place, size)
                run.add(
                    "compression",
                    f"{kind}: {place}, {option or 'None'}",
                    size / 1e6,
                    "MB",
                    "None",
                    plain[place] / 1e6,
                )


async def _sizes(folder: Path, made: list[dict[str, Any]], option: str | None) -> dict[str, int]:
    backend = PersistingBackend(
        bucket_id=0,
        storage_path=str(folder),
        enable_wal=True,
        compression=option,
        flush_threshold=1 << 40,
        flush_interval=None,
    )
    for start in range(0, len(made), PUT):
        await backend.put_batch(made[start : start + PUT])
    log = (await backend.stats())["wal_size"]
    await backend.close()
    data = (folder / "data.lance" / "data").iterdir()
    return {"log": log, "table": sum(file.stat().st_size for file in data)}
