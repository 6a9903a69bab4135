"""The rules of schema evolution: pure functions that merge two Arrow types.

A strict schema fills in only unknown types (Arrow's ``null``: a value that was always None, the
items of a list that was always empty). An evolving schema also widens: int to float, narrow numbers
to wide ones, vectors of different lengths to plain lists, dicts to the union of their fields.
"""

from __future__ import annotations

import pyarrow as pa

_SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_FLOATS = [pa.float16(), pa.float32(), pa.float64()]


class Conflict(Exception):
    """Two types have no common type; ``path`` says where they differ."""

    def __init__(self, path: str, old: pa.DataType, new: pa.DataType) -> None:
        super().__init__(path)
        self.path, self.old, self.new = path, old, new


def learn(old: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
    """Fill in the unknown parts of ``old`` from ``new``, or raise :class:`Conflict`."""
    if pa.types.is_null(old) or old == new:
        return new
    if pa.types.is_null(new):
        return old
    if pa.types.is_list(old) and is_listy(new):
        return pa.list_(learn(old.value_type, new.value_type, f"{path}[]"))
    if pa.types.is_fixed_size_list(old) and pa.types.is_fixed_size_list(new):
        if old.list_size == new.list_size:
            return pa.list_(learn(old.value_type, new.value_type, f"{path}[]"), old.list_size)
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        if {f.name for f in old} == {f.name for f in new}:
            return pa.struct(
                [
                    pa.field(f.name, learn(f.type, new.field(f.name).type, f"{path}.{f.name}"))
                    for f in old
                ]
            )
    raise Conflict(path, old, new)


def widen(old: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
    """Return the narrowest type that holds the values of both, or raise :class:`Conflict`."""
    if pa.types.is_null(old) or old == new:
        return new
    if pa.types.is_null(new):
        return old
    number = _widen_number(old, new)
    if number is not None:
        return number
    if is_listy(old) and is_listy(new):
        item = widen(old.value_type, new.value_type, f"{path}[]")
        if pa.types.is_fixed_size_list(old) and pa.types.is_fixed_size_list(new):
            if old.list_size == new.list_size:
                return pa.list_(item, old.list_size)
        return pa.list_(item)
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return _union(old, new, path)
    raise Conflict(path, old, new)


def _union(old: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
    added = {f.name: f for f in new}
    merged = []
    for f in old:
        other = added.pop(f.name, None)
        both = f.type if other is None else widen(f.type, other.type, f"{path}.{f.name}")
        merged.append(pa.field(f.name, both))
    return pa.struct([*merged, *(pa.field(f.name, f.type) for f in added.values())])


def _widen_number(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if old in _FLOATS and new in _FLOATS:
        return max(old, new, key=lambda t: t.bit_width)
    if pa.types.is_integer(old) and pa.types.is_integer(new):
        return _widen_integer(old, new)
    if {pa.types.is_integer(old), pa.types.is_integer(new)} == {True, False} and (
        old in _FLOATS or new in _FLOATS
    ):
        return pa.float64()
    return None


def _widen_integer(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    signs = pa.types.is_signed_integer(old), pa.types.is_signed_integer(new)
    if signs[0] == signs[1]:
        return max(old, new, key=lambda t: t.bit_width)
    unsigned = new if signs[0] else old
    signed = old if signs[0] else new
    need = max(signed.bit_width, unsigned.bit_width * 2)
    return next((t for t in _SIGNED if t.bit_width >= need), None)


def has_integers(dtype: pa.DataType) -> bool:
    """Whether any part of ``dtype`` holds integers."""
    if pa.types.is_integer(dtype):
        return True
    return any(has_integers(dtype.field(i).type) for i in range(dtype.num_fields))


def integers_become_floats(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether an integer stored as ``old`` becomes a float as ``new``."""
    if pa.types.is_integer(old):
        return bool(pa.types.is_floating(new))
    if is_listy(old) and is_listy(new):
        return integers_become_floats(old.value_type, new.value_type)
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return any(integers_become_floats(f.type, new.field(f.name).type) for f in old)
    return False


def is_vector(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` is a list of floats of one length."""
    return bool(pa.types.is_fixed_size_list(dtype)) and pa.types.is_floating(dtype.value_type)


def is_float_list(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` is a list of floats of any length."""
    return bool(pa.types.is_list(dtype)) and pa.types.is_floating(dtype.value_type)


def is_listy(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` is a plain list or a vector."""
    return bool(pa.types.is_list(dtype) or pa.types.is_fixed_size_list(dtype))
