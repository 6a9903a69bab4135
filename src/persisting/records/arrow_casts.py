"""Converts arrays to a wider type, exactly.

Arrow's own cast does not add dict fields, and loses the length of lists of empty dicts.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def convert(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert ``array`` to the wider type ``target``, exactly; this may add dict fields."""
    if array.type == target:
        return array
    if pa.types.is_null(array.type) or array.null_count == len(array):
        return pa.nulls(len(array), target)
    if pa.types.is_struct(target):
        return _convert_struct(array, target)
    if pa.types.is_fixed_size_list(array.type):
        return _convert_vector(array, target)
    if pa.types.is_list(target):
        if array.null_count:
            array = _without_hidden(array)
        items = convert(array.values, target.value_type)
        return pa.Array.from_buffers(
            target, len(array), array.buffers()[:2], offset=array.offset, children=[items]
        )
    if isinstance(target, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(target, array)
    return array.cast(target)


def list_items(array: pa.Array) -> pa.Array:
    """The items of all lists, without values hidden under nulls if Arrow can exclude them."""
    try:
        return array.flatten()
    except pa.ArrowNotImplementedError:  # for nested extension types
        return array.values


def _without_hidden(array: pa.Array) -> pa.Array:
    """The same lists without values hidden under nulls, which may not be convertible."""
    try:
        return array.take(pa.array(range(len(array))))
    except pa.ArrowNotImplementedError:
        return array


def _convert_struct(array: pa.Array, target: pa.DataType) -> pa.Array:
    children = []
    parts = array.flatten()  # makes parts of a null dict null: no hidden values remain
    for field in target:
        index = array.type.get_field_index(field.name)
        if index < 0:
            children.append(pa.nulls(len(array), field.type))
        else:
            children.append(convert(parts[index], field.type))
    if not children:
        return pa.array([{}] * len(array), target, mask=_mask(array))
    return pa.StructArray.from_arrays(children, fields=list(target), mask=_mask(array))


def _convert_vector(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(target):
        items = convert(_vector_items(array), target.value_type)
        return pa.FixedSizeListArray.from_arrays(items, type=target, mask=_mask(array))
    plain = array.cast(pa.list_(array.type.value_type))
    return convert(plain, target)


def _vector_items(array: pa.Array) -> pa.Array:
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _mask(array: pa.Array) -> pa.Array | None:
    return pc.is_null(array) if array.null_count else None
