"""Names of topics and groups: they become folder names, so none may escape its parent folder."""

from __future__ import annotations

from typing import Any

from persisting.errors import InvalidArgument

_MAX_BYTES = 200


def check_name(kind: str, name: Any) -> str:
    """Return ``name`` if it can name a ``kind`` (a topic, a group), else raise."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a {kind}'s name must be a non-empty string, got {name!r}")
    if name.startswith("."):
        raise InvalidArgument(f"{kind} name {name!r} begins with a dot, which is reserved")
    bad = next((c for c in name if c in "/\\\0" or not c.isprintable()), None)
    if bad is not None:
        raise InvalidArgument(f"{kind} name {name!r} contains {bad!r}, which is not allowed")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{kind} name {name!r} is not valid unicode") from None
    if size > _MAX_BYTES:
        raise InvalidArgument(f"{kind} name {name[:40]!r}… is longer than {_MAX_BYTES} bytes")
    return name
