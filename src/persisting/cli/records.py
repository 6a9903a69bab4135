"""Converts stored rows to records and records to text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from persisting.cli import output

if TYPE_CHECKING:
    import pyarrow as pa

    from persisting.topic.spec import TopicConfig

_LONG_LIST = 8
_LONG_TEXT = 200


def records(
    batch: pa.RecordBatch, schema: pa.Schema, names: list[str], config: TopicConfig
) -> list[dict[str, Any]]:
    """Convert rows to records as the queue returns them: all fields, with the topic's defaults."""
    import pyarrow as pa

    from persisting.records.arrow import align

    target = pa.schema([schema.field(name) for name in names])
    converted: list[dict[str, Any]] = align(
        batch, target, config.options.get("schema_defaults") or {}
    ).to_pylist()
    return converted


def without_nulls(value: Any) -> Any:
    """Return a record without the fields that have no value, also in nested records."""
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
