"""Adding names to Pulsing when it is imported, before or after us, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast


def _add_names(module: ModuleType) -> None:
    from persisting.bridge.pulsing_names import add_missing_names

    add_missing_names(module)


def _register_backends(module: ModuleType) -> None:
    from persisting.bridge.pulsing_names import register_native_backends

    register_native_backends()


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "pulsing": _add_names,
    "pulsing.streaming": _register_backends,
}


class _CallingLoader:
    """Loads a module with its own loader, then calls a function with it."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)


class _Finder:
    """Catches the first import of each module in ``_AFTER_IMPORT``."""

    def __init__(self) -> None:
        self._pending = {name for name in _AFTER_IMPORT if name not in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._pending:
            return None
        self._pending.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            # The base classes of importlib.abc would cost every command 20 ms.
            spec.loader = cast(Any, _CallingLoader(spec.loader, _AFTER_IMPORT[fullname]))
        return spec


def install() -> None:
    """Handle the modules that are already imported, and the others when they are."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, call in _AFTER_IMPORT.items():
        if name in sys.modules:
            call(sys.modules[name])
    sys.meta_path.insert(0, cast(Any, _Finder()))
