"""Whether a bucket takes calls: while it is open, owned, and in the process that opened it."""

from __future__ import annotations

import os

from persisting.errors import BucketClosed, StorageError
from persisting.options import BucketOptions


class Lifecycle:
    """The state of a bucket between its opening and its end."""

    def __init__(self, options: BucketOptions) -> None:
        self._place, self._read_only = options.storage_path, options.read_only
        self._process = os.getpid()
        self.closed = False
        """No call is accepted any more. An open bucket changes this with its state lock held."""
        self.released = False
        """Nothing is flushed any more: the lock is being released, or another owner has it."""

    @property
    def is_here(self) -> bool:
        """Whether this process opened the bucket, and is no fork of the one that did."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise in a fork: two processes that append to one log would destroy each other's records.

        Checked before taking any lock: a lock that was held at the fork is never released here.
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"the backend of {self._place} was opened by process {self._process}, and this "
                "process is a fork of it; open a backend in the process that uses it"
            )

    def check_open(self) -> None:
        self.check_process()
        if self.closed:
            raise BucketClosed(f"the backend of {self._place} is closed; open a new one")

    def check_writable(self) -> None:
        self.check_open()
        if self._read_only:
            raise StorageError(f"{self._place} is open with read_only=True and cannot be changed")
