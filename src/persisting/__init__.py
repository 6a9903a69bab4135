"""Persisting: durable storage for Pulsing queues, with a data pipeline on Spark."""

from persisting import queue
from persisting.bridge import import_hook as _pulsing
from persisting.errors import (
    BucketClosed,
    BucketLocked,
    InvalidArgument,
    LeaseLost,
    NoSuchTopic,
    OffsetOutOfRange,
    OwnershipLost,
    SchemaError,
    StorageError,
    TableError,
    WALError,
)

__version__ = "0.5.0"

__all__ = [
    "BucketClosed",
    "BucketLocked",
    "InvalidArgument",
    "LeaseLost",
    "NoSuchTopic",
    "OffsetOutOfRange",
    "OwnershipLost",
    "SchemaError",
    "StorageError",
    "TableError",
    "WALError",
    "__version__",
    "queue",
]

_pulsing.install()
