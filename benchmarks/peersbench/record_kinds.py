"""The kinds of records to store: four small fields, a text of 1 KB, a vector of 768 floats."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from corebench import records

DIMENSIONS = 768
_TEXT = 1024
_SAMPLE = 100

Record = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of record; ``share`` divides the number of records to store."""

    name: str
    title: str
    stream: Callable[[int], Iterator[Record]]
    share: int

    def rows(self, count: int) -> list[Record]:
        return list(self.stream(count))

    @property
    def has_vector(self) -> bool:
        return self.name == "vector"

    @property
    def fields(self) -> tuple[str, ...]:
        return ("id", "vector") if self.has_vector else records.FIELDS


def _texts(count: int) -> Iterator[Record]:
    long = "".join(row["text"] + " " for row in records.stream(400, seed=11))
    rng = random.Random(17)
    for row in records.stream(count):
        start = rng.randrange(len(long) - _TEXT)
        yield {**row, "text": long[start : start + _TEXT]}


def _vectors(count: int) -> Iterator[Record]:
    """Use floats that fit into 32 bits, so that every system returns what was put."""
    rng = random.Random(19)
    for number in range(count):
        vector = [rng.getrandbits(24) / 2**24 for _ in range(DIMENSIONS)]
        yield {"id": f"v{number:09d}", "vector": vector}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("small", "four small fields", records.stream, 1),
        Kind("text", "a text of 1 KB", _texts, 5),
        Kind("vector", f"a vector of {DIMENSIONS} floats", _vectors, 20),
    )
}


def floats_to_bytes(vector: list[float]) -> bytes:
    return array("f", vector).tobytes()


def bytes_to_floats(packed: bytes) -> list[float]:
    return array("f", packed).tolist()


class Packer:
    """Encodes records for systems that store bytes."""

    def __init__(self, kind: Kind) -> None:
        self._vector = kind.has_vector
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder().decode

    def pack(self, row: Record) -> bytes:
        if self._vector:
            return self._encode({"id": row["id"], "vector": floats_to_bytes(row["vector"])})
        return self._encode(row)

    def unpack(self, packed: bytes) -> Record:
        row: Record = self._decode(packed)
        if self._vector:
            row["vector"] = bytes_to_floats(row["vector"])
        return row


def check_equal(found: list[Record], put: list[Record], *, in_order: bool) -> None:
    """Exit if records are missing, duplicated or changed; contents are compared in a sample."""
    if len(found) != len(put):
        raise SystemExit(f"{len(put):,} records were put, but {len(found):,} came back")
    if not in_order:
        found = sorted(found, key=lambda row: row["id"])
        put = sorted(put, key=lambda row: row["id"])
    rng = random.Random(len(put))
    places = {0, len(put) - 1, *(rng.randrange(len(put)) for _ in range(_SAMPLE))} if put else ()
    for place in places:
        if found[place] != put[place]:
            raise SystemExit(f"{put[place]} was put, but {found[place]} came back")
