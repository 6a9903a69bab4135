"""Which positions of an order each rank takes in each step.

All ranks take one batch in each step, so that they advance in lock step, and a step takes the next
positions of the order. The number of positions that all steps so far have taken describes where
every rank is, for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNEVEN, PADDED, DROPPED = "uneven", "padded", "dropped"
REMAINDERS = (UNEVEN, PADDED, DROPPED)


@dataclass(frozen=True)
class Schedule:
    """The steps from a position of an epoch to its end.

    If the rest of an epoch is not a whole step, ``remainder`` says what happens to it:

    - ``uneven``: its rows are divided evenly, so the batches of the last step are shorter, and
      differ by one row at most. If there are fewer rows than ranks, they are taken together with
      the step before, so that no rank goes without a row.
    - ``padded``: it is filled up with rows from the start of the epoch's order.
    - ``dropped``: it is left out.
    """

    size: int
    """Rows of the epoch."""
    first: int
    """The position from which the steps are counted."""
    world_size: int
    batch_size: int
    remainder: str = UNEVEN

    @property
    def step_rows(self) -> int:
        return self.world_size * self.batch_size

    @property
    def steps(self) -> int:
        left = self.size - self.first
        return left // self.step_rows if self.remainder == DROPPED else -(-left // self.step_rows)

    def start(self, step: int) -> int:
        """Return the first position of a step; of the one after the last, the end of the epoch."""
        steps = self.steps
        if step >= steps:
            return self.size
        start = self.first + step * self.step_rows
        rest = self.size - (self.first + (steps - 1) * self.step_rows)
        if self.remainder == UNEVEN and step == steps - 1 >= 1:
            if rest < self.world_size and self.batch_size > 1:
                return self.size - (self.step_rows + rest) // 2
        return start

    def share(self, step: int, rank: int) -> np.ndarray:
        """Return the positions that a rank takes in a step."""
        start = self.start(step)
        end = self.start(step + 1)
        if self.remainder != UNEVEN:
            end = start + self.step_rows
        count = end - start
        share = np.arange(
            start + count * rank // self.world_size,
            start + count * (rank + 1) // self.world_size,
            dtype=np.int64,
        )
        return share % self.size if end > self.size else share
