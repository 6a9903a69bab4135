"""The properties of a version: what the table stores beside its rows.

Our own commits (appends, retention, restores, checkpoints) carry them as properties of their
transaction, atomically with the change. Commits that Lance makes itself (schema, indexes,
compaction) carry none: the properties of the last commit that did still hold.
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
"""The last log sequence whose records the table holds. Its presence marks a
transaction as ours."""

START = "persisting.start"
"""The offset of the first row; absent means 0."""

RESTORES = "persisting.restores"
"""The restores and losses of the bucket so far, oldest first, as JSON; their count is the epoch."""

TERM = "persisting.term"
"""In an object store: the number of the ownership under which the version was committed."""

OPERATION = "persisting.operation"
"""In an object store: what a commit did, if the operation of Lance does not say it."""

UNCHANGING = ("create", "fence")
"""Operations that an object store needs, and that change no content."""

_CHECKPOINT = "persisting."

SEAL = "persisting.seal"
"""A checksum of the other properties: a flipped bit would lose or duplicate records."""


LOSS = "loss"
"""The token of an entry that is not a restore: an owner without a log died, and the records that it
had acknowledged and not flushed are lost."""


class Restored(msgspec.Struct, frozen=True):
    """A restore of the table to an older version, or a loss of its last records."""

    end: int
    """The first offset whose rows differ before and after the restore. Usually the end of the
    restored version; lower if the restore brought back rows that another one had removed."""
    token: str = ""
    """Identifies the call, so that a repeated call is recognized."""


_OPERATIONS = {
    "Append": "append",
    "Overwrite": "append",
    "Delete": "retain",
    "Restore": "restore",
    "Update": "overwrite",
    "Merge": "schema",
    "CreateIndex": "index",
    "Rewrite": "compact",
    "BaseOperation": "compact",
    "UpdateConfig": "checkpoint",
}


def own(dataset: Any, version: int) -> dict[str, str] | None:
    """The properties that the commit of ``version`` itself carries; None if it carries none."""
    transaction = _transaction(dataset, version)
    kept = dict((transaction and transaction.transaction_properties) or {})
    if SEQUENCE not in kept:
        return None
    seal = kept.pop(SEAL, None)
    if seal is not None and seal != sealed(kept)[SEAL]:
        raise TableError(
            f"the properties of version {version} of {dataset.uri} are damaged; restore the "
            "table from a copy"
        )
    return kept


def sealed(kept: Mapping[str, str]) -> dict[str, str]:
    """The properties with their checksum, as a transaction stores them."""
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
                continue  # just cleaned up; cleaning always leaves a version with properties
            if kept is not None:  # what only an object store needs ends in a folder
                return {k: v for k, v in kept.items() if k not in (TERM, OPERATION)}
        return {k: v for k, v in dataset.config().items() if k.startswith(_CHECKPOINT)}


def read_from_store(dataset: Any) -> dict[str, str]:
    """Like :func:`read`, but of a table in an object store, where versions are not listed: that
    costs a request for each. Cleaning leaves the newest version that carries properties."""
    with translated("read the transactions of", dataset.uri):
        for version in range(dataset.version, 0, -1):
            try:
                kept = own(dataset, version)
            except (OSError, ValueError) as exc:
                if version < dataset.version and "ot found" in str(exc):
                    continue  # cleaned up
                raise
            if kept is not None:
                return kept
    raise TableError(f"no version of {dataset.uri} carries properties; restore it from a copy")


def term_of(properties: Mapping[str, str]) -> int:
    return int(properties.get(TERM, 0))


def _downward(dataset: Any) -> Iterator[int]:
    """The version and all older ones that still exist, newest first."""
    yield dataset.version
    on_disk = files.versions_on_disk(Path(dataset.uri))
    yield from (version for version in reversed(on_disk) if version < dataset.version)


def operation(dataset: Any, version: int) -> str:
    """What a commit did, in one word."""
    transaction = _transaction(dataset, version)
    if transaction is None:
        return "compact"
    if noted := (transaction.transaction_properties or {}).get(OPERATION):
        return str(noted)
    return _OPERATIONS.get(type(transaction.operation).__name__, "schema")


def start_of(properties: dict[str, str]) -> int:
    return int(properties.get(START, 0))


def restores_of(properties: dict[str, str]) -> list[Restored]:
    try:
        return msgspec.json.decode(properties.get(RESTORES, "[]"), type=list[Restored])
    except msgspec.DecodeError as exc:
        raise TableError(f"the restores stored with the table cannot be read: {exc}") from exc


def encode_restores(restores: Iterable[Restored]) -> str:
    return msgspec.json.encode(list(restores)).decode()


def transaction_id(dataset: Any, version: int) -> str | None:
    """The id in the name of the file with the transaction of ``version``, if it can be read."""
    transaction = _transaction(dataset, version)
    return None if transaction is None else str(transaction.uuid)


def _transaction(dataset: Any, version: int) -> Any | None:
    try:
        return own_handle(dataset).read_transaction(version)
    except TypeError:
        return None  # Lance's Python binding cannot represent a compaction of indexed rows
