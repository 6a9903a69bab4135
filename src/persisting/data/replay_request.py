"""The arguments of a sample from a replay buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from persisting.data.checks import check_count, check_fixed_where
from persisting.errors import InvalidArgument

UNIFORM, RECENCY, PRIORITY = "uniform", "recency", "priority"


@dataclass(frozen=True)
class SampleRequest:
    """What to sample, checked."""

    n: int
    by: str
    half_life: float | None
    beta: float
    where: str | None
    group_by: str | None
    group_size: int | None
    replacement: bool
    task: str | None

    @classmethod
    def checked(
        cls,
        n: int,
        by: str,
        half_life: float | None,
        beta: float,
        where: str | None,
        group_by: str | None,
        group_size: int | None,
        replacement: bool | None,
        task: str | None,
    ) -> SampleRequest:
        check_count("n", n)
        check_fixed_where(where)
        if by not in (UNIFORM, RECENCY, PRIORITY):
            raise InvalidArgument(f"by must be one of 'uniform', 'recency', 'priority', got {by!r}")
        if (by == RECENCY) != (half_life is not None):
            raise InvalidArgument(f"by='recency' and half_life go together, got by={by!r}")
        if half_life is not None and not _is_positive(half_life):
            raise InvalidArgument(f"half_life must be a number of seconds, got {half_life!r}")
        if not isinstance(beta, (int, float)) or not 0 <= beta <= 1:
            raise InvalidArgument(f"beta must be a number from 0 to 1, got {beta!r}")
        if (group_by is None) != (group_size is None):
            raise InvalidArgument("group_by and group_size go together")
        if group_size is not None:
            check_count("group_size", group_size)
        if task is not None and (not isinstance(task, str) or not task):
            raise InvalidArgument(f"task must be a name, got {task!r}")
        if task is not None and replacement:
            raise InvalidArgument("a task takes each record once; leave out replacement=True")
        repeats = task is None if replacement is None else bool(replacement)
        return cls(n, by, half_life, beta, where, group_by, group_size, repeats, task)


def _is_positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number) and number > 0
