"""The tree behind sampling by priority, and the numbers of slots."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persisting.data.sample_slots import Region, Slots
from persisting.data.sum_tree import SumTree


@given(
    levels=st.integers(1, 8),
    changes=st.lists(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 100)), max_size=40)),
)
def test_tree_has_the_sums_of_its_weights(
    levels: int, changes: list[list[tuple[int, int]]]
) -> None:
    size = 1 << levels
    tree, weights = SumTree(size), np.zeros(size)
    for change in changes:
        slots = np.array([slot % size for slot, _ in change], np.int64)
        values = np.array([value for _, value in change], float)
        for slot, value in zip(slots, values, strict=True):
            weights[slot] = value
        tree.set(slots, values)
        assert np.array_equal(tree.weights, weights)
        assert tree.total == weights.sum()


@given(weights=st.lists(st.integers(0, 5), min_size=16, max_size=16).filter(any))
def test_places_are_found_where_the_running_sum_has_them(weights: list[int]) -> None:
    tree = SumTree(16)
    tree.fill(np.array(weights, float))
    places = np.arange(sum(weights)) + 0.5
    expected = np.repeat(np.arange(16), weights)
    assert np.array_equal(tree.find(places), expected)


@given(
    data=st.data(),
    buckets=st.integers(1, 4),
)
def test_slots_of_live_records_never_collide(data: st.DataObject, buckets: int) -> None:
    slots = Slots([Region() for _ in range(buckets)])
    state = [(0, 0)] * buckets
    for _ in range(data.draw(st.integers(1, 8))):
        for bucket in range(buckets):
            start, end = state[bucket]
            end += data.draw(st.integers(0, 3000))
            start = data.draw(st.integers(start, end))
            state[bucket] = start, end
            if slots.grow(bucket, start, end):
                slots.arrange()
        live = slots.live_slots()
        assert len(np.unique(live)) == len(live) == slots.live
        assert len(live) == sum(end - start for start, end in state)
        assert (live < slots.size).all()
        keys = slots.keys(*slots.located(live))
        assert slots.is_live(*slots.places(keys)).all()
        assert np.array_equal(slots.of(keys), live)
        assert np.array_equal(slots.live_slots_at(np.arange(len(live))), live)
        places = {(int(b), int(o)) for b, o in zip(*slots.places(keys), strict=True)}
        assert places == {(b, o) for b, (s, e) in enumerate(state) for o in range(s, e)}
