"""Converts vectors with NumPy: a column of lists and arrays, or one value, in one step.

A value fits if no number changes. Everything else is left to :mod:`persisting.records.values`,
which widens the field or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_EXACT_INT = 2**53
NUMPY_FLOATS = {np.float64, np.float32, np.float16}
_FLOATS = {float, *NUMPY_FLOATS}


def column(values: Sequence[Any], dtype: pa.DataType, *, rounding: bool) -> pa.Array | None:
    """Return a column of vectors of type ``dtype``; None if a value does not fit.

    With ``rounding``, wider floats are rounded to the type of the vectors' items.
    """
    size, item = dtype.list_size, np.dtype(dtype.value_type.to_pandas_dtype())
    rows = np.zeros((len(values), size), item)
    missing = np.zeros(len(values), bool)
    for number, value in enumerate(values):
        if value is None:
            missing[number] = True
            continue
        vector = fitted(value, size, item, rounding=rounding)
        if vector is None:
            return None
        rows[number] = vector
    flat = pa.array(rows.reshape(-1), dtype.value_type)
    mask = pa.array(missing) if missing.any() else None
    return pa.FixedSizeListArray.from_arrays(flat, type=dtype, mask=mask)


def fitted(
    value: Any, size: int, item: np.dtype[Any], *, rounding: bool
) -> npt.NDArray[Any] | None:
    """Return a value as ``size`` floats of a type; None if it does not fit."""
    if type(value) is np.ndarray:
        if value.shape != (size,) or value.dtype.kind != "f" or value.dtype.itemsize > 8:
            return None
        return _narrowed(value, item, rounding=rounding)
    if type(value) not in (list, tuple) or len(value) != size:
        return None
    kinds = set(map(type, value))
    if not kinds <= _FLOATS | {int}:
        return None
    if int in kinds and not all(abs(n) <= _EXACT_INT for n in value if type(n) is int):
        return None
    return _narrowed(np.array(value, np.float64), item, rounding=rounding)


def _narrowed(
    vector: npt.NDArray[Any], item: np.dtype[Any], *, rounding: bool
) -> npt.NDArray[Any] | None:
    if item.itemsize >= vector.dtype.itemsize:
        return vector
    with np.errstate(over="ignore"):
        narrow = vector.astype(item)
    if rounding:
        return None if (np.isinf(narrow) & ~np.isinf(vector)).any() else narrow
    return narrow if np.array_equal(narrow, vector, equal_nan=True) else None
