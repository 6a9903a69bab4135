"""The state of a replay buffer in a file beside the topic: written whole, synced, never changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from persisting import fs as filesystem
from persisting.data.slots import Region
from persisting.errors import InvalidArgument, StorageError
from persisting.fs import os_errors_as

FOLDER = "replay"
FORMAT = 1
_SUFFIX = ".state"


class GroupPlaces(msgspec.Struct, frozen=True):
    """Which records form groups."""

    column: str
    size: int
    places: bytes
    """The place of each slot's record in its group from 1 on, as uint32, compressed."""


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that sampling depends on, except the records."""

    format: int = FORMAT
    topic: str
    regions: list[Region]
    epochs: list[int]
    """How many times each bucket was restored to an older version."""
    alpha: float
    largest: float
    """The largest weight so far, which new records get."""
    weights: bytes
    """The weights of all slots, as float64, compressed."""
    taken: dict[str, bytes]
    """By task: one bit for each slot, compressed."""
    seed: int
    drawn: int
    groups: list[GroupPlaces] = []


def save(folder: Path, state: ReplayState, rows: int) -> dict[str, Any]:
    """Write a state durably and return the small value that stands for it."""
    data = msgspec.msgpack.encode(state)
    digest = hashlib.sha256(data).hexdigest()
    name = f"{digest[:16]}-{os.urandom(4).hex()}{_SUFFIX}"
    fs = filesystem.current()
    with os_errors_as("write the checkpoint", folder / FOLDER / name):
        fs.make_folder(folder / FOLDER)
        fs.write_file(folder / FOLDER / name, data)
    return {"format": FORMAT, "topic": state.topic, "file": name, "sha256": digest, "rows": rows}


class Checkpoint(msgspec.Struct, frozen=True):
    """The value that :meth:`ReplayBuffer.checkpoint` returns."""

    format: int
    topic: str
    file: str
    sha256: str
    rows: int


def checkpoint_of(value: Any) -> Checkpoint:
    try:
        found = msgspec.convert(value, Checkpoint)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"this is not a checkpoint of a replay buffer: {exc}") from exc
    if found.format > FORMAT:
        raise InvalidArgument(
            f"the checkpoint has format {found.format}, but this version reads up to {FORMAT}; "
            "upgrade persisting"
        )
    if Path(found.file).name != found.file or not found.file.endswith(_SUFFIX):
        raise InvalidArgument(f"this is not a checkpoint of a replay buffer: file {found.file!r}")
    return found


def load(folder: Path, value: Any, topic: str) -> ReplayState:
    """Return the state that a checkpoint stands for."""
    checkpoint = checkpoint_of(value)
    if checkpoint.topic != topic:
        raise InvalidArgument(
            f"the checkpoint is of another topic: its id is {checkpoint.topic!r}, that of {folder} "
            f"is {topic!r}"
        )
    path = folder / FOLDER / checkpoint.file
    try:
        data = filesystem.current().read(path)
    except FileNotFoundError:
        raise StorageError(
            f"the checkpoint {path} does not exist; restore the file from a copy, or use another "
            "checkpoint"
        ) from None
    except OSError as exc:
        raise StorageError(f"cannot read the checkpoint {path}: {exc.strerror}") from exc
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        raise StorageError(f"the checkpoint {path} is damaged; restore the file from a copy")
    return msgspec.msgpack.decode(data, type=ReplayState)


def remove(folder: Path, value: Any) -> bool:
    """Remove a checkpoint; return whether it existed."""
    path = folder / FOLDER / checkpoint_of(value).file
    if not path.exists():
        return False
    fs = filesystem.current()
    with os_errors_as("remove the checkpoint", path):
        fs.remove(path)
        fs.sync_folder(path.parent)
    return True


def pack(array: np.ndarray) -> bytes:
    """Compress an array; its type and size are known to the reader."""
    data = array.tobytes()
    compressed: bytes = len(data).to_bytes(8, "little") + pa.compress(
        data, codec="zstd", asbytes=True
    )
    return compressed


def unpack(data: bytes, dtype: Any) -> np.ndarray:
    size = int.from_bytes(data[:8], "little")
    plain = pa.decompress(data[8:], decompressed_size=size, codec="zstd", asbytes=True)
    return np.frombuffer(plain, dtype).copy()
