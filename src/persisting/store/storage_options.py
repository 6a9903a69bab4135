"""Credentials and settings for an object store. Values are never shown: not in ``repr``, in errors,
in logs, nor in the files of a topic."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from persisting.errors import InvalidArgument

_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "timeout",
        "user_agent",
    }
)
"""Settings of the HTTP client; all others belong to the store."""

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_ENDPOINT = re.compile(r"(?:(?:aws|azure|azure_storage|google)_)?(?:endpoint(?:_url)?|base_url)")
_EMULATORS = ("azure_storage_use_emulator", "use_emulator")
"""Azure's client reaches its emulator over http:// without asking."""
_ALLOWING = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
"""By scheme, the variable that allows http:// addresses."""
_NAMING = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"),
}
"""By scheme, the variables that may name such an address."""
_PREFIXES = {"aws_": "s3", "google_": "gs", "azure_": "az"}
_SHORTEST_SECRET = 4
"""Shorter values, such as 'true', say nothing and occur in any text."""

_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_ELEMENT = re.compile(
    r"<(AWSAccessKeyId|Token-\d+|StringToSign(?:Bytes)?|CanonicalRequest(?:Bytes)?|"
    r"SignatureProvided)>.*?(?:</\1>|$)",
    re.DOTALL,
)
"""What S3 repeats of the credentials when it refuses them."""
_SECRET_PARTS = frozenset({"KEY", "SECRET", "TOKEN", "SAS"})
_PLACES = frozenset({"FILE", "PATH", "URI", "URL", "ENDPOINT"})
HIDDEN = "***"

_living: WeakValueDictionary[int, StorageOptions] = WeakValueDictionary()
"""All options of this process."""


class StorageOptions:
    """What a caller passes as ``storage_options``: names and texts."""

    _values: dict[str, str]

    def __new__(cls, *_: Any, **__: Any) -> StorageOptions:
        options = super().__new__(cls)  # even when it is unpickled
        options._values = {}
        _living[id(options)] = options
        return options

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise InvalidArgument(
                f"storage_options must be a dict of names and values, got {type(given).__name__}"
            )
        for name, value in (given or {}).items():
            if not isinstance(name, str) or not name:
                raise InvalidArgument("storage_options must have names as keys")
            self._values[name.lower()] = _text(name, value)
        _is_true("allow_http", self._values.get("allow_http", "false"))  # raises for other texts
        for name, value in self._values.items():
            if _is_plain(name, value) and not any(map(self._allows_http, _schemes_of(name))):
                raise _plain_http(name, _schemes_of(name)[0])

    def for_scheme(self, scheme: str) -> StorageOptions:
        """Return the options for stores of a scheme, with what the environment says about them.

        Raises if that means an http:// address that was not allowed. Variables of other schemes
        do not count.
        """
        settings = {n: v for n, v in self._values.items() if scheme in _schemes_of(n)}
        if not any(_ENDPOINT.fullmatch(name) for name in settings):
            names = _NAMING[scheme]
            settings |= {n.lower(): os.environ[n] for n in names if n in os.environ}
        is_allowed = self._allows_http(scheme)
        for name, value in settings.items():
            if _is_plain(name, value) and not is_allowed:
                raise _plain_http(name, scheme)
        if not is_allowed or "allow_http" in self._values:
            return self
        # The clients read the environment too, but not all of them this setting.
        return StorageOptions({**self._values, "allow_http": "true"})

    def _allows_http(self, scheme: str) -> bool:
        if "allow_http" in self._values:
            return _is_true("allow_http", self._values["allow_http"])
        variable = _ALLOWING[scheme]
        return _is_true(variable, os.environ.get(variable, "false"))

    @property
    def names(self) -> list[str]:
        """The names that were given, without their values."""
        return sorted(self._values)

    @property
    def client_options(self) -> dict[str, Any]:
        """The settings of the HTTP client."""
        chosen: dict[str, Any] = {k: v for k, v in self._values.items() if k in _CLIENT_OPTIONS}
        for name in ("allow_http", "allow_invalid_certificates"):
            if name in chosen:
                chosen[name] = _is_true(name, chosen[name])
        return chosen

    @property
    def config(self) -> dict[str, str]:
        """The settings of the store, credentials among them."""
        return {k: v for k, v in self._values.items() if k not in _CLIENT_OPTIONS}

    @property
    def for_lance(self) -> dict[str, str]:
        """All settings, as Lance takes them."""
        return dict(self._values)

    def scrub(self, text: str) -> str:
        """Return a text without any of the values, without credentials of the environment, and
        without the queries of URLs, which may be signatures."""
        return _scrub(text, self._values.values())

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(f'{name}={HIDDEN}' for name in self.names)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageOptions) and self._values == other._values

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))


def scrub_known(text: str) -> str:
    """Like :meth:`StorageOptions.scrub`, but with the credentials in all options of this process:
    for a text whose store is unknown."""
    living = [options for found in _living.valuerefs() if (options := found()) is not None]
    values = [v for one in living for name, v in one._values.items() if _is_secret(name)]
    return _scrub(text, values)


def _scrub(text: str, values: Iterable[str]) -> str:
    secrets = {v for v in values if not v.startswith(("http://", "https://"))}
    secrets.update(v for name, v in os.environ.items() if _is_secret_variable(name))
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, HIDDEN)
    return _QUERY.sub(r"\1", _ELEMENT.sub(rf"<\1>{HIDDEN}</\1>", text))


def _is_secret_variable(name: str) -> bool:
    """Whether a variable of the environment holds credentials for a store."""
    return name.lower().startswith(tuple(_PREFIXES)) and _is_secret(name)


def _is_secret(name: str) -> bool:
    parts = name.upper().split("_")
    return parts[-1] not in _PLACES and not _SECRET_PARTS.isdisjoint(parts)


def _is_plain(name: str, value: str) -> bool:
    """Whether a setting makes the client use an http:// address."""
    if name in _EMULATORS:
        return _is_true(name, value)
    return bool(_ENDPOINT.fullmatch(name)) and value.lower().startswith("http://")


def _schemes_of(name: str) -> list[str]:
    """Return the schemes that a setting concerns."""
    if name in _EMULATORS:
        return ["az"]
    return [scheme for prefix, scheme in _PREFIXES.items() if name.startswith(prefix)] or list(
        _ALLOWING
    )


def _plain_http(name: str, scheme: str) -> InvalidArgument:
    return InvalidArgument(
        f"storage_options: {name} means an http:// address, so records and signatures would travel "
        "unencrypted; use https://, or pass allow_http='true' as well "
        f"({_ALLOWING[scheme]}=true in the environment)"
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"storage_options: {name} must be a text, got {type(value).__name__}")
    return value


def _is_true(name: str, value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise InvalidArgument(f"storage_options: {name} must be 'true' or 'false'")
