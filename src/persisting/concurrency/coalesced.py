"""Background tasks that run one at a time and whose runs are shared by their callers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from persisting.concurrency import loop_bridge
from persisting.concurrency.pool import pool

log = logging.getLogger("persisting")

_T = TypeVar("_T")


def weak_callback(owner: _T, method: Callable[[_T], Any]) -> Callable[[], Any]:
    """Return a callable that calls ``method`` of ``owner`` without keeping the owner alive, and
    does nothing once the owner was garbage-collected."""
    ref = weakref.ref(owner)

    def call() -> Any:
        alive = ref()
        return method(alive) if alive is not None else None

    return call


class CoalescedTask:
    """A task that has one active run at a time.

    :meth:`request` returns the future of a run that **begins after the call**, so that the run sees
    the caller's state. Callers that arrive during a run share the next one.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        *,
        short: bool = False,
        submit: Callable[[Callable[[], Any]], None] | None = None,
    ) -> None:
        """A ``short`` task runs in the worker threads of the loop bridge, not behind long work.
        ``submit`` runs it elsewhere; it raises NoThread if it cannot."""
        self._run, self._short, self._submit_to = run, short, submit
        self._lock = threading.Lock()
        self._waiting: list[Future[Any]] = []
        self._requested = False
        self._active = self._running = False

    def request(self) -> Future[Any]:
        """Start a run, or share the next one; the future has its result or error."""
        future: Future[Any] = Future()
        with suppress(loop_bridge.NoThread):  # the future has the error
            self._schedule([future])
        return future

    def trigger(self) -> None:
        """Like :meth:`request`, but without a future: ``run`` reports its own failures."""
        self._schedule([])

    def _schedule(self, waiting: list[Future[Any]]) -> None:
        try:
            with self._lock:
                self._waiting += waiting
                self._requested = True
                start = not self._active
                self._active = True
            if start:
                self._submit()
        except loop_bridge.NoThread as exc:
            with self._lock:
                refused, self._waiting = self._waiting, []
                self._requested = self._active = False
            for future in refused:
                if future.set_running_or_notify_cancel():
                    future.set_exception(exc)
            raise
        except BaseException:
            # A signal handler raised, perhaps before the submit; submitting twice is harmless.
            self._submit()
            raise

    def _submit(self) -> None:
        if self._submit_to is not None:
            self._submit_to(self._work)
            return
        if self._short:
            loop_bridge.submit(self._work)
            return
        try:
            pool().submit(self._work)
        except RuntimeError as exc:  # also during interpreter shutdown
            raise loop_bridge.NoThread(str(exc)) from exc

    @property
    def pending(self) -> bool:
        """Whether a run is waiting to begin."""
        return self._requested

    @property
    def active(self) -> bool:
        """Whether a run is active or waiting to begin."""
        return self._active

    def _work(self) -> None:
        with self._lock:
            if self._running:
                return
            self._running = True
        while True:
            with self._lock:
                served, self._waiting = self._waiting, []
                requested, self._requested = self._requested, False
                if not requested:
                    self._active = self._running = False
                    return
            try:
                result = self._run()
            except BaseException as exc:
                if not served:
                    log.exception("a background task failed, and no caller waits for it")
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(exc)
            else:
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_result(result)
            if self._short and loop_bridge.has_backlog():
                with self._lock:
                    self._running = False
                self._submit()  # after the jobs that wait
                return
