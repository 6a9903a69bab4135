"""Sketches of texts, which find similar texts: MinHash with banding, as pure functions.

A text is treated as the set of its shingles, all runs of a few characters. Under any hash function,
the probability that two texts have the same smallest hash is the similarity of their sets
(Jaccard). Many functions are grouped into bands; texts that agree in all functions of one band are
candidates.

All texts of a batch are sketched together: one call of NumPy for thousands of texts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HASHES = 128
"""Hash functions per text."""

_RECALL = 0.99
"""The least probability with which a pair at the threshold becomes a candidate."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 16
"""Shingles that are hashed together; their hashes fit into the processor's cache."""
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Sketches:
    """The sketches of a batch of texts."""

    starts: Numbers
    """Where the shingles of each text start, and where those of the last one end."""
    shingles: Hashes
    """The distinct shingles of all texts, one text after the other, sorted within a text."""
    whole: Hashes
    """By text, a hash of the whole set of its shingles."""
    bands: Hashes
    """By text, one hash for each band: a matrix."""


def rows_per_band(threshold: float) -> int:
    """Return how many functions make a band: the most that still find pairs at the threshold."""
    for rows in range(HASHES, 1, -1):
        if 1 - (1 - threshold**rows) ** (HASHES // rows) >= _RECALL:
            return rows
    return 1


def sketch(texts: Sequence[str], size: int, rows: int) -> Sketches:
    """Sketch texts with shingles of ``size`` characters and bands of ``rows`` functions.

    Case, width and the amount of white space are ignored. A shorter text is one shingle.
    """
    starts, shingles = _shingles(texts, size)
    whole = _mixed(np.add.reduceat(_mixed(shingles + _STEP), starts[:-1])) if texts else shingles
    return Sketches(starts, shingles, whole, _bands(starts, shingles, rows))


def _shingles(texts: Sequence[str], size: int) -> tuple[Numbers, Hashes]:
    normalized = [_normalized(text).ljust(size, "\0") for text in texts]
    lengths = np.fromiter(map(len, normalized), np.int64, len(normalized))
    encoded = "".join(normalized).encode("utf-32-le", "surrogatepass")
    points = np.frombuffer(encoded, "<u4").astype(np.uint64)
    counts = lengths - size + 1
    owners = np.repeat(np.arange(len(texts)), counts)
    # The runs of a text start everywhere except at its last ``size - 1`` characters.
    runs = np.arange(len(owners)) + owners * (size - 1)
    hashes = np.zeros(len(runs), np.uint64)
    for place in range(size):
        hashes = _mixed((hashes ^ points[runs + place]) + _STEP)
    order = np.lexsort((hashes, owners))
    hashes, owners = hashes[order], owners[order]
    distinct = np.ones(len(hashes), bool)
    distinct[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    sizes = np.bincount(owners[distinct], minlength=len(texts))
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), hashes[distinct]


def _normalized(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def _bands(starts: Numbers, shingles: Hashes, rows: int) -> Hashes:
    """Return the bands of texts with these shingles."""
    count, texts = HASHES // rows, len(starts) - 1
    bands = np.repeat(np.arange(count, dtype=np.uint64)[None, :], texts, axis=0)
    bands = _mixed(bands + _STEP)
    first = 0
    while first < texts:
        last = int(np.searchsorted(starts, starts[first] + _BLOCK, "right")) - 1
        last = min(max(last, first + 1), texts)
        block = shingles[starts[first] : starts[last]]
        places = starts[first:last] - starts[first]
        hashed = np.empty_like(block)
        for number in range(count * rows):
            np.multiply(block, _FACTORS[number], out=hashed)
            np.add(hashed, _SUMMANDS[number], out=hashed)
            least = np.minimum.reduceat(hashed, places)
            column = bands[first:last, number // rows]
            bands[first:last, number // rows] = _mixed((column ^ least) + _STEP)
        first = last
    return bands


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of each number with splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FACTORS = _mixed(np.arange(1, HASHES + 1, dtype=np.uint64) * _STEP) | np.uint64(1)
_SUMMANDS = _mixed(np.arange(HASHES + 1, 2 * HASHES + 1, dtype=np.uint64) * _STEP)
