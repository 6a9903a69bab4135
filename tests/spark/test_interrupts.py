"""Ctrl-C while Spark starts is deferred, and the handler is restored."""

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


def test_interrupt_is_deferred_to_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_is_not_deferred() -> None:
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, reached)
    assert not reached


def test_handler_set_during_a_deferral_stays_unless_the_old_one_is_preserved() -> None:
    before = signal.getsignal(signal.SIGINT)
    with preserved_interrupt_handler():
        with deferred_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_left_alone_in_other_threads() -> None:
    reached: list[bool] = []
    with preserved_interrupt_handler(), ThreadPoolExecutor(1) as pool:
        pool.submit(interrupted, 0, reached).result()
    assert reached
