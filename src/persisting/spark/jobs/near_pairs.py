"""Finds similar texts within the memory of one process.

The steps are those of the distributed join: sketch, pair the texts that share a band, compare the
sets of shingles exactly. Here each step works on arrays of all texts, which for millions of short
texts is many times faster than moving them between processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persisting.spark.jobs import minhash
from persisting.spark.jobs.minhash import Numbers, Sketches

Report = Callable[[str], None]
"""Takes a line that says what is being done."""

_TEXTS = 8192
"""Texts that are sketched together."""
_PENDING = 1 << 22
"""Pairs that are found before equal ones are removed."""
_PAIRS = 1 << 16
"""Pairs that are compared between two reports."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts, by their numbers; ``first`` is before ``second``."""

    first: Numbers
    second: Numbers
    similarity: NDArray[np.float64]


def find_pairs(
    texts: Sequence[str],
    threshold: float,
    shingle: int,
    crowd: int,
    report: Report,
) -> Pairs:
    """Return the pairs of texts that reach the threshold; equal texts are paired with the first.

    Up to ``crowd`` texts that share a band are all compared with each other; in a larger group,
    each is compared with the first.
    """
    sketches = _sketch_all(texts, shingle, minhash.rows_per_band(threshold), report)
    _, kept, group = np.unique(sketches.whole, return_index=True, return_inverse=True)
    kept_of = kept[group]
    copies = np.flatnonzero(kept_of != np.arange(len(texts)))
    first, second = _candidates(sketches, np.sort(kept), threshold, crowd, report)
    similarity = _compared(sketches, first, second, report)
    near = similarity >= threshold
    return Pairs(
        np.concatenate([first[near], kept_of[copies]]),
        np.concatenate([second[near], copies]),
        np.concatenate([similarity[near], np.ones(len(copies))]),
    )


def _sketch_all(texts: Sequence[str], shingle: int, rows: int, report: Report) -> Sketches:
    blocks = [texts[start : start + _TEXTS] for start in range(0, len(texts), _TEXTS)]
    done, parts = 0, []
    # NumPy computes without holding Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for block, part in zip(
            blocks,
            pool.map(lambda block: minhash.sketch(block, shingle, rows), blocks),
            strict=True,
        ):
            parts.append(part)
            done += len(block)
            report(f"sketched {done:,} of {len(texts):,} texts")
    return _joined(parts)


def _joined(parts: Sequence[Sketches]) -> Sketches:
    ends = np.cumsum([0, *(len(part.shingles) for part in parts)])
    starts = [part.starts[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
    return Sketches(
        np.concatenate([*starts, ends[-1:]]),
        np.concatenate([part.shingles for part in parts]),
        np.concatenate([part.whole for part in parts]),
        np.concatenate([part.bands for part in parts]),
    )


def _candidates(
    sketches: Sketches, kept: Numbers, threshold: float, crowd: int, report: Report
) -> tuple[Numbers, Numbers]:
    """Return the distinct pairs of different texts that share a band, in order."""
    count = len(sketches.whole)
    sizes = np.diff(sketches.starts)
    keys = np.empty(0, np.int64)
    pending = [keys]
    bands = np.ascontiguousarray(sketches.bands[kept].T)
    for number, band in enumerate(bands, 1):
        first, second = _sharing(band, crowd)
        first, second = kept[first], kept[second]
        smaller = np.minimum(sizes[first], sizes[second])
        # Sets of very different sizes cannot be similar.
        possible = smaller >= threshold * np.maximum(sizes[first], sizes[second])
        pending.append(first[possible] * count + second[possible])
        if number == len(bands) or sum(map(len, pending[1:])) > max(_PENDING, len(keys)):
            keys = np.unique(np.concatenate(pending))
            pending = [keys]
        report(f"searched {number} of {len(bands)} bands for pairs")
    return keys // count, keys % count


def _sharing(band: minhash.Hashes, crowd: int) -> tuple[Numbers, Numbers]:
    """Return the pairs of places at which a band has the same value, the smaller place first."""
    order = np.argsort(band, kind="stable")
    values = band[order]
    begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    sizes = np.diff(np.append(begins, len(values)))
    small = (sizes > 1) & (sizes <= crowd)
    place = _ranges(begins[small], sizes[small])
    ends = np.repeat(begins[small] + sizes[small], sizes[small])
    partners = ends - 1 - place
    first = np.repeat(place, partners)
    second = _ranges(place + 1, partners)
    large = sizes > crowd
    heads = np.repeat(begins[large], sizes[large] - 1)
    others = _ranges(begins[large] + 1, sizes[large] - 1)
    return order[np.concatenate([first, heads])], order[np.concatenate([second, others])]


def _ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """Return ``counts`` consecutive numbers from each of ``starts`` on, in one array."""
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within


def _compared(
    sketches: Sketches, first: Numbers, second: Numbers, report: Report
) -> NDArray[np.float64]:
    """Return the similarity of each pair; the pairs are sorted by their first text."""
    sizes = np.diff(sketches.starts)
    common = np.empty(len(first), np.int64)
    done = 0
    for block in _common_counts(sketches, first, second):
        common[done : done + len(block)] = block
        done += len(block)
        report(f"compared {done:,} of {len(first):,} pairs")
    return common / np.maximum(1, sizes[first] + sizes[second] - common)


def _common_counts(sketches: Sketches, first: Numbers, second: Numbers) -> Iterator[list[int]]:
    """Yield, in blocks, how many shingles the texts of each pair have in common."""
    starts, shingles = sketches.starts, sketches.shingles
    known, own = -1, frozenset[int]()
    for begin in range(0, len(first), _PAIRS):
        counts = []
        stop = begin + _PAIRS
        for one, other in zip(first[begin:stop].tolist(), second[begin:stop].tolist(), strict=True):
            if one != known:
                known, own = one, frozenset(shingles[starts[one] : starts[one + 1]].tolist())
            theirs = shingles[starts[other] : starts[other + 1]].tolist()
            counts.append(len(own.intersection(theirs)))
        yield counts
