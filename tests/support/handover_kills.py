"""Owners and drivers of hand-overs that are killed at named points, or at any time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from support.handover import PUTS
from support.held_process import HeldProcess
from support.waiting import until_true


def points(names: Iterable[str], not_nightly: Collection[str]) -> list[Any]:
    """Return parameters, of which those that are not in ``not_nightly`` are nightly."""
    return [
        name if name in not_nightly else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


def kill_owner(
    owner: HeldProcess,
    point: str,
    hand_over: Callable[[], int],
    meanwhile: Callable[[], object] = lambda: None,
) -> int:
    """Kill an owner at a point of a hand-over, which its driver completes; return what the owner
    has acknowledged. ``meanwhile`` is called when it has reached the point."""
    owner.until(lambda: owner.acknowledged > PUTS + 50)
    rows: list[int] = []
    driver = threading.Thread(target=lambda: rows.append(hand_over()))
    driver.start()
    owner.until_held(point)
    meanwhile()
    owner.kill()
    acknowledged = owner.acknowledged
    driver.join()
    assert rows
    return acknowledged


def kill_driver(
    driver: HeldProcess, driver_point: str, owner: HeldProcess, owner_point: str
) -> None:
    """Kill a driver at its point, and the owner before that if it reaches its own point first."""
    until_true(lambda: driver.is_held(driver_point) or owner.is_held(owner_point))
    if owner.is_held(owner_point):
        owner.kill()
        until_true(lambda: driver.is_held(driver_point) or driver.process.poll() is not None)
    driver.kill()


def kill_any(
    owner: HeldProcess, driver: HeldProcess, chance: random.Random, seconds: float
) -> bool:
    """Kill an owner, its driver or neither; return whether the driver has completed its write,
    for which it has ``seconds``."""
    victim = chance.choice([owner, driver, None])
    if victim is not None:
        victim.kill()
    if victim is not driver:
        driver.process.wait(seconds)
    return driver.process.returncode == 0
