"""Sizes of the benchmarks, and the latency lines of the report."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from corebench.report import Run, percentile

K = 10
OURS = "ours"


class Sizes(NamedTuple):
    """Sizes that the command line sets."""

    vectors: int
    dimensions: int
    records: int
    queries: int

    def __str__(self) -> str:
        return (
            f"{self.vectors:,} x {self.dimensions} vectors, {self.records:,} records, "
            f"{self.queries} queries"
        )


class Timed(NamedTuple):
    """Durations and results of all calls."""

    seconds: list[float]
    found: list[Any]

    def ms(self, share: float) -> float:
        return percentile(self.seconds, share) * 1000


Turns = dict[str, Timed]


async def in_turns(calls: Mapping[str, Callable[[Any], Any]], arguments: Sequence[Any]) -> Turns:
    """Time each call, plain or async, with each argument, after one call to warm up.

    The calls take turns, so that noise on the machine affects all of them.
    """
    found = {name: Timed([], []) for name in calls}
    for number, argument in enumerate([arguments[0], *arguments]):
        for name, call in calls.items():
            started = time.perf_counter()
            answer = call(argument)
            if inspect.isawaitable(answer):
                answer = await answer
            if number:
                found[name].seconds.append(time.perf_counter() - started)
                found[name].found.append(answer)
    return found


def add_latency(run: Run, group: str, name: str, found: Turns) -> None:
    """Add median and 95th percentile of ours, compared with all others."""
    ours = found[OURS]
    beside = {other: theirs for other, theirs in found.items() if other != OURS}
    for label, share in (("p50", 0.5), ("p95", 0.95)):
        for other, theirs in beside.items() or [("", None)]:
            value = theirs.ms(share) if theirs is not None else None
            run.add(group, f"{name}, {label}", ours.ms(share), "ms", other, value)
