"""Long payloads in Pulsing's messages, as text.

Pulsing copies ``bytes`` into a message one element at a time, more than 10 ms for a megabyte, and
holds the event loop meanwhile. It copies a JSON text in one step, so long payloads are sent as
base64 in a JSON string. Nodes of older versions take bytes only. A request says in its type that
its sender reads text, a reply in a field of its own: Pulsing does not transport the type of a
reply.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import Any

import pulsing as pul

from persisting.errors import StorageError

_READS_TEXT = "+text"
_LONG = 1024
"""Below this many bytes both forms take about the same time."""

_QUOTE = b'"'
"""How a JSON string begins; no request and no reply begins with this byte in msgpack."""


def message(kind: str, payload: bytes, *, as_text: bool) -> Any:
    """Return a message; ``as_text`` if the receiver is known to read text."""
    kind += _READS_TEXT
    if as_text and len(payload) >= _LONG:
        return pul.Message.from_json(kind, b2a_base64(payload, newline=False).decode("ascii"))
    return pul.Message(kind, payload)


def reads_text(received: Any) -> bool:
    """Whether the sender of a request reads text."""
    return str(received.msg_type).endswith(_READS_TEXT)


def payload_of(received: Any) -> bytes:
    """Return the bytes that :func:`message` was given."""
    payload: bytes = received.payload
    if payload[:1] != _QUOTE:
        return payload
    try:
        return a2b_base64(memoryview(payload)[1:-1])
    except ValueError as exc:
        raise StorageError(f"a message of Pulsing cannot be decoded: {exc}") from exc
