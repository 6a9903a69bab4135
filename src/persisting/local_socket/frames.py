"""Messages on a socket: a length of four bytes, then msgpack.

Both sides first send :data:`GREETING` as a frame of its own. A frame that is too large or cannot be
decoded ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from persisting.cluster.wire import Reply, Request
from persisting.errors import StorageError

GREETING = b"persisting socket 1"
FRAME_LIMIT = 1 << 30
"""The largest frame. Messages hold about 4 MiB, unless a single row is larger."""

TOPIC = -1
"""The bucket number of requests to the topic itself."""

_GREETING_LIMIT = 64
"""The first frame is this long at most: other protocols do not pass for a long frame."""

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 256 * 1024
_GROWTH_BYTES = 4 * 1024 * 1024


class CallFrame(msgspec.Struct, array_like=True):
    """To the owner: a call, or, without a request, a consumer's word about a stream."""

    id: int
    bucket: int = TOPIC
    request: Request | None = None
    credit: int = 0
    """How many more replies of a stream the consumer takes; 0 without a request: no more."""


class AnswerFrame(msgspec.Struct, array_like=True):
    """To the caller: a reply; without one, the end of a stream, or of call 0: a keepalive."""

    id: int
    reply: Reply | None = None
    streamed: bool = False


Frame = TypeVar("Frame", CallFrame, AnswerFrame)

_encoder = msgspec.msgpack.Encoder()


class BadFrame(StorageError):
    """The bytes on a connection are not the frames of a peer of this version."""


def encoded(frame: CallFrame | AnswerFrame) -> bytearray:
    """Return a frame as bytes; raise for a frame that no peer would take."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(frame, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > FRAME_LIMIT:
        raise StorageError(
            f"a message of {size} bytes is larger than a local socket takes ({FRAME_LIMIT}); "
            "put smaller records"
        )
    _LENGTH.pack_into(buffer, 0, size)
    return buffer


def greeting() -> bytes:
    return _LENGTH.pack(len(GREETING)) + GREETING


class FrameDecoder(Generic[Frame]):
    """Decodes the frames of one connection, the first of which must be the greeting."""

    def __init__(self, kind: type[Frame]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(kind)
        self._greeted = False

    def decode(self, data: bytes | bytearray | memoryview) -> Frame | None:
        """Return a frame, None for the greeting; raise :class:`BadFrame`."""
        if not self._greeted:
            if data != GREETING:
                raise BadFrame("the peer speaks another protocol, or another version of it")
            self._greeted = True
            return None
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise BadFrame(f"a message cannot be decoded: {exc}") from exc


class FrameBuffer:
    """Collects received bytes and yields whole frames; large ones are received in place."""

    def __init__(self) -> None:
        self._small = memoryview(bytearray(_BUFFER_BYTES))
        self._used = 0
        self._large: bytearray | None = None
        self._filled = self._size = 0
        self._limit = _GREETING_LIMIT

    def space(self) -> memoryview:
        """Return where the next bytes go."""
        if self._large is None:
            return self._small[self._used :]
        if self._filled == len(self._large):
            # The peer may have announced more than it sends: grow with what has arrived.
            growth = min(self._size - self._filled, max(self._filled, _GROWTH_BYTES))
            self._large = self._large + bytes(growth)
        return memoryview(self._large)[self._filled :]

    def received(self, count: int) -> Iterator[bytearray | memoryview]:
        """Yield the frames that ``count`` more bytes have completed; each is valid until the
        next."""
        if self._large is not None:
            self._filled += count
            if self._filled == self._size:
                frame, self._large = self._large, None
                yield frame
            return
        self._used += count
        start = 0
        while self._used - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._small, start)
            if size > self._limit:
                raise BadFrame(f"a message announces {size} bytes; the limit is {self._limit}")
            body = start + _LENGTH.size
            if body + size <= self._used:
                self._limit = FRAME_LIMIT
                yield self._small[body : body + size]
                start = body + size
                continue
            if size > _BUFFER_BYTES - _LENGTH.size:
                arrived = bytearray(self._small[body : self._used])
                self._large = arrived + bytes(min(size - len(arrived), _GROWTH_BYTES))
                self._filled, self._size, start = len(arrived), size, self._used
            break
        left = self._used - start
        if start and left:
            self._small[:left] = bytes(self._small[start : self._used])
        self._used = left
