"""The state of a stream: small JSON that says which rows come next."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

import msgspec

from persisting.errors import InvalidArgument

FORMAT = 1
MOST_BYTES = 1024
_LONG_CONDITION = 200
_S = TypeVar("_S", bound=msgspec.Struct)


class WorkerPlace(msgspec.Struct, frozen=True):
    """Where one of several workers of a loader is. Its steps count from the state's position."""

    count: int
    """The number of workers."""
    step: int
    """The step after the last one that this worker has seen."""
    turn: int
    """The worker that takes that step; the workers after it take the steps after it."""
    world_size: int
    batch_size: int
    remainder: str


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the epochs of pinned rows."""

    format: int = FORMAT
    topic: str
    tag: str | None
    tag_id: str | None
    versions: list[int] | None
    """Without a tag: the versions of the buckets."""
    where: str | None
    shuffle: int | None
    blocks: tuple[int, int]
    """Rows of a block and blocks of a window of the shuffle."""
    epoch: int
    position: int
    """How many positions of the epoch's order all ranks together have taken."""
    worker: WorkerPlace | None = None


class FollowState(msgspec.Struct, frozen=True, kw_only=True):
    """The next offsets of a stream that follows a topic."""

    format: int = FORMAT
    topic: str
    where: str | None
    offsets: dict[str, int]
    """The next offset of each bucket that this rank, or this worker, reads."""
    epochs: dict[str, int] = {}
    """How many times a bucket was restored to an older version; buckets at 0 are left out."""


def encode(state: msgspec.Struct) -> dict[str, Any]:
    """Return a state as a dict that JSON can hold."""
    return {k: v for k, v in msgspec.to_builtins(state).items() if v is not None}


def decode(state: Any, kind: type[_S]) -> _S:
    """Read a state, which may have come from anywhere."""
    if not isinstance(state, dict):
        raise InvalidArgument(f"the state of a stream is a dict, got a {type(state).__name__}")
    if isinstance(state.get("format"), int) and state["format"] > FORMAT:
        raise InvalidArgument(
            f"the state has format {state['format']}, but this version reads up to {FORMAT}; "
            "upgrade persisting"
        )
    fields = {f.name: None for f in msgspec.structs.fields(kind) if f.required}
    try:
        return msgspec.convert({**fields, **state}, kind)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"this is not the state of such a stream: {exc}") from exc


def condition_of(where: str | None) -> str | None:
    """Return a condition as it is stored in states: long ones by their hash."""
    if where is None or len(where.encode()) <= _LONG_CONDITION:
        return where
    return "sha256:" + hashlib.sha256(where.encode()).hexdigest()


def size_of(state: dict[str, Any]) -> int:
    return len(json.dumps(state).encode())
