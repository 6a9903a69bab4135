"""Translates errors of Lance and Arrow into ours, and makes the calls of Lance that need care.

Lance is imported on first use, possibly by two threads at the same time. Always import the package
``lance`` first: a thread that starts with ``from lance.fragment import …`` may get a partially
initialized module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from persisting.errors import StorageError, TableError
from persisting.store.storage_options import scrub_known

_T = TypeVar("_T")
_MOST_READS = 20
_SOURCE_LOCATION = re.compile(r", (?:/home/runner|rust/|src/)")


@contextmanager
def lance_errors_as(translate: Callable[[BaseException], StorageError]) -> Iterator[None]:
    """Raise any error of Lance or Arrow as ``translate(error)``; our own errors pass through.

    A panic in Lance's Rust code counts as an error, see :func:`is_panic`. Other BaseExceptions,
    such as KeyboardInterrupt, pass through. An error may repeat what an object store says, with
    credentials: then these are hidden, and the error is not the cause, which a traceback shows.
    """
    try:
        yield
    except StorageError:
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        text = scrub_known(str(exc))
        if text == str(exc):
            raise translate(exc) from exc
        raise translate(_with_text(exc, text)) from None


def _with_text(exc: BaseException, text: str) -> BaseException:
    try:
        return type(exc)(text)
    except TypeError:  # a panic
        return RuntimeError(text)


@contextmanager
def translated(action: str, where: object) -> Iterator[None]:
    """Raise any error of Lance or Arrow as a :class:`TableError` that names the table."""
    with lance_errors_as(
        lambda exc: TableError(f"cannot {action} the table {where}: {reason(exc)}")
    ):
        yield


@contextmanager
def scrubbed(action: str, where: object, scrub: Callable[[str], str]) -> Iterator[None]:
    """Like :func:`translated`, but for a table in an object store.

    The cause is dropped, and the text scrubbed: Lance's errors may contain credentials.
    """
    try:
        with translated(action, where):
            yield
    except TableError as exc:
        if exc.__cause__ is None:
            raise
        raise TableError(scrub(str(exc))) from None


def is_panic(exc: BaseException) -> bool:
    """Whether ``exc`` is a panic of Rust code; PyO3 derives that class from BaseException and
    exports it nowhere."""
    return type(exc).__name__ == "PanicException"


def reason(exc: BaseException) -> str:
    """The first line of an error of Lance or Arrow, without the location in their source."""
    text = _SOURCE_LOCATION.split(str(exc).partition("\n")[0])[0]
    return text.removeprefix("Invalid user input: ") or type(exc).__name__


def own_handle(dataset: Any) -> Any:
    """Return a second handle of the same version.

    Some calls of Lance borrow a handle exclusively, and every other thread that uses it at that
    time fails. Such calls must not be made on a handle that readers share.
    """
    return dataset.checkout_version(dataset.version)


def retry_if_removed(read: Callable[[], _T]) -> _T:
    """Return ``read()``; retry while it fails because a file was removed.

    Lance lists files and then opens each of them, so a concurrent cleanup can make it fail.
    """
    for _ in range(_MOST_READS - 1):
        try:
            return read()
        except (OSError, ValueError, RuntimeError) as exc:
            if "ot found" not in str(exc):
                raise
    return read()


def indices_of(dataset: Any) -> list[Any]:
    """The indexes of a version, as Lance describes them."""
    with translated("read the indexes of", dataset.uri):
        indices: list[Any] = dataset.describe_indices()
        return indices
