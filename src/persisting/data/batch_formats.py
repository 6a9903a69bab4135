"""Converts Arrow batches to rows and batches of Python, NumPy and torch values.

Numbers and vectors without nulls are not copied: their arrays and tensors share Arrow's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.errors import InvalidArgument

ARROW, PYTHON, NUMPY, TORCH = "arrow", "python", "numpy", "torch"


def check_format(name: Any, choices: tuple[str, ...]) -> None:
    """Raise unless ``name`` is a format that can be used here."""
    if name not in choices:
        raise InvalidArgument(
            f"format must be one of {', '.join(map(repr, choices))}, got {name!r}"
        )
    if name == TORCH:
        try:
            import torch  # noqa: F401
        except ImportError as exc:
            raise InvalidArgument("format='torch' needs torch: pip install torch") from exc


def to_batch(batch: pa.RecordBatch, kind: str) -> Any:
    """Return a batch in a format: a RecordBatch, a list of dicts, or columns by name."""
    if kind == ARROW:
        return batch
    if kind == PYTHON:
        return batch.to_pylist()
    convert = to_numpy if kind == NUMPY else _to_torch
    return {f.name: convert(batch.column(i)) for i, f in enumerate(batch.schema)}


def to_rows(batch: pa.RecordBatch, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a batch as dicts."""
    if kind == PYTHON:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    columns = to_batch(batch, kind)
    return [
        {name: column[row] for name, column in columns.items()} for row in range(batch.num_rows)
    ]


def to_numpy(array: pa.Array) -> np.ndarray:
    """Return a column as an array.

    Vectors become rows of a matrix. Missing numbers become NaN in a column of floats; any other
    column with missing values, and everything that NumPy has no type for, becomes an array of
    objects.
    """
    dtype = array.type
    if _is_number(dtype) and not array.null_count:
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(dtype) or pa.types.is_string(dtype) or pa.types.is_binary(dtype):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(dtype) and _is_number(dtype.value_type):
        if not array.null_count and not array.flatten().null_count:
            return to_numpy(array.flatten()).reshape(len(array), dtype.list_size)
    if pa.types.is_list(dtype) and _is_number(dtype.value_type):
        return _objects(array, lambda item: to_numpy(item.values))
    return _objects(array, lambda item: item.as_py())


def _objects(array: pa.Array, convert: Callable[[Any], Any]) -> np.ndarray:
    result = np.empty(len(array), object)
    for i, item in enumerate(array):
        result[i] = convert(item) if item.is_valid else None
    return result


def _is_number(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
    )


def _to_torch(array: pa.Array) -> Any:
    """Return numbers and vectors as a tensor, anything else as a list."""
    import torch

    values = to_numpy(array)
    if values.dtype == object:
        return [_tensor_or_value(value) for value in values]
    if values.flags.writeable:
        return torch.from_numpy(values)
    # Arrow's memory is read-only for NumPy, and torch would warn of that. The batch is the only
    # owner of these values, so the tensor may share them.
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return torch.from_dlpack(flat).reshape(values.shape)


def _tensor_or_value(value: Any) -> Any:
    import torch

    return torch.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else value
