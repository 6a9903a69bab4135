"""Payloads of Pulsing's messages: as bytes for nodes of older versions, as text where possible."""

from __future__ import annotations

import os

import msgspec
import pulsing as pul
import pytest

from persisting.cluster import wire
from persisting.cluster.actor import EndpointActor
from persisting.cluster.pulsing_messages import message, payload_of, reads_text
from persisting.cluster.wire import Reply, Request
from persisting.errors import StorageError

ROWS = os.urandom(5000)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("as_text", [False, True])
def test_payload_of_a_message_is_what_it_was_made_of(size: int, as_text: bool) -> None:
    payload = b"\x94" + os.urandom(size)
    assert payload_of(message("put", payload, as_text=as_text)) == payload


def test_long_payload_is_sent_as_text_only_if_the_receiver_reads_text() -> None:
    assert message("put", ROWS, as_text=True).payload[:1] == b'"'
    assert message("put", ROWS, as_text=False).payload == ROWS


def test_damaged_text_raises_a_storage_error() -> None:
    with pytest.raises(StorageError, match="cannot be decoded"):
        payload_of(pul.Message("put", b'"abcde"'))


async def _answer_with_rows(request: Request) -> Reply:
    return Reply(request.op, rows=ROWS)


class TestEndpoint:
    async def test_request_as_text_is_answered_as_text(self) -> None:
        actor = EndpointActor(_answer_with_rows)
        request = wire.encode(Request("get", rows=[ROWS]))
        answer = await actor.receive(message("get", request, as_text=True))
        assert answer.payload[:1] == b'"'
        reply = wire.decode_reply(payload_of(answer))
        assert (reply.value, reply.rows, reply.reads_text) == ("get", ROWS, True)

    async def test_request_of_an_older_version_is_answered_with_bytes(self) -> None:
        actor = EndpointActor(_answer_with_rows)
        sent = pul.Message("get", wire.encode(Request("get")))
        assert not reads_text(sent)
        answer = await actor.receive(sent)
        assert wire.decode_reply(answer.payload).rows == ROWS

    def test_reply_of_an_older_version_does_not_claim_to_read_text(self) -> None:
        four_fields = msgspec.msgpack.encode(["stored", None, None, False])
        assert not wire.decode_reply(four_fields).reads_text

    def test_older_version_reads_a_reply_with_the_new_field(self) -> None:
        class OldReply(msgspec.Struct, array_like=True):
            value: object = None
            error: tuple[str, str] | None = None
            rows: bytes | None = None
            arrow: bool = False

        encoded = wire.encode(Reply("stored", reads_text=True))
        assert msgspec.msgpack.decode(encoded, type=OldReply).value == "stored"
