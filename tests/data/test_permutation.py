"""The keyed permutation behind a shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persisting.data.permutation import KeyedPermutation

sizes = st.integers(1, 5000)
keys = st.integers(0, 2**63 - 1)


@given(size=sizes, key=keys)
def test_permutation_has_every_number_once(size: int, key: int) -> None:
    permuted = KeyedPermutation(size, key).at(np.arange(size))
    assert np.array_equal(np.sort(permuted), np.arange(size))


@given(size=sizes, key=keys)
def test_positions_invert_the_permutation(size: int, key: int) -> None:
    permutation, numbers = KeyedPermutation(size, key), np.arange(size)
    assert np.array_equal(permutation.positions_of(permutation.at(numbers)), numbers)


@given(size=st.integers(2**40, 2**62), key=keys, data=st.data())
def test_positions_invert_the_permutation_of_huge_domains(
    size: int, key: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, size - 1))
    permutation = KeyedPermutation(size, key)
    permuted = permutation.at(np.array([number]))
    assert 0 <= permuted[0] < size
    assert permutation.positions_of(permuted)[0] == number


def test_permutation_never_changes_between_versions() -> None:
    # States of streams are stored: another result would repeat rows and leave others out.
    assert KeyedPermutation(10, 7, 0, "blocks").at(np.arange(10)).tolist() == GOLDEN


@pytest.mark.parametrize("size", [1000, 1024, 999_983])
def test_permuted_numbers_are_spread_like_random_ones(size: int) -> None:
    count = min(size, 10_000)
    permuted = KeyedPermutation(size, 3).at(np.arange(count))
    # Chi-squared over 20 classes: 60 is far beyond the 99.99 % quantile of 19 degrees of freedom.
    found = np.bincount(permuted * 20 // size, minlength=20)
    assert (((found - count / 20) ** 2) / (count / 20)).sum() < 60
    correlation = np.corrcoef(permuted[:-1], permuted[1:])[0, 1]
    assert abs(correlation) < 0.1


def test_other_keys_give_other_permutations() -> None:
    orders = {tuple(KeyedPermutation(50, seed).at(np.arange(50))) for seed in range(100)}
    assert len(orders) == 100


GOLDEN = [0, 5, 1, 2, 4, 3, 8, 9, 6, 7]
