"""The records that the torture puts: their ids name the producer, their fields grow in number."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

Record = dict[str, Any]
WORDS = 5

_EXTRA = (
    lambda n: n,
    lambda n: f"field {n}",
    lambda n: {"a": n},
    lambda n: {"a": n, "b": [n, n + 1]},
    lambda n: [n] * (n % 4),
    lambda n: None,
)


def record(name: str, number: int, shape: int) -> Record:
    """Create a record; ``shape`` is the number of schema changes so far."""
    made: Record = {
        "id": f"{name}.{number}",
        "n": number,
        "text": f"word{number % WORDS} common",
        "v": number + 0.5 if shape > 2 else number,
        "emb": [float(number % 7), float(number % 5), 1.0, 0.5],
    }
    for extra in range(shape % 9):
        made[f"f{extra}"] = _EXTRA[extra % len(_EXTRA)](number)
    return made


def plain(made: Record) -> Record:
    """Keep only the fields that every Arrow table has."""
    return {key: made[key] for key in ("id", "n", "text", "emb")}


def as_arrow(records: list[Record]) -> pa.Table:
    schema = pa.schema(
        {
            "id": pa.string(),
            "n": pa.int64(),
            "text": pa.string(),
            "emb": pa.list_(pa.float64(), 4),
        }
    )
    return pa.Table.from_pylist(records, schema=schema)
