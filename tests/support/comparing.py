"""Compare records that were read with records that were put."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np


def canonical(value: Any) -> Any:
    """Return the Python value that ``value`` reads back as."""
    if isinstance(value, np.ndarray):
        return canonical(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict):
        return {name: canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    return value


def same(expected: Any, got: Any) -> bool:
    """Whether values are equal in value, type, field order, sign of zero and time zone."""
    if type(expected) is not type(got):
        return False
    if isinstance(expected, dict):
        return list(expected) == list(got) and all(same(expected[n], got[n]) for n in expected)
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, float):
        if math.isnan(expected):
            return math.isnan(got)
        return expected == got and math.copysign(1, expected) == math.copysign(1, got)
    if isinstance(expected, (dt.datetime, dt.time)):
        return expected == got and (expected.utcoffset() is None) == (got.utcoffset() is None)
    return expected == got


def assert_same(expected: Any, got: Any, when: str = "") -> None:
    assert same(canonical(expected), got), f"{when}\nexpected {expected!r}\ngot      {got!r}"


def equal_but_for_absent(expected: Any, got: Any) -> bool:
    """Whether values are equal if a missing field counts as None and an int as its float."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return all(
            equal_but_for_absent(expected.get(name), got.get(name)) for name in {**expected, **got}
        )
    if isinstance(expected, dict) != isinstance(got, dict):
        return False
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(equal_but_for_absent, expected, got))
    if isinstance(expected, float) and isinstance(got, float) and math.isnan(expected):
        return math.isnan(got)
    if isinstance(expected, bool) != isinstance(got, bool):
        return False
    return expected == got
