"""What a version says of itself beside its rows.

The commits that matter (appends, retention, restores, checkpoints) carry these as properties of
their transaction, atomically with what they do. The commits that Lance makes by itself (schema,
indexes, compaction) carry none: there the last one that did still holds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from persisting.errors import TableError
from persisting.table import files
from persisting.table.lance_errors import own_handle, translated

SEQUENCE = "persisting.sequence"
"""The last log sequence whose records the table holds. Marks a transaction as one of ours."""

START = "persisting.start"
"""The offset of the first row; absent means 0."""

RESTORES = "persisting.restores"
"""The restores of the bucket so far, oldest first, as JSON; their number is the epoch."""


_CHECKPOINT = "persisting."

SEAL = "persisting.seal"
"""A checksum of the others: a flipped bit in them would lose or double records."""


class Restored(msgspec.Struct, frozen=True):
    """A restore, and which call it was."""

    end: int
    """Where the rows after it part from those before it: its end, unless it brought rows back."""
    token: str = ""


_OPERATIONS = {
    "Append": "append",
    "Overwrite": "append",
    "Delete": "retain",
    "Restore": "restore",
    "Update": "overwrite",
    "CreateIndex": "index",
    "Rewrite": "compact",
    "BaseOperation": "compact",
    "UpdateConfig": "checkpoint",
}


def own(dataset: Any, version: int) -> dict[str, str] | None:
    """The properties that the commit of ``version`` carries, None if it carries none."""
    transaction = _transaction(dataset, version)
    kept = dict((transaction and transaction.transaction_properties) or {})
    if SEQUENCE not in kept:
        return None
    seal = kept.pop(SEAL, None)
    if seal is not None and seal != sealed(kept)[SEAL]:
        raise TableError(
            f"what version {version} of {dataset.uri} says of itself is damaged; restore the "
            "table from a copy"
        )
    return kept


def sealed(kept: Mapping[str, str]) -> dict[str, str]:
    """The properties with a checksum of theirs, as a transaction keeps them."""
    text = json.dumps(dict(sorted(kept.items())))
    return {**kept, SEAL: f"{zlib.crc32(text.encode()):08x}"}


def read(dataset: Any) -> dict[str, str]:
    """The properties of the version that ``dataset`` has checked out."""
    with translated("read the transactions of", dataset.uri):
        for version in _downward(dataset):
            try:
                kept = own(dataset, version)
            except (OSError, ValueError):
                if files.manifest_path(Path(dataset.uri), version).exists():
                    raise
                continue  # it was cleaned up just now; one that tells is always left
            if kept is not None:
                return kept
        return {k: v for k, v in dataset.config().items() if k.startswith(_CHECKPOINT)}


def _downward(dataset: Any) -> Iterator[int]:
    """The version and those before it that are left."""
    yield dataset.version
    there = files.versions_on_disk(Path(dataset.uri))
    yield from (version for version in reversed(there) if version < dataset.version)


def operation(dataset: Any, version: int) -> str:
    """What a commit did, in a word."""
    transaction = _transaction(dataset, version)
    if transaction is None:
        return "compact"
    return _OPERATIONS.get(type(transaction.operation).__name__, "schema")


def start_of(properties: dict[str, str]) -> int:
    return int(properties.get(START, 0))


def restores_of(properties: dict[str, str]) -> list[Restored]:
    try:
        return msgspec.json.decode(properties.get(RESTORES, "[]"), type=list[Restored])
    except msgspec.DecodeError as exc:
        raise TableError(f"the restores kept with the table cannot be read: {exc}") from exc


def encode_restores(restores: Iterable[Restored]) -> str:
    return msgspec.json.encode(list(restores)).decode()


def _transaction(dataset: Any, version: int) -> Any | None:
    try:
        return own_handle(dataset).read_transaction(version)
    except TypeError:
        return None  # Lance's own binding cannot show a compaction of indexed rows
