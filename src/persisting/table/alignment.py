"""Copies arrays on which Lance would panic.

Lance requires the buffers of decimals to be aligned to 16 bytes. Arrow guarantees only 8: arrays
that were read from the log, received over a connection or handed over by Spark may have less. Lance
also panics on a slice of structs that hold structs.
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
    """Whether the type holds structs, or vectors of values that are nested themselves."""
    if pa.types.is_struct(dtype):
        return True
    return any(
        _has_nested_children(dtype.field(i).type)
        or (pa.types.is_fixed_size_list(dtype) and dtype.field(i).type.num_fields > 0)
        for i in range(dtype.num_fields)
    )


def has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(has_decimals(dtype.field(i).type) for i in range(dtype.num_fields))
