"""Compression of log frames, with on-disk ids that never change.

The codecs are those of Arrow's C++ library. :mod:`persisting.table.layout` decides what the table
uses for the same option.
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
"""No frame is larger than this when decompressed; a larger length means damage."""


def codec_id(name: str | None) -> int:
    """Return the on-disk id of a ``compression`` option."""
    return _IDS[name]


def compress(codec: int, raw: bytes | memoryview) -> bytes | memoryview:
    """Compress ``raw``; the caller stores ``raw`` itself if the result is not smaller."""
    if codec == NONE:
        return raw
    import pyarrow as pa

    # As bytes: the memoryview of Arrow's buffer reports its capacity, not its size.
    return pa.Codec(_ARROW_NAMES[codec]).compress(raw, asbytes=True)


def decompress(codec: int, packed: bytes | memoryview, raw_length: int) -> bytes | memoryview:
    """Decompress to exactly ``raw_length`` bytes, or raise :class:`WALError`."""
    if codec == NONE:
        if len(packed) != raw_length:
            raise WALError(
                f"an uncompressed frame has {len(packed)} bytes, its header says {raw_length}"
            )
        return packed
    if codec not in _ARROW_NAMES:
        raise WALError(f"unknown codec id {codec}: the log was written by a newer version")
    if raw_length > MAX_RAW_BYTES:
        raise WALError(f"a frame header says {raw_length} bytes, more than any frame holds")
    import pyarrow as pa

    try:
        return pa.Codec(_ARROW_NAMES[codec]).decompress(packed, raw_length, asbytes=True)
    except (pa.ArrowException, OSError) as exc:
        raise WALError(f"a {_ARROW_NAMES[codec]} frame cannot be decompressed: {exc}") from exc
