"""Ctrl-C while Spark starts: nothing is left behind."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from persisting.spark.interrupts import deferred_interrupts, preserved_interrupt_handler


def interrupted(times: int, reached: list[bool]) -> None:
    with deferred_interrupts():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        reached.append(True)


def test_an_interrupt_waits_for_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait() -> None:
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, reached)
    assert not reached


def test_a_handler_that_was_set_meanwhile_stays_unless_it_is_not_wanted() -> None:
    before = signal.getsignal(signal.SIGINT)
    with preserved_interrupt_handler():
        with deferred_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_have_no_interrupts() -> None:
    reached: list[bool] = []
    with preserved_interrupt_handler(), ThreadPoolExecutor(1) as pool:
        pool.submit(interrupted, 0, reached).result()
    assert reached
