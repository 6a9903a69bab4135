"""The order of a stream: blocks, windows, and rows within windows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persisting.data.order import Blocks, SequentialOrder, ShuffledOrder, order_of

sizes = st.integers(1, 3000)
blocks = st.builds(Blocks, st.integers(1, 100), st.integers(1, 20))
seeds = st.integers(0, 2**63 - 1)


@given(size=sizes, blocks=blocks, seed=seeds, epoch=st.integers(0, 5))
def test_shuffled_order_has_every_row_once(
    size: int, blocks: Blocks, seed: int, epoch: int
) -> None:
    rows = ShuffledOrder(size, blocks, seed, epoch).rows_at(np.arange(size))
    assert np.array_equal(np.sort(rows), np.arange(size))


@given(size=sizes, blocks=blocks, seed=seeds, data=st.data())
def test_any_positions_give_the_rows_of_the_whole_order(
    size: int, blocks: Blocks, seed: int, data: st.DataObject
) -> None:
    order = ShuffledOrder(size, blocks, seed, 0)
    whole = order.rows_at(np.arange(size))
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=50)), np.int64)
    assert np.array_equal(order.rows_at(positions), whole[positions])


@given(size=sizes, blocks=blocks, seed=seeds)
def test_windows_read_whole_blocks_and_no_block_twice(size: int, blocks: Blocks, seed: int) -> None:
    order = ShuffledOrder(size, blocks, seed, 0)
    seen: set[int] = set()
    position = 0
    while position < size:
        end = order.window_end(position)
        assert position < end <= size
        rows = order.rows_at(np.arange(position, end))
        inside = set((rows // blocks.block_rows).tolist())
        assert len(inside) <= blocks.window_blocks
        assert not seen & inside
        whole = [
            r for b in inside for r in range(b * blocks.block_rows, (b + 1) * blocks.block_rows)
        ]
        assert sorted(rows.tolist()) == [row for row in sorted(whole) if row < size]
        seen |= inside
        position = end


def test_each_epoch_and_each_seed_has_another_order() -> None:
    places = np.arange(500)
    orders = {
        tuple(order_of(500, Blocks(10, 4), seed, epoch).rows_at(places))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_order_without_a_seed_is_the_stored_one() -> None:
    order = order_of(100, Blocks(10, 4), None, 3)
    assert isinstance(order, SequentialOrder)
    assert np.array_equal(order.rows_at(np.arange(100)), np.arange(100))
    assert [order.window_end(p) for p in (0, 39, 40, 99)] == [40, 40, 80, 100]


def test_shuffled_order_never_changes_between_versions() -> None:
    order = ShuffledOrder(20, Blocks(3, 2), 42, 1)
    assert order.rows_at(np.arange(20)).tolist() == GOLDEN


GOLDEN = [18, 16, 19, 15, 17, 4, 3, 9, 11, 10, 5, 8, 14, 12, 13, 6, 7, 0, 1, 2]
