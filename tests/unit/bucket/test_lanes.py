"""Which puts form a group on its way to an object store."""

from __future__ import annotations

from typing import Any

import pytest

from persisting.bucket import lanes
from persisting.bucket.lanes import Lane, Lanes

ENOUGH = lanes._LANE_PUTS


def lane(puts: int) -> Lane:
    queued: list[Any] = [object()] * puts
    return Lane(queued, [], 1)


def lanes_after(*groups: int) -> Lanes:
    """Return lanes that have stored groups with these numbers of puts, one after the other."""
    found = Lanes()
    for puts in groups:
        one = lane(puts)
        found.add(one, 0)
        found.done(one, lambda _: None)
    return found


@pytest.mark.parametrize("puts", [1, 64, 3 * ENOUGH - 1])
def test_few_producers_form_one_group(puts: int) -> None:
    found = lanes_after(puts)
    assert found.count_of(puts) == puts
    assert not found.is_ripe(puts, 0, 0.0)


@pytest.mark.parametrize("puts", [3 * ENOUGH, 400, 401, 512, 2000])
def test_many_producers_form_three_groups_that_take_turns(puts: int) -> None:
    found = lanes_after(puts)
    third = -(-puts // 3)
    assert found.count_of(puts) == found.count_of(puts - third) == third
    assert found.count_of(puts - 2 * third) == puts - 2 * third
    assert found.is_ripe(puts, 0, 0.0)
    assert not found.is_ripe(third, 0, 0.0)


def test_no_group_leaves_only_a_few_puts() -> None:
    found = lanes_after(512)
    for puts in range(1, 1000):
        left = puts - found.count_of(puts)
        assert not left or left >= ENOUGH


def test_peak_of_producers_is_forgotten() -> None:
    found = lanes_after(2000)
    assert found.count_of(2000) == 667
    found = lanes_after(2000, *[10] * 30)
    assert found.count_of(2000) == 2000


def test_large_puts_do_not_wait_for_others() -> None:
    assert lanes_after(1).is_ripe(1, lanes._LANE_BYTES, 0.0)


def test_puts_do_not_wait_for_others_beyond_a_part_of_a_request() -> None:
    found = lanes_after(64)
    found._request_seconds = 1.0
    assert not found.is_ripe(10, 0, 0.2)
    assert found.is_ripe(10, 0, 0.3)
