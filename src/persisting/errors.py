"""All errors of Persisting.

    StorageError                 any error of a backend, topic or pipeline
    ├── WALError                 the write-ahead log cannot be written, or is damaged
    ├── TableError               the table cannot be written, or is damaged
    ├── SchemaError              a record does not fit; also a ValueError
    ├── InvalidArgument          an option or an argument is wrong; also a ValueError
    ├── NoSuchTopic              the topic to read does not exist (yet)
    ├── BucketLocked             another owner has the bucket open for writing
    │   └── OwnershipLost        another owner has taken the bucket over from this process
    ├── BucketClosed             the backend was closed
    ├── OffsetOutOfRange         the offset was removed by retention
    └── LeaseLost                the record of a delivery was delivered again, or is finished

Errors of the operating system, Arrow and Lance are translated where they occur
(``raise … from exc``), so that one ``except StorageError`` is enough. Every message says what
failed, where, and what to do next.
"""

from __future__ import annotations

from typing import Any


class StorageError(Exception):
    """Base class of all errors of Persisting."""


class WALError(StorageError):
    """The write-ahead log cannot be read or written, or is damaged."""


class TableError(StorageError):
    """The table cannot be read or written, or is damaged."""


class SchemaError(StorageError, ValueError):
    """A record cannot be stored; the message names the field, the expected type and the value."""


class InvalidArgument(StorageError, ValueError):
    """An option or an argument has a wrong type or value."""


class BucketLocked(StorageError):
    """The bucket is open for writing elsewhere; the message names the owner.

    ``owner`` is the owner's entry in the lock file. ``hint``, what to do next, is appended to the
    message; ``summary`` is the message without it.
    """

    def __init__(
        self, message: str = "", owner: dict[str, Any] | None = None, *, hint: str = ""
    ) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.summary, self.hint = message, hint
        self.owner = owner or {}


class OwnershipLost(BucketLocked):
    """Another process has taken over a bucket in an object store; this one can no longer
    acknowledge or flush. Records that it acknowledged are in the log, which the new owner reads."""


class BucketClosed(StorageError):
    """The backend was closed and takes no more calls."""


class NoSuchTopic(StorageError):
    """The topic does not exist (yet); ``wait_for_topic`` waits for it."""


class OffsetOutOfRange(StorageError):
    """Retention has removed the record at this offset."""


class LeaseLost(StorageError):
    """The lease of a delivery ended, and the record was delivered again or is finished."""
