"""What Spark jobs print."""

from __future__ import annotations

from typing import Any

import msgspec

from persisting.actions.text_values import format_size
from persisting.cli import output


class JobResult(msgspec.Struct):
    """The result of a job; numbers that the job does not have are null."""

    job: str
    topic: str
    seconds: float
    rows: int | None = None
    """Rows that were read, rewritten or indexed."""
    written: int | None = None
    target: str | None = None
    fragments_before: int | None = None
    fragments_after: int | None = None
    files: int | None = None
    bytes: int | None = None
    batches: int | None = None
    lag: dict[str, int] | None = None
    parts: dict[str, int] | None = None
    """Rows of each part of a split."""


class NearPair(msgspec.Struct):
    """Two records with similar texts."""

    first: dict[str, Any]
    second: dict[str, Any]
    similarity: float


class SqlRow(msgspec.Struct):
    """A row of a query by its columns; with ``--to``, the topic, the rows written and seconds."""

    row: dict[str, Any]


class ProfileRow(msgspec.Struct):
    """Statistics of a field in one bucket, or in all (bucket is null)."""

    bucket: int | None
    column: str
    type: str
    facts: dict[str, Any]
    """Rows, nulls, ranges and lengths, as the job 'profile' returns them."""


def print_result(result: JobResult, as_json: bool) -> None:
    """Print the result of a job as JSON, or the numbers that it has as text."""

    def print_text() -> None:
        fields = msgspec.to_builtins(result).items()
        known = {name: value for name, value in fields if value is not None and value != {}}
        known["seconds"] = output.seconds(result.seconds)
        if "bytes" in known:
            known["bytes"] = format_size(known["bytes"])
        for name in ("parts", "lag"):
            if name in known:
                known[name] = ", ".join(f"{part} {count:,}" for part, count in known[name].items())
        output.facts(
            (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
            for name, value in known.items()
        )

    output.show(result, as_json, print_text)
