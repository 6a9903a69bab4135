"""Compaction, retention and verification of a bucket's table, as coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persisting.backends.bucket_access import BucketAccess
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument
from persisting.table import store_verify, verify
from persisting.table.retention import Limits
from persisting.table.store_table import StoreTable
from persisting.table.verify import Report
from persisting.table.view import TableView


class TableMaintenance:
    """Maintenance of one bucket that a user asks for."""

    def __init__(self, access: BucketAccess) -> None:
        self._access, self._bucket = access, access.bucket

    async def compact(self) -> dict[str, int]:
        """Flush, then rewrite all small fragments."""
        await self._access.flush()
        return await self._access.write(self._bucket.maintenance.compact)

    async def retain(self, limits: Limits) -> dict[str, Any]:
        """Flush, then drop the oldest rows beyond the limits."""
        limits.check()
        if not limits.any:
            raise InvalidArgument("retain needs rows=…, bytes=… or seconds=…")
        await self._access.flush()
        return await self._access.write(self._bucket.maintenance.retain, limits)

    async def verify(self) -> dict[str, Any]:
        """Compare every stored file with its checksum; in an object store, read every row."""
        bucket = self._bucket
        in_store = isinstance(bucket.table, StoreTable)
        check: Callable[[Any, TableView], Report] = (
            store_verify.verify if in_store else verify.verify
        )
        await self._access.refresh()
        view = bucket.snapshot().view
        report = await in_thread(check, bucket.table, view)
        while report.damaged and bucket.snapshot().view.version != view.version:
            view = bucket.snapshot().view  # a missing file may have been cleaned up meanwhile
            report = await in_thread(check, bucket.table, view)
        is_signed = bucket.options.read_only and not in_store
        if is_signed and bucket.snapshot().view.version == view.version:
            await in_thread(verify.check_signature, bucket.table, report)
        bucket.metrics.verified(len(report.damaged))
        return {
            "ok": report.ok,
            "rows": report.rows,
            "files": report.files,
            "damaged": report.damaged,
            "unchecked": report.unchecked,
        }
