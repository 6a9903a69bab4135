"""Damage to stored files."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, position: int) -> None:
    """Flip one bit of the byte at a position."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
