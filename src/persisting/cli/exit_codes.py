"""Exit codes, which scripts may rely on."""

from __future__ import annotations

from persisting.errors import (
    BucketLocked,
    InvalidArgument,
    NoSuchTopic,
    SchemaError,
    TableError,
    WALError,
)

OK = 0
FAILED = 1
"""Anything that has no code of its own."""
USAGE = 2
"""The command line, an option or a record is wrong."""
NO_TOPIC = 3
OWNED = 4
"""Another process has the topic open for writing, and this needs to."""
DAMAGED = 5
"""Stored files are not what was written."""
INTERRUPTED = 130
"""Ctrl-C; what is done stays done."""
BROKEN_PIPE = 141
"""Who read the output has gone, as ``head`` does."""

_BY_ERROR: list[tuple[type[Exception], int]] = [
    (NoSuchTopic, NO_TOPIC),
    (BucketLocked, OWNED),
    (InvalidArgument, USAGE),
    (SchemaError, USAGE),
    (WALError, DAMAGED),
    (TableError, DAMAGED),
]


def code_of(exc: Exception) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _BY_ERROR if isinstance(exc, kind)), FAILED)


class Ended(Exception):
    """The command has said all it has to say; it ends with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
