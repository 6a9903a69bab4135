"""Hops between loops and threads: nothing is lost, nothing waits for what is long."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persisting import hops, work
from persisting.errors import WALError
from persisting.queue import PersistingBackend

SOON = 20


@pytest.fixture(params=["eventfd", "pipe"])
def either_bell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("either_bell")
def test_every_job_runs_once() -> None:
    crew, guard, ran, done = hops.Crew(), threading.Lock(), [0] * 5000, threading.Event()

    def job(number: int) -> None:
        with guard:
            ran[number] += 1
            if sum(ran) == len(ran):
                done.set()

    def submit(first: int) -> None:
        for number in range(first, len(ran), 4):
            crew.submit(lambda number=number: job(number))

    givers = [threading.Thread(target=submit, args=[first]) for first in range(4)]
    for giver in givers:
        giver.start()
    assert done.wait(SOON)
    assert set(ran) == {1}


def test_a_job_never_waits_for_another_while_there_may_be_more_threads() -> None:
    crew, met = hops.Crew(most=2), threading.Event()
    both = threading.Barrier(2, action=met.set)
    crew.submit(lambda: both.wait(SOON))
    crew.submit(lambda: both.wait(SOON))
    assert met.wait(SOON)


def test_a_job_that_raises_is_told_and_costs_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    crew, done = hops.Crew(most=1), threading.Event()

    def fail() -> None:
        raise ValueError("this one")

    with caplog.at_level(logging.ERROR, "persisting"):
        crew.submit(fail)
        crew.submit(done.set)
        assert done.wait(SOON)
    assert "this one" in caplog.text


def test_without_a_further_thread_the_present_ones_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, go, done = hops.Crew(), threading.Event(), threading.Event()
    crew.submit(lambda: go.wait(SOON))
    refuse_threads(monkeypatch)
    crew.submit(done.set)
    go.set()
    assert done.wait(SOON)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


async def test_a_put_that_gets_no_thread_raises_and_the_next_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PersistingBackend(bucket_id=0, storage_path=str(tmp_path / "b"), enable_wal=True)
    await backend.put({"n": 0})
    with monkeypatch.context() as patched:
        patched.setattr(hops, "_crew", hops.Crew())
        refuse_threads(patched)
        with pytest.raises(WALError, match="can't start new thread"):
            await backend.put({"n": 1})
    await backend.put({"n": 2})
    assert await backend.get() == [{"n": 0}, {"n": 2}]
    await backend.close()


@pytest.mark.usefixtures("either_bell")
def test_posts_arrive_in_order_and_once() -> None:
    async def main() -> list[tuple[str, int]]:
        box, found, done = hops.mailbox(), [], asyncio.Event()
        assert box is hops.mailbox()

        def take(name: str, number: int) -> None:
            found.append((name, number))
            if len(found) == 4000:
                done.set()

        def post(name: str) -> None:
            for number in range(1000):
                box.post(take, name, number)

        posters = [threading.Thread(target=post, args=[name]) for name in "abcd"]
        for poster in posters:
            poster.start()
        await asyncio.wait_for(done.wait(), SOON)
        return found

    found = asyncio.run(main())
    for name in "abcd":
        assert [number for whose, number in found if whose == name] == list(range(1000))


@pytest.mark.usefixtures("either_bell")
def test_a_closed_loop_takes_no_calls_and_keeps_no_files() -> None:
    def one() -> hops.Mailbox:
        async def main() -> hops.Mailbox:
            return hops.mailbox()

        return asyncio.run(main())

    one().post(pytest.fail, "called in a closed loop")
    gc.collect()
    before = descriptors()
    for _ in range(20):
        one()
    gc.collect()
    assert descriptors() <= before


def test_a_loop_that_watches_no_files_is_served_too() -> None:
    class Plain(asyncio.SelectorEventLoop):
        def add_reader(self, *args: Any) -> None:
            raise NotImplementedError

    async def main(tell: Callable[[hops.Mailbox], None]) -> None:
        told = asyncio.Event()
        box = hops.mailbox()
        threading.Thread(target=box.post, args=[told.set]).start()
        await asyncio.wait_for(told.wait(), SOON)
        tell(box)

    boxes: list[hops.Mailbox] = []
    loop = Plain()
    loop.run_until_complete(main(boxes.append))
    loop.close()
    boxes[0].post(pytest.fail, "called in a closed loop")


def test_a_short_job_waits_for_none_in_the_pool() -> None:
    go, done = threading.Event(), threading.Event()
    long = [work.SharedJob(lambda: go.wait(SOON)) for _ in range(work.POOL_THREADS)]
    futures = [job.request() for job in long]
    try:
        work.SharedJob(done.set, short=True).want()
        assert done.wait(SOON)
    finally:
        go.set()
        for future in futures:
            future.result(SOON)


_FORK = """
import os, threading
from persisting import hops, work

def used():
    for begin in (hops.submit, work.pool().submit, lambda job: work.after(0.01, job)):
        done = threading.Event()
        begin(done.set)
        assert done.wait(20)

used()
child = os.fork()
used()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=120)
