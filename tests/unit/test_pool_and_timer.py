"""Coalesced tasks, the thread pool and the timer."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from persisting.concurrency import coalesced, pool, timer

SOON = 20


def test_requests_while_a_run_is_under_way_share_the_next_one() -> None:
    runs, started, go = [], threading.Event(), threading.Event()

    def run() -> int:
        runs.append(len(runs))
        started.set()
        assert go.wait(SOON)
        return len(runs)

    job = coalesced.CoalescedTask(run)
    first = job.request()
    assert started.wait(SOON)
    later = [job.request() for _ in range(20)]
    assert job.pending
    assert not first.done()
    go.set()
    assert first.result(SOON) == 1
    assert {future.result(SOON) for future in later} == {2}
    assert len(runs) == 2
    assert not job.pending


def test_a_run_begins_after_the_request() -> None:
    state, seen = [0], []
    job = coalesced.CoalescedTask(lambda: seen.append(state[0]))
    for i in range(200):
        state[0] = i
        job.request().result(SOON)
        assert seen[-1] == i


def test_runs_never_overlap() -> None:
    inside, worst, guard = [0], [0], threading.Lock()

    def run() -> None:
        with guard:
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
        time.sleep(0.0005)
        with guard:
            inside[0] -= 1

    job = coalesced.CoalescedTask(run)
    futures: list[object] = []
    threads = [
        threading.Thread(target=lambda: futures.extend(job.request() for _ in range(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done, missing = wait(futures, SOON)  # type: ignore[type-var]
    assert not missing
    assert len(done) == 160
    assert worst[0] == 1


def test_error_reaches_all_callers_of_the_run_and_not_the_next() -> None:
    fail = [True]

    def run() -> str:
        if fail[0]:
            raise ZeroDivisionError
        return "fine"

    job = coalesced.CoalescedTask(run)
    with pytest.raises(ZeroDivisionError):
        job.request().result(SOON)
    fail[0] = False
    assert job.request().result(SOON) == "fine"


def test_a_cancelled_request_does_not_disturb_the_others() -> None:
    started, go = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        assert go.wait(SOON)

    job = coalesced.CoalescedTask(run)
    first = job.request()
    assert started.wait(SOON)
    second, third = job.request(), job.request()
    assert second.cancel()
    go.set()
    first.result(SOON)
    third.result(SOON)
    assert job.request().result(SOON) is None


def test_timer_calls_in_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, called, done = [0.0], [], threading.Event()
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clocked = timer._Timer()
    clocked.after(0.06, lambda: (called.append(3), done.set()))
    clocked.after(0.02, lambda: called.append(1))
    clocked.after(0.04, lambda: called.append(2))
    assert called == []
    now[0] = 1.0
    assert done.wait(SOON)
    assert called == [1, 2, 3]


def test_the_timer_does_not_call_early() -> None:
    done, began = threading.Event(), time.monotonic()
    timer.after(0.05, done.set)
    assert done.wait(SOON)
    assert time.monotonic() - began >= 0.05


def test_weak_callback_does_not_keep_its_owner_alive() -> None:
    class Owner:
        calls = 0

        def method(self) -> int:
            Owner.calls += 1
            return 5

    owner = Owner()
    call = coalesced.weak_callback(owner, Owner.method)
    assert call() == 5
    del owner
    gc.collect()
    assert call() is None
    assert Owner.calls == 1


def test_pool_is_shared_by_the_process() -> None:
    assert pool.pool() is pool.pool()


def test_failure_of_a_triggered_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("this one")

    job = coalesced.CoalescedTask(fail)
    with caplog.at_level("ERROR", "persisting"):
        job.trigger()
        assert failed.wait(SOON)
        while job.active:
            time.sleep(0.001)
    assert "this one" in caplog.text
