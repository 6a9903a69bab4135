"""Reads some fields of a struct without reading the others.

Lance reads a field of a struct as a column of its own, which does not say whether the struct itself
is null. It is not where any of its fields has a value. Where all fields that were read are null,
only the whole struct says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from persisting.records.arrow_casts import convert


class Leaf(NamedTuple):
    """A field inside a struct: its names from the outside in, and its type."""

    path: tuple[str, ...]
    dtype: pa.DataType

    @property
    def expression(self) -> str:
        return ".".join(f"`{name}`" for name in self.path)


def needed_leaves(stored: pa.Field, asked: pa.DataType) -> list[Leaf] | None:
    """Return the fields to read of a stored struct; None if all are needed, or none is known."""
    leaves = list(_leaves((stored.name,), stored.type, asked))
    return leaves if 0 < len(leaves) < _count(stored.type) else None


def _leaves(path: tuple[str, ...], stored: pa.DataType, asked: pa.DataType) -> Iterator[Leaf]:
    if not (pa.types.is_struct(stored) and pa.types.is_struct(asked)):
        yield Leaf(path, stored)
        return
    for field in asked:
        index = stored.get_field_index(field.name)
        if index >= 0:
            yield from _leaves((*path, field.name), stored.field(index).type, field.type)


def _count(dtype: pa.DataType) -> int:
    return sum(_count(field.type) for field in dtype) if pa.types.is_struct(dtype) else 1


def assembled(leaves: list[Leaf], columns: dict[str, Any]) -> pa.StructArray | None:
    """Return the struct of leaves, by their expressions; None if they do not say what is null."""
    inside = [(Leaf(leaf.path[1:], leaf.dtype), columns[leaf.expression]) for leaf in leaves]
    return _struct(inside)


def _struct(inside: list[tuple[Leaf, Any]]) -> pa.StructArray | None:
    fields: dict[str, Any] = {}
    for leaf, column in inside:
        if len(leaf.path) == 1:
            fields[leaf.path[0]] = convert(column, leaf.dtype)
        elif leaf.path[0] not in fields:
            below = [
                (Leaf(other.path[1:], other.dtype), values)
                for other, values in inside
                if other.path[0] == leaf.path[0]
            ]
            part = _struct(below)
            if part is None:
                return None
            fields[leaf.path[0]] = part
    arrays = list(fields.values())
    if pc.any(reduce(pc.and_, [array.is_null() for array in arrays])).as_py():
        return None
    return pa.StructArray.from_arrays(arrays, names=list(fields))
