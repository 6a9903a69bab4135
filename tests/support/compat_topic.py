"""What the kept folders hold. Never change this: they were written by versions of the past."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any
from uuid import UUID

Record = dict[str, Any]
TOPIC, GROUP, TAG = "kept", "readers", "early"
BUCKETS = 2


def record(number: int) -> Record:
    """A record with a value of every type."""
    return {
        "id": f"r{number}",
        "n": number,
        "flag": number % 2 == 0,
        "big": 2**63 - 1 - number,
        "real": (0.1 * number, float("inf"), -0.0)[number % 3],
        "text": f"word{number % 3} 数 é 😀",
        "data": bytes(range(number % 5)),
        "naive": dt.datetime(2024, 2, 29, 12, 30, 15, number),
        "aware": dt.datetime(2024, 2, 29, 12, 30, 15, number, tzinfo=dt.timezone.utc),
        "day": dt.date(1999, 12, 31),
        "clock": dt.time(23, 59, 59, 999_999),
        "span": dt.timedelta(days=-3, microseconds=number),
        "exact": Decimal("-12345678901234567890.123456789012345678"),
        "key": UUID(int=number),
        "vector": [float(number), 0.5, -1.5, 2.0],
        "items": list(range(number % 4)),
        "nested": {"a": number, "b": {"c": ["x", None, "z"]}, "none": None},
        "rows": [{"x": 1.5, "y": "one"}, {"x": None, "y": "two"}],
        "nothing": None,
    }


def evolved(number: int) -> Record:
    """A record with a field and a key that came later, and with others that it lacks."""
    return {"id": f"r{number}", "n": number, "late": f"late {number}", "nested": {"new": [number]}}


FLUSHED = [record(n) for n in range(30)]
LATER = [evolved(n) for n in range(30, 40)]
IN_THE_LOG = [record(n) for n in range(40, 46)]
"""Acknowledged, and only in the logs: the process was killed."""
ALL = [*FLUSHED, *LATER, *IN_THE_LOG]
READ_BY_GROUP = 12
COPIED = [{"id": f"c{n}", "n": n, "text": f"copy {n}"} for n in range(4)]
"""In the backup: half of them in its table, half in its log."""
