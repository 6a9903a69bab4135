"""Parameters of requests: every one is bounded, and a wrong one says what is expected."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request

from persisting.actions.text_values import parse_time
from persisting.errors import InvalidArgument

_MAX_FORM_BYTES = 64 * 1024
_MAX_TEXT = 4_000
_MAX_NAMES_TEXT = 20_000
_MAX_DIGITS = 18
_MAX_NUMBER = 10**_MAX_DIGITS - 1


class Parameters:
    """The parameters of an address or of a form; empty ones count as missing."""

    def __init__(
        self, values: Mapping[str, str], pairs: Iterable[tuple[str, str]] | None = None
    ) -> None:
        self._values = {name: value for name, value in values.items() if value != ""}
        self._pairs = list(values.items() if pairs is None else pairs)

    @classmethod
    def of(cls, request: Request) -> Parameters:
        return cls(dict(request.query_params), request.query_params.multi_items())

    @classmethod
    async def of_form(cls, request: Request) -> Parameters:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FORM_BYTES:
                raise InvalidArgument(f"the form is larger than {_MAX_FORM_BYTES:,} bytes")
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100)
        except ValueError as exc:
            raise InvalidArgument(f"the form cannot be decoded: {exc}") from exc
        return cls(dict(pairs))

    def text(self, name: str, most: int = _MAX_TEXT) -> str | None:
        value = self._values.get(name)
        if value is not None and len(value) > most:
            raise InvalidArgument(f"{name} is longer than {most:,} characters")
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidArgument(f"{name} is missing")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices; the first is the default."""
        value = self._values.get(name, choices[0])
        if value not in choices:
            raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, got {value!r:.80}")
        return value

    def number(self, name: str, default: int, *, least: int = 0, most: int = _MAX_NUMBER) -> int:
        value = self.optional_number(name, least=least, most=most)
        return default if value is None else value

    def optional_number(self, name: str, *, least: int = 0, most: int = _MAX_NUMBER) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        number = _whole_number(value)
        if number is None or not least <= number <= most:
            raise InvalidArgument(
                f"{name} must be a number from {least} to {most}, got {value!r:.80}"
            )
        return number

    def time(self, name: str) -> dt.datetime | None:
        value = self._values.get(name)
        if value is None:
            return None
        try:
            return parse_time(value)
        except ValueError as exc:
            raise InvalidArgument(f"{name}: {exc}") from exc

    def position(self, name: str) -> tuple[int, int] | None:
        """Return ``bucket:offset``."""
        value = self._values.get(name)
        if value is None:
            return None
        bucket, _, offset = value.partition(":")
        numbers = _whole_number(bucket), _whole_number(offset)
        if numbers[0] is None or numbers[1] is None:
            raise InvalidArgument(f"{name} must be bucket:offset, as in 0:12, got {value!r:.80}")
        return numbers[0], numbers[1]

    def positions(self, name: str) -> dict[int, int] | None:
        """Return offsets by bucket, written as ``0:12,1:40``."""
        value = self.text(name, 50_000)
        if value is None:
            return None
        positions = {}
        for part in value.split(","):
            pair = Parameters({name: part}).position(name)
            if pair is not None:
                positions[pair[0]] = pair[1]
        return positions

    def names(self, name: str, known: Iterable[str]) -> list[str] | None:
        """Return names from parameters of the same name, each once.

        A value is one of the ``known`` names, or names that are separated by commas.
        """
        values = [value for key, value in self._pairs if key == name and value]
        if sum(map(len, values)) > _MAX_NAMES_TEXT:
            raise InvalidArgument(f"{name} is longer than {_MAX_NAMES_TEXT:,} characters")
        known = set(known)
        found: dict[str, None] = {}
        for value in values:
            parts = [value] if value in known else value.split(",")
            found |= dict.fromkeys(part for part in parts if part)
        return list(found) or None


def _whole_number(text: str) -> int | None:
    """Return a number that fits 64 bits, None if the text is not one."""
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return None
    return int(text)


def path_number(request: Request, name: str) -> int:
    """Return a number that is part of the path of an address."""
    number = Parameters({name: request.path_params[name]}).optional_number(name)
    if number is None:
        raise InvalidArgument(f"the address lacks the number of the {name}")
    return number


def written_positions(positions: Mapping[int, int]) -> str:
    """Return offsets by bucket in the form that :meth:`Parameters.positions` reads."""
    return ",".join(f"{bucket}:{offset}" for bucket, offset in sorted(positions.items()))


def address(path: str, /, **parameters: object) -> str:
    """Return a path with those parameters that are not None; a list repeats its parameter."""
    given = {name: value for name, value in parameters.items() if value is not None}
    query = urlencode(given, doseq=True)
    return f"{path}?{query}" if query else path
