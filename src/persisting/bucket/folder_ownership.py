"""The ownership of a bucket in a folder: its lock, and what the owner leaves for the next one.

See :mod:`~persisting.bucket.store_ownership` for buckets in object stores.
"""

from __future__ import annotations

import logging
import os
import weakref

from persisting.bucket.log_note import is_logged
from persisting.errors import StorageError
from persisting.fs import FileSystem
from persisting.lock import BucketLock
from persisting.options import BucketOptions
from persisting.table import operations
from persisting.table.repair import SIGNATURE
from persisting.table.table import Table

log = logging.getLogger("persisting")


class FolderOwnership:
    """The lock of a bucket's folder, held until it is released or its holder is dropped."""

    def __init__(self, options: BucketOptions, fs: FileSystem, holder: object) -> None:
        """Take the lock, or raise :class:`BucketLocked`. Blocking.

        It is released, and not marked as clean, if ``holder`` is dropped before.
        """
        self._options, self._folder, self._fs = options, options.storage_path, fs
        self._process = os.getpid()
        self._lock = BucketLock(self._folder, bucket=options.bucket_id)
        self._unlock = weakref.finalize(holder, self._lock.release, clean=False)
        self._may_lose_records = False
        """Whether the lock's note says that acknowledged records may be stored nowhere."""

    @property
    def is_held(self) -> bool:
        """Whether the lock is held, in a folder that was not removed."""
        return self._unlock.alive and self._lock.in_place

    def open_table(self, table: Table) -> None:
        """Open the table, and check as much of it as the last owner's end calls for. Blocking."""
        # With the lock file, whose note must survive power loss, too.
        self._fs.sync_chain(self._folder)
        if self._lock.left_clean:
            table.check_signature(self._lock.note)
        table.open(left_clean=self._lock.left_clean)
        table.set_compression()
        if self._lock.may_lack_records and not is_logged(self._folder):
            operations.begin_epoch_after_loss(table)
        # Only now: until the epoch is durable, the next owner must begin one.
        self._mark_unlogged(not self._options.is_logged and not self._lock.is_brief)

    # Records that are in no log

    def before_unlogged_rows(self) -> None:
        """Note that this process may lose records, unless that is noted. Call with the state lock
        held: so it is never taken back between this and the acceptance of the rows."""
        if not self._may_lose_records:  # a brief owner, or one whose process is exiting
            self._mark_unlogged(True)

    def note_nothing_lost(self) -> None:
        """Note that everything acknowledged is stored."""
        if not self._may_lose_records or os.getpid() != self._process:
            return
        try:
            self._mark_unlogged(False)
        except StorageError as exc:
            log.warning("%s. Nothing is lost, but the next owner begins a new epoch", exc)

    def _mark_unlogged(self, unlogged: bool) -> None:
        """Note durably whether the records that are acknowledged next may be lost with this
        process; it takes a sync if that changes."""
        self._lock.mark_unlogged(unlogged)
        self._may_lose_records = unlogged

    # The end

    def abandon(self, table: Table) -> None:
        """Release the lock after a failed opening, still marked clean if nothing was written."""
        if self._unlock.detach() is not None:
            self.note_nothing_lost()
            untouched = self._lock.left_clean and not table.touched
            signature = {k: v for k, v in self._lock.note.items() if k in SIGNATURE}
            self._lock.release(clean=untouched, **signature)

    def release(self, table: Table) -> None:
        """Release the lock of a flushed bucket.

        Everything is durable: a failure here only makes the next owner check the bucket.
        """
        if self._unlock.detach() is None:
            return
        if not table.committer.checksums_recorded:
            # The next owner drops the indexes whose checksums are not recorded.
            self.note_nothing_lost()
            self._lock.release(clean=False)
            return
        try:
            signature = table.signature()
        except OSError as exc:
            log.warning(
                "cannot read the newest manifest of %s (%s): the next owner checks the bucket as "
                "after a crash",
                self._folder,
                exc.strerror or exc,
            )
            self.note_nothing_lost()
            self._lock.release(clean=False)
            return
        try:
            self._lock.release(clean=True, **signature)
        except StorageError as exc:
            log.warning("%s", exc)
