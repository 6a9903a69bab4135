"""A small JSON object that is changed by compare-and-swap."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from persisting import json_files
from persisting.errors import StorageError
from persisting.store.object_store import (
    ObjectChanged,
    ObjectExists,
    ObjectStore,
    ObjectVersion,
    StoredObject,
)

_S = TypeVar("_S", bound=msgspec.Struct)


class Held(NamedTuple, Generic[_S]):
    """The content of a register, and the version to replace it by."""

    content: _S
    version: ObjectVersion


class Register(Generic[_S]):
    """One object. Its content carries a nonce: tags of objects are often hashes of their bytes, and
    the same bytes of two writers would look like one version."""

    def __init__(self, store: ObjectStore, key: str, kind: type[_S], newest_format: int) -> None:
        """``kind`` has a field ``format``."""
        self._store, self._key, self._kind, self._newest = store, key, kind, newest_format

    @property
    def place(self) -> str:
        return str(self._store.address / self._key)

    def read(self) -> Held[_S] | None:
        """Return the content, None if there is no object."""
        found = self._store.get(self._key)
        return None if found is None else self.decode(found)

    def create(self, content: _S) -> Held[_S]:
        """Write the first content; raise :class:`ObjectExists` if there is another."""
        return Held(content, self._store.create(self._key, _encoded(content)))

    def swap(self, held: Held[_S], content: _S) -> Held[_S]:
        """Replace what was read; raise :class:`ObjectChanged` if it has changed since."""
        return Held(content, self._store.swap(self._key, _encoded(content), held.version))

    def update(self, change: Callable[[_S | None], _S]) -> _S:
        """Apply ``change`` to the content until no other writer interferes; return the result.

        ``change`` gets None if there is no object. It may be applied to its own result, after a
        lost answer, and must then change nothing.
        """
        held = self.read()
        while True:
            content = change(None if held is None else held.content)
            if held is not None and content == held.content:
                return content
            try:
                return (self.create(content) if held is None else self.swap(held, content)).content
            except (ObjectExists, ObjectChanged) as exc:
                held = None if exc.found is None else self.decode(exc.found)

    def decode(self, found: StoredObject) -> Held[_S]:
        """Return the content of an object that was read in another way."""
        json_files.check_format(found.data, self.place, self._newest)
        try:
            return Held(json_files.decode(found.data, self._kind), found.version)
        except msgspec.DecodeError as exc:
            raise StorageError(f"{self.place} is damaged ({exc}); restore it from a copy") from exc


class _Nonce(msgspec.Struct):
    nonce: str = ""


def has_nonce(found: StoredObject) -> bool:
    """Whether a register wrote the object."""
    return bool(json_files.decode(found.data, _Nonce).nonce)


def _encoded(content: msgspec.Struct) -> bytes:
    fields: dict[str, Any] = msgspec.to_builtins(content)
    return msgspec.json.encode({**fields, "nonce": secrets.token_hex(8)})
