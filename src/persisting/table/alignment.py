"""Copies arrays whose buffers Lance cannot read as they are.

Decimals must be aligned to 16 bytes. Arrow guarantees only 8: arrays that were read from the log,
received over a connection or handed over by Spark may be aligned to less, and Lance panics on them.
It also panics on a slice of structs within structs that does not begin at their first row.
"""

from __future__ import annotations

import pyarrow as pa

_BYTES = 16


def aligned(array: pa.Array) -> pa.Array:
    """Return the array, copied if its decimals are not aligned or its structs are sliced."""
    if _has_unaligned_decimals(array) or (array.offset and _has_nested_children(array.type)):
        return pa.concat_arrays([array, array.slice(0, 0)])
    return array


def _has_unaligned_decimals(array: pa.Array) -> bool:
    if not has_decimals(array.type):
        return False
    return any(buffer is not None and buffer.address % _BYTES for buffer in array.buffers())


def _has_nested_children(dtype: pa.DataType) -> bool:
    """Whether a slice of this type is a slice of its children, and those have children too."""
    if not pa.types.is_struct(dtype) and not pa.types.is_fixed_size_list(dtype):
        return False
    return any(dtype.field(i).type.num_fields for i in range(dtype.num_fields))


def has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(has_decimals(dtype.field(i).type) for i in range(dtype.num_fields))
