"""Copies arrays on which Lance would panic.

Lance requires the buffers of decimals to be aligned to 16 bytes. Arrow guarantees only 8: arrays
that were read from the log, received over a connection or handed over by Spark may have less. Lance
also panics on a slice of structs that hold structs.
"""

from __future__ import annotations

import pyarrow as pa

_BYTES = 16


def aligned(array: pa.Array) -> pa.Array:
    """Return the array, copied if its decimals are not aligned or it is a slice of structs."""
    if array.offset and _has_structs(array.type):
        return pa.concat_arrays([array, array.slice(0, 0)])
    if not has_decimals(array.type):
        return array
    if all(buffer is None or buffer.address % _BYTES == 0 for buffer in array.buffers()):
        return array
    return pa.concat_arrays([array, array.slice(0, 0)])


def _has_structs(dtype: pa.DataType) -> bool:
    if pa.types.is_struct(dtype):
        return True
    return any(_has_structs(dtype.field(i).type) for i in range(dtype.num_fields))


def has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(has_decimals(dtype.field(i).type) for i in range(dtype.num_fields))
