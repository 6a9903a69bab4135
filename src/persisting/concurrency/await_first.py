"""Coroutines that explain what to do if their result is used before they were awaited."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def await_first(
    noun: str,
) -> Callable[[Callable[_P, Coroutine[Any, Any, _T]]], Callable[_P, Coroutine[Any, Any, _T]]]:
    """Return a decorator for coroutine functions whose result is a ``noun``, as in "reader"."""

    def decorate(
        function: Callable[_P, Coroutine[Any, Any, _T]],
    ) -> Callable[_P, Coroutine[Any, Any, _T]]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> Coroutine[Any, Any, _T]:
            return _Unawaited(function(*args, **kwargs), function.__name__, noun)

        return call

    return decorate


class _Unawaited(Coroutine[Any, Any, _T]):
    """A coroutine; whatever accepts coroutines accepts it."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T], function: str, noun: str) -> None:
        self._coroutine, self._function, self._noun = coroutine, function, noun

    def __await__(self) -> Generator[Any, Any, _T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("cr_", "__", "_asyncio")):  # what debuggers and event loops look for
            return getattr(self._coroutine, name)
        raise AttributeError(
            f"{self._function}(…) must be awaited before .{name} can be used: "
            f"{self._noun} = await {self._function}(…)"
        )

    def __enter__(self) -> NoReturn:
        self._refuse_block()

    def __exit__(self, *raised: object) -> None:
        """Never called, since __enter__ raises; Python looks for both."""

    async def __aenter__(self) -> NoReturn:
        self._refuse_block()

    async def __aexit__(self, *raised: object) -> None:
        """Never called, as __exit__."""

    def _refuse_block(self) -> NoReturn:
        self.close()
        raise TypeError(
            f"{self._function}(…) must be awaited first: "
            f"async with await {self._function}(…) as {self._noun}:"
        )
