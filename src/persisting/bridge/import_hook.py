"""Completing Pulsing when it is imported, in whichever order, without importing it ourselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _complete(module: ModuleType) -> None:
    from persisting.bridge.pulsing_names import complete

    complete(module)


def _register(module: ModuleType) -> None:
    from persisting.bridge.pulsing_names import register_native

    register_native()


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "pulsing": _complete,
    "pulsing.streaming": _register,
}


class _Afterwards(Loader):
    """Loads a module as its own loader would, then calls something with it."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)


class _Finder(MetaPathFinder):
    """Watches for the modules of Pulsing that are to be completed, each once."""

    def __init__(self) -> None:
        self._waiting = {name for name in _AFTER if name not in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Afterwards(spec.loader, _AFTER[fullname])
        return spec


def install() -> None:
    """Complete what is imported already, and the rest when it is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, call in _AFTER.items():
        if name in sys.modules:
            call(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
