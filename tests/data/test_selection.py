"""The bitmap of rows that match a condition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persisting.data.selection import Selection


@given(
    first=st.integers(0, 10**9),
    size=st.integers(1, 20_000),
    chosen=st.sets(st.integers(0, 19_999), max_size=300),
    data=st.data(),
)
def test_selected_rows_are_found_by_their_number(
    first: int, size: int, chosen: set[int], data: st.DataObject
) -> None:
    offsets = np.array(sorted(first + place for place in chosen if place < size), np.int64)
    selection = Selection(first, size)
    half = len(offsets) // 2
    selection.add(offsets[:half])
    selection.add(offsets[half:])
    assert selection.count == len(offsets)
    if len(offsets):
        numbers = data.draw(st.lists(st.integers(0, len(offsets) - 1), max_size=50))
        numbers = np.array(sorted(numbers), np.int64)
        assert np.array_equal(selection.offsets(numbers), offsets[numbers])
