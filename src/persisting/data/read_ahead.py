"""Reads the next rows in a thread while the present ones are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from persisting.errors import StorageError

_A = TypeVar("_A")
_R = TypeVar("_R")


def read_ahead(read: Callable[[_A], _R], arguments: Iterable[_A]) -> Generator[_R, None, None]:
    """Yield the results of ``read``, of which one is always computed in advance."""
    owner = os.getpid()
    executor = ThreadPoolExecutor(1, thread_name_prefix="persisting-read")
    ahead: Future[_R] | None = None
    try:
        for argument in arguments:
            following = executor.submit(read, argument)
            if ahead is not None:
                yield _result(ahead, owner)
            _check_owner(owner)
            ahead = following
        if ahead is not None:
            yield _result(ahead, owner)
    finally:
        # The thread of a parent does not exist after a fork.
        executor.shutdown(wait=owner == os.getpid(), cancel_futures=True)


def _result(ahead: Future[_R], owner: int) -> _R:
    _check_owner(owner)
    return ahead.result()


def _check_owner(owner: int) -> None:
    if owner != os.getpid():
        raise StorageError(
            "this iterator belongs to the process that this one was forked from; iterate over the "
            "stream here with a new iterator"
        )
