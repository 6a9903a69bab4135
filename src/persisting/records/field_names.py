"""The names that a field may have, and the names that Persisting reserves."""

from __future__ import annotations

from persisting.errors import SchemaError

RESERVED_PREFIX = "_persisting_"
ARRIVAL = "_persisting_time"
"""The hidden column with the time at which each row was accepted."""

_REFUSED_BY_LANCE = frozenset(
    {
        "_rowid",
        "_rowaddr",
        "_rowoffset",
        "_row_created_at_version",
        "_row_last_updated_at_version",
    }
)
_MAX_NAME_BYTES = 1024


def check_name(name: object, path: str = "") -> None:
    """Raise unless ``name`` can be the name of a field; ``path`` is the field that contains it."""
    where = f" in {path!r}" if path else ""
    if not isinstance(name, str):
        raise SchemaError(
            f"field names must be strings, got {name!r} ({type(name).__name__}){where}"
        )
    if not name:
        raise SchemaError(f"an empty field name{where} cannot be stored; give it a name")
    bad = next((c for c in name if c in ".`\0"), None)
    if bad is not None:
        raise SchemaError(
            f"field name {name!r}{where} contains {bad!r}, which the table cannot hold; rename it"
        )
    if name == "*":
        raise SchemaError(f"a field{where} cannot be named '*', which means all fields; rename it")
    if name in _REFUSED_BY_LANCE or name.startswith(RESERVED_PREFIX):
        raise SchemaError(f"field name {name!r}{where} is reserved; rename it")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise SchemaError(f"field name {name!r}{where} is not valid unicode; rename it") from None
    if size > _MAX_NAME_BYTES:
        raise SchemaError(
            f"field name {name[:40]!r}…{where} is longer than {_MAX_NAME_BYTES} bytes; shorten it"
        )
