"""The registry of backends by name."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

from persisting.errors import InvalidArgument

_OURS = {
    "memory": ("persisting.backends.memory", "MemoryBackend"),
    "lance": ("persisting.backends.lance", "LanceBackend"),
    "persisting": ("persisting.backends.persisting", "PersistingBackend"),
}
_METHODS = ("put", "put_batch", "get", "get_stream", "flush", "stats", "total_count")

_registered: dict[str, type] = {}
_guard = threading.Lock()


def register_backend(name: str, backend_class: type) -> None:
    """Make ``backend=name`` mean this class; registering a name again replaces its class."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a backend's name must be a non-empty string, got {name!r}")
    check_class(backend_class)
    with _guard:
        _registered[name] = backend_class


def get_backend_class(backend: str | type) -> type:
    """Return the class for a name; a class is returned unchanged."""
    if isinstance(backend, type):
        return check_class(backend)
    with _guard:
        if backend in _registered:
            return _registered[backend]
    if backend in _OURS:
        module, name = _OURS[backend]
        found: type = getattr(import_module(module), name)
        return found
    raise InvalidArgument(
        f"unknown backend {backend!r}; available: {', '.join(list_backends())}. "
        "Register others with register_backend(name, cls)"
    )


def list_backends() -> list[str]:
    """Return the names that ``backend=`` accepts."""
    with _guard:
        return sorted({*_OURS, *_registered}, key=lambda n: (n not in _OURS, n))


def backend_name(backend: str | type) -> str:
    """Return the name to store for a backend: the registered one, else the class's own."""
    if isinstance(backend, str):
        get_backend_class(backend)
        return backend
    for name in list_backends():
        if name in _registered and _registered[name] is backend:
            return name
    for name, (_, own) in _OURS.items():
        if backend.__name__ == own and backend.__module__.startswith("persisting."):
            return name
    return backend.__name__


def check_class(backend_class: Any) -> type:
    """Raise unless the class has every method of the protocol."""
    if not isinstance(backend_class, type):
        raise InvalidArgument(f"a backend must be a class, got {backend_class!r}")
    missing = [m for m in _METHODS if not callable(getattr(backend_class, m, None))]
    if missing:
        raise InvalidArgument(
            f"{backend_class.__name__} is not a storage backend: it lacks {', '.join(missing)}"
        )
    return backend_class
