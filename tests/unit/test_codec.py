"""Compression of log frames."""

from __future__ import annotations

import pytest

from persisting import codec
from persisting.queue import WALError

NAMES = [None, "zstd", "lz4", "snappy"]
TEXT = b"a line of text that repeats itself\n" * 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("raw", [b"", b"x", bytes(range(256)), TEXT], ids=len)
def test_decompress_returns_what_was_compressed(name: str | None, raw: bytes) -> None:
    number = codec.codec_id(name)
    packed = codec.compress(number, raw)
    assert bytes(codec.decompress(number, packed, len(raw))) == raw


def test_codec_ids_never_change() -> None:
    assert [codec.codec_id(name) for name in NAMES] == [0, 1, 2, 3]


def test_every_codec_shrinks_text_and_zstd_shrinks_it_most() -> None:
    sizes = {name: len(codec.compress(codec.codec_id(name), TEXT)) for name in NAMES}
    assert sizes["zstd"] < sizes["lz4"] < len(TEXT) // 10
    assert sizes["snappy"] < len(TEXT) // 5
    assert sizes[None] == len(TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_decompress_raises_on_a_wrong_length(name: str | None) -> None:
    number = codec.codec_id(name)
    packed = bytes(codec.compress(number, TEXT))
    with pytest.raises(WALError):
        codec.decompress(number, packed, len(TEXT) - 1)


@pytest.mark.parametrize("name", ["zstd", "lz4", "snappy"])
def test_decompress_raises_on_garbage(name: str) -> None:
    with pytest.raises(WALError):
        codec.decompress(codec.codec_id(name), b"\xff\x00garbage" * 5, 100)


def test_decompress_names_an_unknown_codec_id() -> None:
    with pytest.raises(WALError, match="newer version"):
        codec.decompress(99, b"", 0)


def test_decompress_refuses_an_absurd_length_before_it_allocates() -> None:
    with pytest.raises(WALError):
        codec.decompress(codec.ZSTD, b"abc", 1 << 40)
