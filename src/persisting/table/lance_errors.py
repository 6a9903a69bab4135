"""The one place where errors of Lance and Arrow become ours, and how its calls are to be made.

Lance is imported when it is first used, which may be in two threads at once: always the package
first. A thread that begins with ``from lance.fragment import …`` may be handed a half-made module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from persisting.errors import StorageError, TableError

_T = TypeVar("_T")
_LOOKS = 20
_IN_SOURCE = re.compile(r", (?:/home/runner|rust/|src/)")


def own_handle(dataset: Any) -> Any:
    """Another handle of the same version. Some calls of Lance borrow a handle so that every other
    thread that uses it just then fails; those must not be made on one that readers share."""
    return dataset.checkout_version(dataset.version)


def unless_it_went(read: Callable[[], _T]) -> _T:
    """What ``read`` finds. Lance lists files and then opens each; where one is removed in between
    it fails, and is to look again."""
    for _ in range(_LOOKS - 1):
        try:
            return read()
        except (OSError, ValueError, RuntimeError) as exc:
            if "ot found" not in str(exc):
                raise
    return read()


def reason(exc: BaseException) -> str:
    """What an error of Lance or Arrow says, without the place in its source."""
    text = _IN_SOURCE.split(str(exc).partition("\n")[0])[0]
    return text.removeprefix("Invalid user input: ") or type(exc).__name__


def indices_of(dataset: Any) -> list[Any]:
    """The indexes of a version, as Lance describes them."""
    with translated("read the indexes of", dataset.uri):
        found: list[Any] = dataset.describe_indices()
        return found


@contextmanager
def translated(action: str, where: object) -> Iterator[None]:
    """Raise whatever goes wrong inside as a :class:`TableError` that names the table.

    A panic of Lance's Rust code comes as a BaseException of that name.
    """
    try:
        yield
    except StorageError:
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise TableError(f"cannot {action} the table {where}: {reason(exc)}") from exc
