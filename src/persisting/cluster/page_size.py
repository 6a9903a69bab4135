"""How many rows to read for one page, so that a page is read by bytes although reads count rows."""

from __future__ import annotations

from persisting.cluster import wire

PAGE_BYTES = wire.MESSAGE_BYTES // 2
"""The bytes that a page aims at: half of what a message may hold."""

PAGE_ROWS = 8192
"""A page holds no more rows than this, however small they are."""

READ_ROWS = 8192
"""A single read asks for no more rows than this. Half as many would make streams of rows of some
500 bytes much slower: every read of a table has a fixed cost."""

_SHRINK = 8


class RowSizeEstimate:
    """What a row of a bucket is expected to take, from the rows that were read before.

    The estimate rises immediately and falls slowly, and a bucket about which nothing is known
    begins with a single row. So a read takes about ``PAGE_BYTES`` unless rows become larger within
    it, which a table tells beforehand by the sizes of its fragments.
    """

    def __init__(self) -> None:
        self._row_bytes = float(wire.MESSAGE_BYTES)

    def rows_within(self, nbytes: int) -> int:
        """Return how many rows to read to get about ``nbytes``, at least one."""
        return max(1, min(int(nbytes / self._row_bytes), READ_ROWS))

    def observe(self, rows: int, nbytes: int) -> None:
        """Learn from a read."""
        self._row_bytes = max(nbytes / rows, self._row_bytes / _SHRINK, 1.0)
