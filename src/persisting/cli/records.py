"""Converts records to text."""

from __future__ import annotations

import sys
from typing import Any

from persisting.cli import output

_LONG_LIST = 8
_LONG_TEXT = 200


def without_nulls(value: Any) -> Any:
    """Return a record without the fields that have no value, including those of nested records."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def brief(record: dict[str, Any]) -> str:
    """Return a record as one line; a terminal gets long values cut, a pipe never."""
    visible = _cut(record) if output.is_terminal(sys.stdout) else record
    return output.encoded(visible).decode()


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    if isinstance(value, list):
        if len(value) > _LONG_LIST:
            return [*map(_cut, value[:3]), f"… {len(value)} in all"]
        return [_cut(item) for item in value]
    if isinstance(value, bytes) and len(value) > _LONG_TEXT:
        return f"… {len(value):,} bytes"
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]}… {len(value):,} characters"
    return value
