"""Objects that are closed when their ``async with`` block ends."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncClosing:
    """Base of objects with an async ``close()``: ``async with`` calls it."""

    async def close(self) -> None:
        raise NotImplementedError

    async def _leave_block(self, *, failed: bool) -> None:
        """Close at the end of an ``async with`` block; ``failed`` if an exception leaves it."""
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave_block(failed=kind is not None)
