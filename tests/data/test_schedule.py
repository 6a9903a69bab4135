"""How the steps of all ranks divide an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.data.schedule import DROPPED, PADDED, UNEVEN, Schedule

worlds, batch_sizes = st.integers(1, 9), st.integers(1, 20)


def taken(schedule: Schedule) -> list[int]:
    return [
        int(position)
        for step in range(schedule.steps)
        for rank in range(schedule.world_size)
        for position in schedule.share(step, rank)
    ]


@given(size=st.integers(0, 500), first=st.integers(0, 500), world=worlds, batch=batch_sizes)
def test_uneven_steps_take_every_position_once(
    size: int, first: int, world: int, batch: int
) -> None:
    first = min(first, size)
    schedule = Schedule(size, first, world, batch, UNEVEN)
    assert taken(schedule) == list(range(first, size))


@given(size=st.integers(0, 500), world=worlds, batch=batch_sizes)
def test_uneven_batches_of_a_step_differ_by_one_row(size: int, world: int, batch: int) -> None:
    schedule = Schedule(size, 0, world, batch, UNEVEN)
    for step in range(schedule.steps):
        sizes = [len(schedule.share(step, rank)) for rank in range(world)]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch
        if size >= world and batch > 1:
            assert min(sizes) >= 1, "a rank has no row though there are enough"


@given(size=st.integers(1, 500), world=worlds, batch=batch_sizes)
def test_padded_steps_are_full_and_repeat_only_the_start(size: int, world: int, batch: int) -> None:
    schedule = Schedule(size, 0, world, batch, PADDED)
    found = taken(schedule)
    assert len(found) == schedule.steps * world * batch
    assert found[:size] == list(range(size))
    assert found[size:] == [n % size for n in range(size, len(found))]


@given(size=st.integers(0, 500), world=worlds, batch=batch_sizes)
def test_dropped_steps_are_full_and_leave_out_only_the_end(
    size: int, world: int, batch: int
) -> None:
    schedule = Schedule(size, 0, world, batch, DROPPED)
    found = taken(schedule)
    assert found == list(range(size // (world * batch) * world * batch))


@given(
    size=st.integers(1, 400),
    stops=st.lists(st.tuples(worlds, batch_sizes, st.integers(0, 10)), max_size=8),
)
def test_stops_with_changing_ranks_take_every_position_once(
    size: int, stops: list[tuple[int, int, int]]
) -> None:
    found: Counter[int] = Counter()
    position = 0
    for world, batch, steps in [*stops, (3, 4, 10_000)]:
        schedule = Schedule(size, position, world, batch, UNEVEN)
        done = min(steps, schedule.steps)
        for step in range(done):
            for rank in range(world):
                found.update(schedule.share(step, rank).tolist())
        position = schedule.start(done)
    assert found == Counter(range(size))


@given(size=st.integers(1, 400), world=worlds, batch=batch_sizes, steps=st.integers(0, 50))
def test_schedule_continues_as_if_it_was_never_interrupted(
    size: int, world: int, batch: int, steps: int
) -> None:
    whole = Schedule(size, 0, world, batch, UNEVEN)
    steps = min(steps, whole.steps)
    rest = Schedule(size, whole.start(steps), world, batch, UNEVEN)
    assert rest.steps == whole.steps - steps
    for step in range(rest.steps):
        for rank in range(world):
            assert np.array_equal(rest.share(step, rank), whole.share(steps + step, rank))


@pytest.mark.parametrize("remainder", [UNEVEN, PADDED, DROPPED])
def test_empty_epoch_has_no_steps(remainder: str) -> None:
    assert Schedule(0, 0, 4, 8, remainder).steps == 0
