"""Sketches of texts, which find similar texts: MinHash with banding, as pure functions.

A text is treated as the set of its shingles, all runs of a few characters. Under any hash function,
the probability that two texts have the same smallest hash is the similarity of their sets
(Jaccard). Many functions are grouped into bands; texts that agree in all functions of one band are
candidates.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HASHES = 128
"""Hash functions per text."""

_RECALL = 0.99
"""The least probability with which a pair at the threshold becomes a candidate."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 4096
Hashes = NDArray[np.uint64]


class Sketch(NamedTuple):
    """The sketch of a text."""

    whole: int
    """A hash of the whole set of shingles."""
    shingles: list[int]
    bands: list[int]


def rows_per_band(threshold: float) -> int:
    """Return how many functions make a band: the most that still find pairs at the threshold."""
    for rows in range(HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (HASHES // rows) >= _RECALL:
            return rows
    return 1


def sketch(text: str, size: int, rows: int) -> Sketch:
    """Sketch a text with shingles of ``size`` characters and bands of ``rows`` functions."""
    hashes = shingles(text, size)
    whole = _folded(hashes[None, :])
    return Sketch(_signed(whole)[0], _signed(hashes), _signed(bands(hashes, rows)))


def shingles(text: str, size: int) -> Hashes:
    """Return the distinct hashes of all runs of ``size`` characters, sorted.

    Case, width and the amount of white space are ignored. A shorter text is one shingle.
    """
    normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    points = np.frombuffer(normalized.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    if len(points) < size:
        points = np.pad(points, (0, size - len(points)))
    count = len(points) - size + 1
    runs = np.lib.stride_tricks.as_strided(points, (count, size), points.strides * 2)
    return np.unique(_folded(runs))


def bands(hashes: Hashes, rows: int) -> Hashes:
    """Return one hash for each band of a text with these shingles."""
    least = np.full(HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashes), _BLOCK):
        block = hashes[start : start + _BLOCK]
        hashed = _FACTORS[:, None] * block[None, :] + _SUMMANDS[:, None]
        np.minimum(least, hashed.min(axis=1), out=least)
    count = HASHES // rows
    numbers = np.arange(count, dtype=np.uint64)[:, None]
    return _folded(np.hstack([numbers, least[: count * rows].reshape(count, rows)]))


def _folded(values: Hashes) -> Hashes:
    """Return one hash for each row of a matrix."""
    hashes = np.zeros(len(values), np.uint64)
    for column in values.T:
        hashes = _mixed((hashes ^ column) + _STEP)
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of each number with splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _signed(values: Hashes) -> list[int]:
    """Reinterpret hashes as signed numbers: Spark has no unsigned ones."""
    hashes: list[int] = values.view(np.int64).tolist()
    return hashes


_FACTORS = _mixed(np.arange(1, HASHES + 1, dtype=np.uint64) * _STEP) | np.uint64(1)
_SUMMANDS = _mixed(np.arange(HASHES + 1, 2 * HASHES + 1, dtype=np.uint64) * _STEP)
