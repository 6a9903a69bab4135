"""What a keeper makes durable: the journal of its group, floors, and a note of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from persisting.bucket.group_offsets import WORK_FOLDER, Committed, read_committed
from persisting.errors import BucketLocked, WALError
from persisting.fs import FileSystem, os_errors_as
from persisting.lock import BucketLock, described
from persisting.topic.groups import group_folder, write_committed
from persisting.topic.work_status import WorkStatus, write_status
from persisting.work.journal import Journal, JournalEntry, replay
from persisting.work.state import GroupState


class KeptElsewhere(BucketLocked):
    """Another process keeps the group; ``owner`` is its note."""


class GroupStorage(Protocol):
    """The durable part of one group, held by the process that keeps it. Blocking."""

    group: str
    place: str
    """The place of the topic, for messages."""
    state: GroupState
    """What the journal held when it was opened."""
    note_seconds: float
    """How often floors and status are noted while they change."""

    @property
    def size(self) -> int:
        """Bytes of the journal."""

    def write(self, entry: JournalEntry) -> None:
        """Make an entry durable.

        Raises :class:`WALError` if it is not, or the group no longer belongs to this process.
        """

    @property
    def lost(self) -> str:
        """Why another process keeps the group now; empty while none is known to."""

    def read_floor(self, bucket: int) -> Committed:
        """Return the offset of a bucket below which everything was finished when it was noted."""

    def write_floor(self, bucket: int, offset: int, epoch: int) -> None: ...

    def write_status(self, status: WorkStatus) -> None:
        """Note the group's numbers, for tools that do not call its keeper."""

    def close_journal(self) -> None:
        """Stop writing operations."""

    def release(self, *, clean: bool) -> None:
        """Let other processes keep the group; ``clean`` if nothing has failed."""


def journal_folder(topic_folder: Path, group: str) -> Path:
    return group_folder(topic_folder, group) / WORK_FOLDER


class FolderGroup:
    """A group in a folder: its lock, and its journal in a log."""

    note_seconds = 2.0

    def __init__(self, topic_folder: Path, group: str, fs: FileSystem, **note: Any) -> None:
        """Take the group's lock and replay its journal; ``note`` is added to the lock's note.

        Raises :class:`KeptElsewhere` if another process keeps the group.
        """
        self.group, self.place, self._fs = group, str(topic_folder), fs
        self._folder = group_folder(topic_folder, group)
        folder = journal_folder(topic_folder, group)
        with os_errors_as("create", folder):
            fs.make_folder(folder)
            fs.sync_chain(folder)
        try:
            self._lock = BucketLock(folder, **note)
        except BucketLocked as exc:
            raise KeptElsewhere(
                f"work group {group!r} of {topic_folder} is kept by {described(exc.owner)}",
                owner=exc.owner,
            ) from exc
        try:
            self.state, opened = replay(folder, fs)
        except BaseException:
            self._lock.release(clean=False)
            raise
        self._journal = Journal(opened)

    @property
    def size(self) -> int:
        return self._journal.size

    def write(self, entry: JournalEntry) -> None:
        self._journal.write(entry)
        if not self._lock.in_place:
            raise WALError(
                f"the folder of work group {self.group!r} of {self.place} was removed while the "
                "group was in use; open a new reader"
            )

    @property
    def lost(self) -> str:
        return ""  # a lock ends with its process

    def read_floor(self, bucket: int) -> Committed:
        return read_committed(self._folder, bucket, self._fs)

    def write_floor(self, bucket: int, offset: int, epoch: int) -> None:
        write_committed(self._folder, bucket, Committed(offset, 0, epoch), self._fs)

    def write_status(self, status: WorkStatus) -> None:
        write_status(self._folder, status, self._fs)

    def close_journal(self) -> None:
        self._journal.close()

    def release(self, *, clean: bool) -> None:
        self._lock.release(clean=clean)
