"""Compression of log frames, with ids that never change on disk.

The codecs are the real ones of Arrow's C++ library. What the table uses for the same option is
decided in :mod:`persisting.table.layout`.
"""

from __future__ import annotations

from persisting.errors import WALError

NONE = 0
ZSTD = 1
LZ4 = 2
SNAPPY = 3

_IDS = {None: NONE, "zstd": ZSTD, "lz4": LZ4, "snappy": SNAPPY}
_ARROW_NAMES = {ZSTD: "zstd", LZ4: "lz4_raw", SNAPPY: "snappy"}

MAX_RAW_BYTES = 1 << 31
"""No frame unpacks to more than this; a larger claim is damage."""


def codec_id(name: str | None) -> int:
    """The on-disk id of a ``compression`` option."""
    return _IDS[name]


def compress(codec: int, raw: bytes | memoryview) -> bytes | memoryview:
    """Pack ``raw``; the caller keeps ``raw`` itself where that is not smaller."""
    if codec == NONE:
        return raw
    import pyarrow as pa

    # As bytes: the memoryview of Arrow's buffer reports its capacity, not its size.
    return pa.Codec(_ARROW_NAMES[codec]).compress(raw, asbytes=True)


def decompress(codec: int, packed: bytes | memoryview, raw_length: int) -> bytes | memoryview:
    """Unpack to exactly ``raw_length`` bytes or raise :class:`WALError`."""
    if codec == NONE:
        if len(packed) != raw_length:
            raise WALError(f"a plain frame of {len(packed)} bytes claims to hold {raw_length}")
        return packed
    if codec not in _ARROW_NAMES:
        raise WALError(f"unknown codec id {codec}: the log was written by a newer version")
    if raw_length > MAX_RAW_BYTES:
        raise WALError(f"a frame claims {raw_length} bytes, more than any frame holds")
    import pyarrow as pa

    try:
        return pa.Codec(_ARROW_NAMES[codec]).decompress(packed, raw_length, asbytes=True)
    except (pa.ArrowException, OSError) as exc:
        raise WALError(f"a {_ARROW_NAMES[codec]} frame does not unpack: {exc}") from exc
