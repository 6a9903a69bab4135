"""Aligns the buffers of decimals to 16 bytes, as Lance requires.

Arrow guarantees only 8: arrays that were read from the log, received over a connection or handed
over by Spark may be aligned to less than 16, and Lance panics on them.
"""

from __future__ import annotations

import pyarrow as pa

_BYTES = 16


def aligned(array: pa.Array) -> pa.Array:
    """Return the array, copied if its decimals are not aligned."""
    if not has_decimals(array.type):
        return array
    if all(buffer is None or buffer.address % _BYTES == 0 for buffer in array.buffers()):
        return array
    return pa.concat_arrays([array, array.slice(0, 0)])


def has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(has_decimals(dtype.field(i).type) for i in range(dtype.num_fields))
