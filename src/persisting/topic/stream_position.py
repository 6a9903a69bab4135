"""The position of a stream of pages, which outlives the source that the pages come from."""

from __future__ import annotations

from persisting.bucket.snapshot import Page


class StreamPosition:
    """Where a stream continues when its bucket is reopened or moves to another owner."""

    __slots__ = ("epoch", "left", "offset")

    def __init__(self, offset: int, limit: int | None, epoch: int | None) -> None:
        self.offset, self.left, self.epoch = offset, limit, epoch

    @property
    def at_limit(self) -> bool:
        """Whether the stream has yielded as many rows as it may."""
        return self.left is not None and self.left <= 0

    def window(self, block: bool) -> tuple[int, int | None, bool, int | None]:
        """Return the arguments with which a source continues the stream."""
        return self.offset, self.left, block, self.epoch

    def advance(self, page: Page) -> bool:
        """Move past a page; return False for an empty page, which ends the stream."""
        count = len(page.rows)
        if not count:
            return False
        self.epoch, self.offset = page.epoch, page.first + count
        if self.left is not None:
            self.left -= count
        return True
