"""Bridge between loops and threads: no call is lost, and short jobs never wait for long ones."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.descriptors import open_descriptors

from persisting.concurrency import coalesced, loop_bridge, pool, timer
from persisting.errors import StorageError, WALError
from persisting.queue import PersistingBackend, write_queue

SOON = 20


@pytest.fixture(params=["eventfd", "pipe"])
def eventfd_or_pipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)


@pytest.mark.usefixtures("eventfd_or_pipe")
def test_worker_pool_runs_every_job_once() -> None:
    workers, guard, ran, done = (
        loop_bridge.WorkerPool(),
        threading.Lock(),
        [0] * 5000,
        threading.Event(),
    )

    def job(number: int) -> None:
        with guard:
            ran[number] += 1
            if sum(ran) == len(ran):
                done.set()

    def submit(first: int) -> None:
        for number in range(first, len(ran), 4):
            workers.submit(lambda number=number: job(number))

    givers = [threading.Thread(target=submit, args=[first]) for first in range(4)]
    for giver in givers:
        giver.start()
    assert done.wait(SOON)
    assert set(ran) == {1}


def test_worker_pool_starts_a_thread_before_a_job_has_to_wait() -> None:
    workers, met = loop_bridge.WorkerPool(max_threads=2), threading.Event()
    both = threading.Barrier(2, action=met.set)
    workers.submit(lambda: both.wait(SOON))
    workers.submit(lambda: both.wait(SOON))
    assert met.wait(SOON)


def test_job_that_raises_is_logged_and_keeps_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    workers, done = loop_bridge.WorkerPool(max_threads=1), threading.Event()

    def fail() -> None:
        raise ValueError("this one")

    with caplog.at_level(logging.ERROR, "persisting"):
        workers.submit(fail)
        workers.submit(done.set)
        assert done.wait(SOON)
    assert "this one" in caplog.text


def test_worker_pool_uses_existing_threads_if_no_more_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, go, done = loop_bridge.WorkerPool(), threading.Event(), threading.Event()
    workers.submit(lambda: go.wait(SOON))
    refuse_threads(monkeypatch)
    workers.submit(done.set)
    go.set()
    assert done.wait(SOON)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


async def test_put_without_a_thread_raises_and_the_next_put_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PersistingBackend(
        bucket_id=0,
        storage_path=str(tmp_path / "b"),
        enable_wal=True,
        wal_sync_interval=600.0,  # no thread writes to the log when the next put comes
        flush_interval=None,
    )
    await backend.put({"n": 0})
    assert backend.bucket.group_commit is not None
    await asyncio.wrap_future(backend.bucket.group_commit.drain())
    while backend.bucket.group_commit._writing.active:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with monkeypatch.context() as patched:
        patched.setattr(loop_bridge, "_workers", loop_bridge.WorkerPool())
        refuse_threads(patched)
        with pytest.raises(WALError, match="can't start new thread"):
            await backend.put({"n": 1})
    await backend.put({"n": 2})
    assert await backend.get() == [{"n": 0}, {"n": 2}]
    await backend.close()


@pytest.mark.usefixtures("eventfd_or_pipe")
def test_mailbox_delivers_posts_in_order_and_once() -> None:
    async def main() -> list[tuple[str, int]]:
        box, found, done = loop_bridge.mailbox(), [], asyncio.Event()
        assert box is loop_bridge.mailbox()

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


@pytest.mark.usefixtures("eventfd_or_pipe")
def test_a_closed_loop_takes_no_calls_and_keeps_no_files() -> None:
    def one() -> loop_bridge.LoopMailbox:
        async def main() -> loop_bridge.LoopMailbox:
            return loop_bridge.mailbox()

        return asyncio.run(main())

    one().post(pytest.fail, "called in a closed loop")
    gc.collect()
    before = open_descriptors()
    for _ in range(20):
        one()
    gc.collect()
    assert open_descriptors() <= before


def test_mailbox_works_for_a_loop_without_add_reader() -> None:
    class Plain(asyncio.SelectorEventLoop):
        def add_reader(self, *args: Any) -> None:
            raise NotImplementedError

    async def main(tell: Callable[[loop_bridge.LoopMailbox], None]) -> None:
        delivered = asyncio.Event()
        box = loop_bridge.mailbox()
        threading.Thread(target=box.post, args=[delivered.set]).start()
        await asyncio.wait_for(delivered.wait(), SOON)
        tell(box)

    boxes: list[loop_bridge.LoopMailbox] = []
    loop = Plain()
    loop.run_until_complete(main(boxes.append))
    loop.close()
    boxes[0].post(pytest.fail, "called in a closed loop")


def test_signal_does_not_end_a_worker_thread() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    workers, done = loop_bridge.WorkerPool(max_threads=1), threading.Event()
    try:
        workers.submit(done.set)
        assert done.wait(SOON)
        [log_thread] = [
            t for t in threading.enumerate() if getattr(t, "_args", None) == [workers._event]
        ]
        for _ in range(20):
            signal.pthread_kill(log_thread.ident or 0, signal.SIGUSR1)
        done.clear()
        workers.submit(done.set)
        assert done.wait(SOON)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard


async def test_without_a_free_descriptor_a_put_raises_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    backend = PersistingBackend(bucket_id=0, storage_path=str(tmp_path / "b"), enable_wal=True)
    with monkeypatch.context() as patched:
        patched.setattr(loop_bridge, "_workers", loop_bridge.WorkerPool())
        patched.setattr(os, "eventfd", refuse)
        for put in (backend.put({"n": 1}), backend.put_batch([{"n": 1}])):
            with pytest.raises(WALError, match="Too many open files"):
                await asyncio.wait_for(put, SOON)
    await backend.put({"n": "another type, since none was stored"})
    await backend.close()


def test_loop_closed_with_pending_calls_is_garbage_collected() -> None:
    loops = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loops.append(weakref.ref(loop))
        loop_bridge.mailbox().post(loop.create_future().set_result, None)

    for _ in range(20):
        asyncio.run(main())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 20


def test_calls_after_an_interrupted_one_are_delivered_next() -> None:
    loop, made = asyncio.new_event_loop(), []

    def interrupt() -> None:
        made.append("interrupt")
        if len(made) == 1:
            raise KeyboardInterrupt

    async def post() -> None:
        box = loop_bridge.mailbox()
        box.post(interrupt)
        box.post(made.append, "next")
        await asyncio.sleep(SOON)

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(post())
    loop.run_until_complete(asyncio.sleep(0.05))
    assert made == ["interrupt", "interrupt", "next"]
    loop.close()


async def test_signal_that_was_handled_already_is_not_an_error() -> None:
    box, made = loop_bridge.mailbox(), []
    box.post(made.append, 1)
    box._event.wait()
    await asyncio.sleep(0)
    box.post(made.append, 2)
    await asyncio.sleep(0.05)
    assert made == [1, 2]


def test_repeating_task_lets_waiting_jobs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_bridge, "_workers", loop_bridge.WorkerPool(max_threads=1))
    done = threading.Event()

    def greedy() -> None:
        if not done.is_set():
            first.trigger()

    first = coalesced.CoalescedTask(greedy, short=True)
    first.trigger()
    coalesced.CoalescedTask(done.set, short=True).trigger()
    assert done.wait(SOON)


def test_job_whose_signal_was_lost_runs_with_the_next() -> None:
    workers, done = loop_bridge.WorkerPool(max_threads=1), threading.Semaphore(0)
    workers.submit(done.release)
    assert done.acquire(timeout=SOON)
    workers._jobs.append(done.release)  # as if Ctrl-C came before the signal
    workers.submit(done.release)
    assert done.acquire(timeout=SOON)
    assert done.acquire(timeout=SOON)


@pytest.mark.parametrize("when", ["before", "after"])
def test_task_runs_after_an_interrupted_request(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, runs = loop_bridge.WorkerPool(), threading.Semaphore(0)
    submitted = []

    def interrupted(job: Callable[[], Any]) -> None:
        submitted.append(job)
        if when == "after":
            workers.submit(job)
        if len(submitted) == 1:
            raise KeyboardInterrupt
        workers.submit(job)

    monkeypatch.setattr(loop_bridge, "submit", interrupted)
    job = coalesced.CoalescedTask(runs.release, short=True)
    with pytest.raises(KeyboardInterrupt):
        job.trigger()
    assert runs.acquire(timeout=SOON)
    job.request().result(SOON)
    assert runs.acquire(timeout=SOON)


def test_call_that_raises_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[int]:
        def fail() -> None:
            raise ValueError("this one")

        box, made = loop_bridge.mailbox(), []
        box.post(fail)
        box.post(made.append, 1)
        await asyncio.sleep(0.05)
        return made

    with caplog.at_level(logging.ERROR, "persisting"):
        assert asyncio.run(main()) == [1]
    assert caplog.text.count("ValueError: this one") == 1


def test_short_task_does_not_wait_for_the_pool() -> None:
    go, done = threading.Event(), threading.Event()
    long = [coalesced.CoalescedTask(lambda: go.wait(SOON)) for _ in range(pool.POOL_THREADS)]
    futures = [job.request() for job in long]
    try:
        coalesced.CoalescedTask(done.set, short=True).trigger()
        assert done.wait(SOON)
    finally:
        go.set()
        for future in futures:
            future.result(SOON)


def test_timer_that_could_not_start_a_thread_starts_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(timer, "_timer", fresh)
            refuse_threads(patched)
            with pytest.raises(StorageError, match="no thread for the timer"):
                PersistingBackend(bucket_id=0, storage_path=str(tmp_path / "b"))
        monkeypatch.setattr(timer, "_timer", fresh)
        backend = PersistingBackend(
            bucket_id=0, storage_path=str(tmp_path / "b"), flush_interval=0.01
        )
        await backend.put({"n": 1})
        for _ in range(1000):
            if (await backend.stats())["persisted_count"]:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the timer does not run")
        await backend.close()

    fresh = timer._Timer()
    asyncio.run(main())


_AT_EXIT = """
import asyncio, atexit, sys

def at_the_very_end():
    try:
        asyncio.run(asyncio.wait_for(backend.put({"n": 2}), 20))
    except Exception as exc:
        print(type(exc).__name__)

atexit.register(at_the_very_end)  # registered before ours, so it runs after ours
from persisting.queue import PersistingBackend
backend = PersistingBackend(bucket_id=0, storage_path=sys.argv[1], enable_wal=True)
asyncio.run(backend.put({"n": 1}))
"""


def test_nothing_is_acknowledged_after_the_lock_is_released(tmp_path: Path) -> None:
    folder = str(tmp_path / "b")
    command = [sys.executable, "-c", _AT_EXIT, folder]
    ended = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert ended.stdout == "WALError\n"

    async def stored() -> list[dict[str, Any]]:
        async with PersistingBackend(bucket_id=0, storage_path=folder) as backend:
            found: list[dict[str, Any]] = await backend.get()
            return found

    assert asyncio.run(stored()) == [{"n": 1}]


_FORK = """
import os, threading
from persisting.concurrency import loop_bridge
from persisting.concurrency import coalesced, pool, timer

def used():
    for begin in (loop_bridge.submit, pool.pool().submit, lambda job: timer.after(0.01, job)):
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


def in_child(child: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; return its exit code."""
    process = os.fork()
    if process == 0:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
def test_a_bucket_belongs_to_the_process_that_opened_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "b")

    async def opened() -> PersistingBackend:
        backend = PersistingBackend(bucket_id=0, storage_path=folder, enable_wal=True)
        await backend.put({"n": 0})
        return backend

    async def refused() -> None:
        for call in (
            backend.put({"n": 1}),
            backend.put_batch([{"n": 1}]),
            backend.flush(),
            backend.get(),
            backend.close(),
        ):
            with pytest.raises(StorageError, match="this process is a fork of it"):
                await asyncio.wait_for(call, SOON)

    async def finished() -> list[dict[str, Any]]:
        await backend.put({"n": 2})
        found: list[dict[str, Any]] = await backend.get()
        await backend.close()
        return found

    backend = asyncio.run(opened())
    assert in_child(lambda: asyncio.run(refused())) == 0
    assert asyncio.run(finished()) == [{"n": 0}, {"n": 2}]


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")
def test_synchronous_queue_refuses_use_in_a_fork(tmp_path: Path) -> None:
    opened = write_queue("t", storage_path=str(tmp_path), backend="persisting")
    writer = asyncio.run(opened).sync()
    writer.put({"id": "a"})

    def child() -> None:
        writer.put({"id": "b"})
        with pytest.raises(StorageError, match="this process is a fork of it"):
            writer.flush()

    assert in_child(child) == 0
    writer.put({"id": "c"})
    writer.close()


@pytest.mark.usefixtures("eventfd_or_pipe")
async def test_call_after_a_turn_runs_once_after_all_ready_tasks() -> None:
    box, ran = loop_bridge.mailbox(), []

    def after() -> None:
        ran.append("after")

    async def caller(number: int) -> None:
        assert box.after_turn(after)
        ran.append(number)

    await asyncio.gather(*(caller(number) for number in range(5)))
    await asyncio.sleep(0)
    assert ran == [0, 1, 2, 3, 4, "after"]
    await caller(5)
    await asyncio.sleep(0)
    assert ran[6:] == [5, "after"]


async def test_call_after_a_turn_runs_again_if_it_is_interrupted() -> None:
    box, ran = loop_bridge.mailbox(), []

    def after() -> None:
        ran.append("after")
        if len(ran) == 1:
            raise KeyboardInterrupt

    box.after_turn(after)
    with pytest.raises(KeyboardInterrupt):
        box._end_turn()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran == ["after", "after"]
