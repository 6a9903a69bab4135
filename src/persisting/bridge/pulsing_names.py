"""The names that users of Pulsing's queues expect, added where Pulsing has none.

``pul.queue`` gets the registry and ``write_queue`` / ``read_queue``, and ``pulsing.queue`` becomes
importable. No name of Pulsing is replaced. Pulsing's own queues can use our backends, and any
backend that follows our protocol, through classes that translate its order of arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

from persisting import queue
from persisting.cluster import interpreter_exit
from persisting.concurrency.pool import within
from persisting.topic.backend_adapter import adapt
from persisting.topic.registry import get_backend_class

_NAMES = (
    "register_backend",
    "get_backend_class",
    "list_backends",
    "write_queue",
    "read_queue",
    "StorageBackend",
    "MemoryBackend",
)
_MODULE = "pulsing.queue"


def add_missing_names(pulsing: types.ModuleType) -> None:
    """Add the missing names to an imported ``pulsing``; a second call changes nothing."""
    interpreter_exit.install()
    target = getattr(pulsing, "queue", None)
    if target is None:
        return
    _add_missing(target)
    if not isinstance(target, types.ModuleType) and _MODULE not in sys.modules:
        module = types.ModuleType(_MODULE, __doc__)
        for name in ("write", "read"):
            if hasattr(target, name):
                setattr(module, name, getattr(target, name))
        _add_missing(module)
        sys.modules[_MODULE] = module


def register_native_backends() -> None:
    """Let Pulsing's own queues use our backends by name."""
    from pulsing import streaming
    from pulsing.streaming import backend as registry

    if type(getattr(registry, "_REGISTERED_BACKENDS", None)) is dict:
        registry._REGISTERED_BACKENDS = _NativeRegistry(registry._REGISTERED_BACKENDS)
    for name, cls in (("lance", NativeLance), ("persisting", NativePersisting)):
        if name not in streaming.list_backends():
            streaming.register_backend(name, cls)


def _add_missing(target: Any) -> None:
    for name in _NAMES:
        if not hasattr(target, name):
            setattr(target, name, getattr(queue, name))


class _NativeRegistry(dict[str, type]):
    """Pulsing's registry, which translates every class with our order of arguments."""

    def __init__(self, registered: dict[str, type]) -> None:
        super().__init__()
        for name, cls in registered.items():
            self[name] = cls

    def __setitem__(self, name: str, cls: type) -> None:
        super().__setitem__(name, native(cls))


def native(cls: type) -> type:
    """Return a class that Pulsing's bucket actor can call: ``cls`` itself unless it has our order
    of arguments."""
    try:
        order = list(inspect.signature(cls.get).parameters)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return cls
    if order[1:3] != ["offset", "limit"]:
        return cls
    return type(cls.__name__, (_Native,), {"_backend": cls, "__doc__": cls.__doc__})


class _Native:
    """A backend of our protocol with the method signatures that Pulsing calls."""

    _backend: str | type = ""

    def __init__(self, bucket_id: int, storage_path: str, batch_size: int = 100, **options: Any):
        cls = get_backend_class(self._backend)
        backend = cls(
            bucket_id=bucket_id, storage_path=storage_path, batch_size=batch_size, **options
        )
        self._inner = adapt(backend, batch_size)

    async def put(self, record: dict[str, Any]) -> None:
        await self._inner.put(record)

    async def put_batch(self, records: list[dict[str, Any]]) -> None:
        await self._inner.put_batch(records)

    async def get(self, limit: int, offset: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = await self._inner.get(offset, limit)
        return records

    async def get_stream(
        self, limit: int, offset: int, wait: bool = False, timeout: float | None = None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        async for first, page, _ in self._inner.get_pages(offset, limit, False):
            offset, limit = first + len(page), limit - len(page)
            yield page
        while wait and limit > 0:
            try:
                await within(self._inner.wait_beyond(offset), timeout)
            except asyncio.TimeoutError:
                return
            page = await self._inner.get(offset, limit)
            offset, limit = offset + len(page), limit - len(page)
            yield page

    async def flush(self) -> None:
        await self._inner.flush()

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = await self._inner.stats()
        return stats

    def total_count(self) -> int:
        return int(self._inner.total_count())

    async def close(self) -> None:
        await self._inner.close()


class NativeLance(_Native):
    """LanceBackend for Pulsing's own queues."""

    _backend = "lance"


class NativePersisting(_Native):
    """PersistingBackend for Pulsing's own queues."""

    _backend = "persisting"
