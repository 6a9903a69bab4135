"""Whether a bucket in an object store takes calls: it may be lost to another process."""

from __future__ import annotations

from typing import Protocol

from persisting.bucket.lifecycle import Lifecycle
from persisting.errors import OwnershipLost
from persisting.options import BucketOptions


class LogOwnership(Protocol):
    """What a bucket asks of the log that it writes to."""

    @property
    def lost(self) -> str:
        """Why this process no longer owns the log; empty while it does."""

    @property
    def overdue(self) -> str:
        """Why another process may have taken over unnoticed; empty while that cannot be."""


class StoreLifecycle(Lifecycle):
    """The state of a bucket that this process owns until another one takes it over."""

    def __init__(self, options: BucketOptions) -> None:
        super().__init__(options)
        self.loss: OwnershipLost | None = None
        """What showed that another process may own the bucket: this one must not change it."""
        self.log_ownership: LogOwnership | None = None
        """The log, once the bucket is attached to it."""

    @property
    def lost(self) -> str:
        """Why this process no longer owns the bucket; empty while it does, as far as it knows."""
        if self.loss is not None:
            return self.loss.summary
        return "" if self.log_ownership is None else self.log_ownership.lost

    @property
    def overdue(self) -> str:
        """Why another process may have taken the bucket over unnoticed; empty while that cannot
        be."""
        return "" if self.log_ownership is None else self.log_ownership.overdue

    def check_not_lost(self) -> None:
        if self.loss is not None:
            raise self.loss.with_traceback(None)

    def check_writable(self) -> None:
        super().check_writable()
        self.check_not_lost()
