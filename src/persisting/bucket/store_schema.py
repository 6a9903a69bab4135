"""The schema of a topic in an object store: ``schema.json``, changed by compare-and-swap."""

from __future__ import annotations

import pyarrow as pa

from persisting.bucket.shared_schema import FILE, FORMAT, SchemaFile, SharedSchema
from persisting.records import Rules
from persisting.store.object_store import ObjectStore
from persisting.store.register import Register


class StoreSchema(SharedSchema):
    """Like :class:`SharedSchema`, but without a lock."""

    def __init__(self, store: ObjectStore) -> None:
        self._register = Register(store, FILE, SchemaFile, FORMAT)
        self._last: SchemaFile | None = None
        """The content that was read or written last. A schema only grows, so a proposal that
        changes nothing here needs no request."""

    def propose(self, schema: pa.Schema, large: frozenset[str], rules: Rules) -> pa.Schema:
        last = self._last
        if last is not None:
            known, content = self._merge(last, schema, large, rules)
            if content is last:
                return known
        merged: list[pa.Schema] = []

        def change(stored: SchemaFile | None) -> SchemaFile:
            result, content = self._merge(stored, schema, large, rules)
            merged.append(result)
            return content

        self._last = self._register.update(change)
        return merged[-1]

    def _load(self) -> SchemaFile | None:
        held = self._register.read()
        self._last = None if held is None else held.content
        return self._last
