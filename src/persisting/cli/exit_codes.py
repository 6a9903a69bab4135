"""Exit codes that scripts may rely on."""

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
"""Any failure without a code of its own."""
USAGE = 2
"""The command line, an option or a record is wrong."""
NO_TOPIC = 3
OWNED = 4
"""The command must open the topic for writing, but another process has it open."""
DAMAGED = 5
"""Stored files differ from what was written."""
INTERRUPTED = 130
"""Ctrl-C, or a question answered with no."""
BROKEN_PIPE = 141
"""The reader of the output closed it, as ``head`` does."""

_BY_ERROR: list[tuple[type[Exception], int]] = [
    (NoSuchTopic, NO_TOPIC),
    (BucketLocked, OWNED),
    (InvalidArgument, USAGE),
    (SchemaError, USAGE),
    (WALError, DAMAGED),
    (TableError, DAMAGED),
]


def code_of(exc: Exception) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in _BY_ERROR if isinstance(exc, kind)), FAILED)


class CommandExit(Exception):
    """Ends a command that has already printed its result with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
