"""Background tasks that never overlap themselves and whose runs are shared by their callers."""

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
    """A call of ``method`` that does not keep its owner alive, and does nothing once it is gone."""
    ref = weakref.ref(owner)

    def call() -> Any:
        alive = ref()
        return method(alive) if alive is not None else None

    return call


class CoalescedTask:
    """A job of which one run goes on at a time, and whose runs are shared.

    :meth:`request` returns a future of a run that **begins after the call**, so that a caller
    knows its own state was seen; callers that arrive while a run is under way share the next.
    """

    def __init__(self, run: Callable[[], Any], *, short: bool = False) -> None:
        """A ``short`` job waits for none that is in the pool."""
        self._run, self._short = run, short
        self._guard = threading.Lock()
        self._waiting: list[Future[Any]] = []
        self._wanted = False
        self._active = self._running = False

    def request(self) -> Future[Any]:
        future: Future[Any] = Future()
        with suppress(loop_bridge.NoThread):  # the future tells
            self._want([future])
        return future

    def want(self) -> None:
        """As :meth:`request`, for those who wait for nothing: ``run`` tells of its own failures."""
        self._want([])

    def _want(self, waiting: list[Future[Any]]) -> None:
        try:
            with self._guard:
                self._waiting += waiting
                self._wanted = True
                start = not self._active
                self._active = True
            if start:
                self._submit()
        except loop_bridge.NoThread as exc:
            with self._guard:
                refused, self._waiting = self._waiting, []
                self._wanted = self._active = False
            for one in refused:
                if one.set_running_or_notify_cancel():
                    one.set_exception(exc)
            raise
        except BaseException:
            # A signal's exception, perhaps before it was submitted; twice does no harm.
            self._submit()
            raise

    def _submit(self) -> None:
        if self._short:
            loop_bridge.submit(self._work)
            return
        try:
            pool().submit(self._work)
        except RuntimeError as exc:  # also where the interpreter is going down
            raise loop_bridge.NoThread(str(exc)) from exc

    @property
    def pending(self) -> bool:
        """Whether a run is waiting to begin."""
        return self._wanted

    @property
    def active(self) -> bool:
        """Whether a run is under way or waiting to begin."""
        return self._active

    def _work(self) -> None:
        with self._guard:
            if self._running:
                return
            self._running = True
        while True:
            with self._guard:
                served, self._waiting = self._waiting, []
                wanted, self._wanted = self._wanted, False
                if not wanted:
                    self._active = self._running = False
                    return
            try:
                result = self._run()
            except BaseException as exc:
                if not served:
                    log.exception("what nobody waits for failed")
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(exc)
            else:
                for future in served:
                    if future.set_running_or_notify_cancel():
                        future.set_result(result)
            if self._short and loop_bridge.crowded():
                with self._guard:
                    self._running = False
                self._submit()  # behind those who wait
                return
