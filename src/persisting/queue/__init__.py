"""Durable queues: topics, the backends, their protocol and their errors.

Names are loaded on first use, so that the import does not load Arrow or Lance.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persisting.backends.protocol import StorageBackend
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

if TYPE_CHECKING:
    from persisting.backends.lance import LanceBackend
    from persisting.backends.memory import MemoryBackend
    from persisting.backends.persisting import PersistingBackend
    from persisting.queue.api import read_queue, write_queue
    from persisting.topic.reader import QueueReader
    from persisting.topic.registry import get_backend_class, list_backends, register_backend
    from persisting.topic.writer import QueueWriter
    from persisting.work.delivery import Delivery
    from persisting.work.work_reader import WorkReader

__all__ = [
    "BucketClosed",
    "BucketLocked",
    "Delivery",
    "InvalidArgument",
    "LanceBackend",
    "LeaseLost",
    "MemoryBackend",
    "NoSuchTopic",
    "OffsetOutOfRange",
    "OwnershipLost",
    "PersistingBackend",
    "QueueReader",
    "QueueWriter",
    "SchemaError",
    "StorageBackend",
    "StorageError",
    "TableError",
    "WALError",
    "WorkReader",
    "get_backend_class",
    "list_backends",
    "read_queue",
    "register_backend",
    "write_queue",
]

_LAZY = {
    "Delivery": "persisting.work.delivery",
    "LanceBackend": "persisting.backends.lance",
    "MemoryBackend": "persisting.backends.memory",
    "PersistingBackend": "persisting.backends.persisting",
    "QueueReader": "persisting.topic.reader",
    "QueueWriter": "persisting.topic.writer",
    "WorkReader": "persisting.work.work_reader",
    "get_backend_class": "persisting.topic.registry",
    "list_backends": "persisting.topic.registry",
    "read_queue": "persisting.queue.api",
    "register_backend": "persisting.topic.registry",
    "write_queue": "persisting.queue.api",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
