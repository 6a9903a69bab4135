"""The errors of Persisting, one small tree.

    StorageError                 anything a backend, topic or pipeline reports
    ├── WALError                 the write-ahead log cannot be written, or is damaged
    ├── TableError               the table cannot be written, or is damaged
    ├── SchemaError              a record does not fit; also a ValueError
    ├── InvalidArgument          an option or an argument is wrong; also a ValueError
    ├── NoSuchTopic              the topic to read does not exist (yet)
    ├── BucketLocked             another owner has the bucket open for writing
    ├── BucketClosed             the backend was closed
    └── OffsetOutOfRange         the offset was removed by retention

Errors of the operating system, Arrow and Lance are translated where they enter
(``raise … from exc``), so that one ``except StorageError`` is enough. Every message says what
failed, where, and what to do next.
"""

from __future__ import annotations

from typing import Any


class StorageError(Exception):
    """Base exception for storage operations."""


class WALError(StorageError):
    """Exception for WAL operations."""


class TableError(StorageError):
    """The table on disk could not be read or written."""


class SchemaError(StorageError, ValueError):
    """A record cannot be stored: the message names the field, what was expected and what came."""


class InvalidArgument(StorageError, ValueError):
    """An option or an argument has a wrong type or value."""


class BucketLocked(StorageError):
    """The bucket is open for writing elsewhere; the message names the owner.

    ``owner`` is what the owner says of itself in the lock file.
    """

    def __init__(self, message: str = "", owner: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.owner = owner or {}


class BucketClosed(StorageError):
    """The backend was closed and takes no more calls."""


class NoSuchTopic(StorageError):
    """There is no such topic (yet); ``wait_for_topic`` waits for it."""


class OffsetOutOfRange(StorageError):
    """The offset lies before the first one that is left."""
