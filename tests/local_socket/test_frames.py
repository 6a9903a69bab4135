"""Valid and invalid frames on a socket."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from persisting.cluster.wire import Reply, Request
from persisting.errors import StorageError
from persisting.local_socket import frames
from persisting.local_socket.frames import (
    AnswerFrame,
    BadFrame,
    CallFrame,
    FrameBuffer,
    FrameDecoder,
)


def received(buffer: FrameBuffer, data: bytes, step: int) -> list[bytes]:
    """Let a buffer receive data in portions of at most ``step`` bytes."""
    found = []
    while data:
        space = buffer.space()
        count = min(step, len(space), len(data))
        space[:count], data = data[:count], data[count:]
        space.release()
        found += [bytes(frame) for frame in buffer.received(count)]
    return found


def greeted() -> FrameBuffer:
    buffer = FrameBuffer()
    assert received(buffer, frames.greeting(), 100) == [frames.GREETING]
    return buffer


@given(st.lists(st.binary(max_size=400), max_size=30), st.integers(1, 300))
def test_frames_are_found_however_their_bytes_arrive(bodies: list[bytes], step: int) -> None:
    bodies = [frames.GREETING, *bodies]
    data = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    assert received(FrameBuffer(), data, step) == bodies


@pytest.mark.parametrize("size", [256 * 1024 - 4, 256 * 1024 - 3, 300_000, 9_000_001])
def test_large_frames_are_received_between_small_ones(size: int) -> None:
    bodies = [b"a", bytes(size), b"b", bytes(size), b""]
    data = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    assert received(FrameBuffer(), data, 200_000) == bodies


def test_frame_that_announces_too_much_is_refused_before_it_arrives() -> None:
    with pytest.raises(BadFrame, match="limit"):
        received(greeted(), struct.pack("<I", frames.FRAME_LIMIT + 1), 4)


def test_announced_bytes_take_no_memory_before_they_arrive() -> None:
    buffer = greeted()
    received(buffer, struct.pack("<I", frames.FRAME_LIMIT) + b"x", 5)
    assert len(buffer.space()) < 10_000_000


@given(st.data())
def test_damaged_answer_is_read_or_refused(data: st.DataObject) -> None:
    """What an owner sends, or another program in its place, never breaks a caller otherwise."""
    replies = [Reply("stored"), Reply(rows=[b"rows"]), None]
    answer = AnswerFrame(3, data.draw(st.sampled_from(replies)), True)
    body = bytearray(frames.encoded(answer)[4:])
    for _ in range(data.draw(st.integers(0, 6))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    decoder = FrameDecoder(AnswerFrame)
    assert decoder.decode(frames.GREETING) is None
    with suppress(BadFrame):
        assert isinstance(decoder.decode(bytes(body)), AnswerFrame)


def test_calls_and_answers_survive_the_wire() -> None:
    call = CallFrame(3, 1, Request("put", {"mark": ["w", 1]}, [b"rows"]), 4)
    answer = AnswerFrame(3, Reply("stored"), True)
    for frame, decoder in ((call, FrameDecoder(CallFrame)), (answer, FrameDecoder(AnswerFrame))):
        assert decoder.decode(frames.GREETING) is None  # type: ignore[attr-defined]
        data = bytes(frames.encoded(frame))[4:]  # type: ignore[arg-type]
        assert decoder.decode(data) == frame  # type: ignore[attr-defined]


def test_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_LIMIT", 100)
    with pytest.raises(StorageError, match="smaller"):
        frames.encoded(AnswerFrame(1, Reply("x" * 200)))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    assume(data != frames.GREETING)
    decoder = FrameDecoder(CallFrame)
    with pytest.raises(BadFrame, match="protocol"):
        decoder.decode(data)
    decoder.decode(frames.GREETING)
    with suppress(BadFrame):
        assert isinstance(decoder.decode(data), CallFrame)
