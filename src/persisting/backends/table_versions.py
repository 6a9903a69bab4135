"""Versions, tags and restores of a bucket's table, as coroutines."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from persisting.backends.bucket_access import BucketAccess
from persisting.concurrency.pool import in_thread
from persisting.table import versions
from persisting.table.versions import Version


class TableVersions:
    """Reads, tags and restores versions of one bucket."""

    def __init__(self, access: BucketAccess) -> None:
        self._access, self._bucket = access, access.bucket

    async def listing(self) -> list[dict[str, Any]]:
        """List the versions that can be read, oldest first."""
        self._bucket.lifecycle.check_open()
        await self._access.refresh()
        dataset = self._bucket.table.view.dataset
        return [] if dataset is None else await in_thread(versions.listing, dataset)

    async def tag(self, name: str, empty: bool) -> dict[str, Any]:
        """Flush, then tag the newest version."""
        versions.check_tag(name)
        await self._access.flush()
        return await self._access.write(self._bucket.maintenance.tag, name, empty)

    async def tags(self) -> dict[str, int]:
        """Return the version of each tag."""
        self._bucket.lifecycle.check_open()
        await self._access.refresh()
        dataset = self._bucket.table.view.dataset
        return {} if dataset is None else await in_thread(versions.tags, dataset)

    async def delete_tag(self, name: str) -> bool:
        """Delete a tag; return whether it existed."""
        return await self._access.write(self._bucket.maintenance.delete_tag, name)

    async def restore(self, version: Version, token: str | None) -> dict[str, Any]:
        """Go back to a version."""
        return await self._access.write(self._bucket.maintenance.restore, version, token)

    async def resolve(self, version: Version) -> int:
        """Return the number of a version."""
        await self._access.refresh()
        return (await in_thread(self._bucket.at, version)).view.version

    async def records(
        self, version: Version, offset: int, limit: int | None
    ) -> list[dict[str, Any]]:
        """Read records of a version."""
        await self._access.refresh()
        snapshot = await in_thread(self._bucket.at, version)
        return await in_thread(snapshot.records, snapshot.first(offset), limit)

    async def arrow(self, version: Version, offset: int, limit: int | None) -> pa.Table:
        """Read records of a version as an Arrow table."""
        await self._access.refresh()
        snapshot = await in_thread(self._bucket.at, version)
        return await in_thread(snapshot.table, snapshot.first(offset), limit)

    async def restore_ends(self) -> list[int]:
        """Return the end of the bucket after each restore so far."""
        await self._access.refresh()
        return [restore.end for restore in self._bucket.table.restores]
