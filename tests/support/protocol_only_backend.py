"""A backend with exactly the methods of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


class OnlyProtocol:
    """Keeps records in memory; a flush writes them to one JSON file."""

    def __init__(self, bucket_id: int, storage_path: str, batch_size: int = 100, **kwargs: Any):
        self._file = Path(storage_path) / "records.json"
        self._records: list[dict[str, Any]] = []
        if self._file.exists():
            self._records = json.loads(self._file.read_text())

    async def put(self, record: dict[str, Any]) -> None:
        await self.put_batch([record])

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        await asyncio.sleep(0)
        self._records += [dict(record) for record in records]

    async def get(self, offset: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        stop = None if limit is None else offset + limit
        return [dict(record) for record in self._records[offset:stop]]

    async def get_stream(
        self, offset: int = 0, limit: int | None = None, block: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        while limit is None or limit > 0:
            if offset < len(self._records):
                yield dict(self._records[offset])
                offset, limit = offset + 1, None if limit is None else limit - 1
            elif block:
                await asyncio.sleep(0.01)
            else:
                return

    async def flush(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._records))

    async def stats(self) -> dict[str, Any]:
        return {"file": str(self._file)}

    def total_count(self) -> int:
        return len(self._records)
