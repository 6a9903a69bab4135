"""What our Java classes tell the reader of a scan: metadata of the first field of its schema."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyspark.serializers import CPickleSerializer
from pyspark.sql.types import StructField, StructType

HINTS = "persisting.hints"
ROWS = "_persisting_rows"
"""The only field of a scan that needs none; its values are null."""


@dataclass(frozen=True)
class ScanHints:
    """The conditions of a scan, and the partitions that the first scan of the same load planned."""

    conditions: list[dict[str, Any]] = field(default_factory=list)
    partitions: list[Any] | None = None


def take_hints(schema: StructType) -> tuple[StructType, ScanHints]:
    """Return the schema without hints, and the hints."""
    if not schema.fields or HINTS not in (schema.fields[0].metadata or {}):
        return schema, ScanHints()
    first, *rest = schema.fields
    metadata = dict(first.metadata or {})
    decoded = msgspec.json.decode(metadata.pop(HINTS))
    plain = StructField(first.name, first.dataType, first.nullable, metadata)
    planned = decoded.get("partitions")
    if planned is not None:
        unpickle = CPickleSerializer().loads  # Spark pickled them, and sends them back as they were
        planned = [unpickle(base64.b64decode(text)) for text in planned]
    return StructType([plain, *rest]), ScanHints(decoded.get("conditions") or [], planned)
