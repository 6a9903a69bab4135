"""Expected search results, computed from all records without an index."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import numpy as np

from persisting.queue import InvalidArgument

QUIET: dict[str, Any] = {"flush_interval": None, "flush_threshold": 1 << 30, "compaction": False}
"""Options that switch automatic flushes and maintenance off."""

EXACT, ROUNDED = 1e-4, 2e-2
"""Relative errors of a distance: Lance computes in float32, and in less for float16."""


def vectors(count: int, size: int, seed: int = 0) -> list[list[float]]:
    found: list[list[float]] = np.random.default_rng(seed).normal(size=(count, size)).tolist()
    return found


def distance(vector: list[float], query: list[float], metric: str) -> float:
    a, b = np.asarray(vector, np.float64), np.asarray(query, np.float64)
    if metric == "l2":
        return float(((a - b) ** 2).sum())
    if metric == "dot":
        return float(1 - a @ b)
    with np.errstate(invalid="ignore"):
        return float(1 - (a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def distances(
    records: list[dict[str, Any]], query: list[float], metric: str = "l2", column: str = "v"
) -> dict[int, float]:
    """Return the distance of each record that has one, by its position."""
    found = {}
    for place, record in enumerate(records):
        if record[column] is not None:
            value = distance(record[column], query, metric)
            if np.isfinite(value):
                found[place] = value
    return found


def assert_nearest(
    hits: list[dict[str, Any]],
    records: list[dict[str, Any]],
    query: list[float],
    k: int,
    *,
    metric: str = "l2",
    start: int = 0,
    error: float = EXACT,
    when: str = "",
) -> None:
    """Assert that ``hits`` are the ``k`` nearest of ``records``, whose offsets begin at ``start``.

    Records of equal distance may stand for each other; every hit must be what it says it is.
    """
    exact = distances(records, query, metric)
    expected = sorted(exact.values())[:k]
    assert len(hits) == len(expected), when
    offsets = [hit["_offset"] for hit in hits]
    assert len(set(offsets)) == len(offsets), f"{when}: a record was found twice"
    for hit, best in zip(hits, expected, strict=True):
        place = hit["_offset"] - start
        found = {n: v for n, v in hit.items() if n not in ("_distance", "_offset")}
        assert found == records[place], when
        assert _close(hit["_distance"], exact[place], error), (when, hit, exact[place])
        assert _close(hit["_distance"], best, error), (when, hit, best)


def _close(found: float, expected: float, error: float) -> bool:
    return abs(found - expected) <= error * max(1.0, abs(expected))


def recall(hits: list[dict[str, Any]], nearest: set[int]) -> float:
    """Return the share of the nearest records that were found."""
    return len(nearest & {hit["_offset"] for hit in hits}) / len(nearest)


async def complaint(call: Awaitable[Any], message: str) -> str | None:
    """Return None if the call is refused with that message, else what happened instead."""
    try:
        found = await call
    except InvalidArgument as exc:
        return None if re.search(message, str(exc)) else f"refused with {exc}"
    except Exception as exc:
        return f"raised {exc!r}"
    return f"gave {found!r}"
