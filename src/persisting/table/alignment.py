"""Buffers as Lance wants them: decimals at multiples of 16 bytes.

Arrow promises 8: what came from a log, over a wire or from Spark may lie in between, and Lance
panics.
"""

from __future__ import annotations

import pyarrow as pa

_BYTES = 16


def aligned(array: pa.Array) -> pa.Array:
    """The same array, copied if its decimals do not lie well."""
    if not has_decimals(array.type):
        return array
    if all(buffer is None or buffer.address % _BYTES == 0 for buffer in array.buffers()):
        return array
    return pa.concat_arrays([array, array.slice(0, 0)])


def has_decimals(dtype: pa.DataType) -> bool:
    if pa.types.is_decimal(dtype):
        return True
    return any(has_decimals(dtype.field(place).type) for place in range(dtype.num_fields))
