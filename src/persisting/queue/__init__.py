"""Durable queues: the backends, their protocol and their errors.

Names are loaded on first use, so that importing this costs nothing of Arrow or Lance.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persisting.errors import (
    BucketClosed,
    BucketLocked,
    InvalidArgument,
    OffsetOutOfRange,
    SchemaError,
    StorageError,
    TableError,
    WALError,
)
from persisting.storage.protocol import StorageBackend

if TYPE_CHECKING:
    from persisting.storage.lance import LanceBackend
    from persisting.storage.memory import MemoryBackend
    from persisting.storage.persisting import PersistingBackend

__all__ = [
    "BucketClosed",
    "BucketLocked",
    "InvalidArgument",
    "LanceBackend",
    "MemoryBackend",
    "OffsetOutOfRange",
    "PersistingBackend",
    "SchemaError",
    "StorageBackend",
    "StorageError",
    "TableError",
    "WALError",
]

_LAZY = {
    "LanceBackend": "persisting.storage.lance",
    "MemoryBackend": "persisting.storage.memory",
    "PersistingBackend": "persisting.storage.persisting",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
