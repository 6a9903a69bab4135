"""Sketches of texts, by which those that share much are found: MinHash with banding, pure.

A text is the set of its shingles, all runs of a few characters. Two texts have the same smallest
hash with a probability equal to the similarity of their sets (Jaccard), under any hash function.
Many functions are cut into bands; texts that agree in all functions of some band are candidates.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HASHES = 128
"""Hash functions per text."""

_FOUND = 0.99
"""The least probability with which a pair at the threshold becomes a candidate."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 4096
Hashes = NDArray[np.uint64]


class Sketch(NamedTuple):
    """What is kept of a text."""

    whole: int
    """Equal for equal sets of shingles."""
    shingles: list[int]
    bands: list[int]


def rows_per_band(threshold: float) -> int:
    """How many functions make a band: as many as let a pair at the threshold be found."""
    for rows in range(HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (HASHES // rows) >= _FOUND:
            return rows
    return 1


def sketch(text: str, size: int, rows: int) -> Sketch:
    """The sketch of a text with shingles of ``size`` characters and bands of ``rows`` functions."""
    found = shingles(text, size)
    whole = _folded(found[None, :])
    return Sketch(_signed(whole)[0], _signed(found), _signed(bands(found, rows)))


def shingles(text: str, size: int) -> Hashes:
    """The hashes of all runs of ``size`` characters, sorted, each once.

    Case, width and white space do not count. A shorter text is one shingle.
    """
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    points = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    if len(points) < size:
        points = np.pad(points, (0, size - len(points)))
    count = len(points) - size + 1
    runs = np.lib.stride_tricks.as_strided(points, (count, size), points.strides * 2)
    return np.unique(_folded(runs))


def bands(found: Hashes, rows: int) -> Hashes:
    """One hash for each band of a text with these shingles."""
    least = np.full(HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(found), _BLOCK):
        block = found[start : start + _BLOCK]
        hashed = _FACTORS[:, None] * block[None, :] + _SUMMANDS[:, None]
        np.minimum(least, hashed.min(axis=1), out=least)
    count = HASHES // rows
    numbers = np.arange(count, dtype=np.uint64)[:, None]
    return _folded(np.hstack([numbers, least[: count * rows].reshape(count, rows)]))


def _folded(values: Hashes) -> Hashes:
    """One hash for each row of a matrix."""
    found = np.zeros(len(values), np.uint64)
    for column in values.T:
        found = _mixed((found ^ column) + _STEP)
    return found


def _mixed(values: Hashes) -> Hashes:
    """Splitmix64: every bit of a number comes to depend on all of its bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _signed(values: Hashes) -> list[int]:
    """As Spark has them, which knows no unsigned numbers."""
    found: list[int] = values.view(np.int64).tolist()
    return found


_FACTORS = _mixed(np.arange(1, HASHES + 1, dtype=np.uint64) * _STEP) | np.uint64(1)
_SUMMANDS = _mixed(np.arange(HASHES + 1, 2 * HASHES + 1, dtype=np.uint64) * _STEP)
