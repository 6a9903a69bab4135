"""The address of something in an object store: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from persisting.errors import InvalidArgument

SCHEMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class StoreAddress:
    """A prefix in a bucket (Azure: a container) of an object store."""

    scheme: str
    bucket: str
    prefix: str = ""
    """Without slashes at its ends."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def __truediv__(self, name: str) -> StoreAddress:
        """Return the address of ``name`` below this one."""
        prefix = f"{self.prefix}/{name}" if self.prefix else name
        return StoreAddress(self.scheme, self.bucket, prefix)

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> StoreAddress:
        return StoreAddress(self.scheme, self.bucket, self.prefix.rpartition("/")[0])


def is_store_address(path: Any) -> bool:
    """Whether ``path`` is the URL of an object store that this version knows."""
    if not isinstance(path, str):
        return False
    match = _URL.match(path)
    return match is not None and match[1].lower() in SCHEMES


def parse(text: str) -> StoreAddress:
    """Return the address that a URL names, or raise :class:`InvalidArgument`.

    A message about a URL with an ``@`` does not repeat it: it may contain a password.
    """
    match = _URL.match(text)
    if match is None or match[1].lower() not in SCHEMES:
        raise InvalidArgument(
            f"storage_path {_shown(text)} is not an address of an object store; write "
            "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    scheme, rest = match[1].lower(), match[2]
    if "@" in rest.partition("/")[0]:
        raise InvalidArgument(
            f"the {scheme}:// address has user information before '@'; pass credentials in "
            "storage_options or in the environment, never in the address"
        )
    if "?" in rest or "#" in rest:
        raise InvalidArgument(
            f"the {scheme}:// address has a query or a fragment; pass settings in storage_options, "
            "and write the address without them"
        )
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(
            f"storage_path {_shown(text)} does not name a bucket after {scheme}://"
        )
    return StoreAddress(scheme, bucket, _checked_prefix(prefix, text))


def _checked_prefix(prefix: str, text: str) -> str:
    prefix = prefix.strip("/")
    if not prefix:
        return ""
    parts = prefix.split("/")
    if any(part in ("", ".", "..") for part in parts) or _CONTROL.search(prefix):
        raise InvalidArgument(
            f"the prefix of storage_path {_shown(text)} has an empty part, '.', '..' or a control "
            "character; name a plain prefix"
        )
    return prefix


def _shown(text: str) -> str:
    return "(not shown, it may contain a password)" if "@" in text or "?" in text else repr(text)
