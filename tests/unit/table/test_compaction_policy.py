"""The compaction policy: rarely enough to be cheap, often enough to keep fragments few."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import pytest

from persisting.table.compaction import Limit, everything, worthwhile
from persisting.table.view import FragmentSize

FLUSHES = 10_000
LIMIT = Limit()


def sizes(*rows: int, width: int = 100) -> list[FragmentSize]:
    """Fragments with these numbers of rows, of ``width`` bytes each."""
    return [FragmentSize(count, count * width) for count in rows]


def joined(tail: Sequence[FragmentSize], limit: Limit) -> list[FragmentSize]:
    """The result of a compaction: neighbours joined up to a full fragment."""
    made = [tail[0]]
    for size in tail[1:]:
        last = made[-1]
        if last.rows >= limit.rows or last.nbytes >= limit.nbytes:
            made.append(size)
        else:
            made[-1] = FragmentSize(last.rows + size.rows, last.nbytes + size.nbytes)
    return made


class Life(NamedTuple):
    """The history of a table over many flushes."""

    rows: int
    rewritten: int
    most_fragments: int
    largest_rewrite: FragmentSize
    fragments: list[FragmentSize]


def live(flushes: Iterable[FragmentSize], limit: Limit = LIMIT) -> Life:
    """Simulate flushes, each followed by the compactions that are worthwhile."""
    fragments: list[FragmentSize] = []
    rows = rewritten = most = 0
    largest = FragmentSize(0, 0)
    for flushed in flushes:
        fragments.append(flushed)
        rows += flushed.rows
        while count := worthwhile(fragments, limit):
            tail = fragments[-count:]
            made = joined(tail, limit)
            assert len(made) < count, "a compaction that joins nothing would be repeated forever"
            del fragments[-count:]
            fragments += made
            taken = FragmentSize(sum(s.rows for s in tail), sum(s.nbytes for s in tail))
            rewritten += taken.rows
            largest = FragmentSize(max(largest.rows, taken.rows), max(largest.nbytes, taken.nbytes))
        most = max(most, len(fragments))
    return Life(rows, rewritten, most, largest, fragments)


def constant(rows: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: [rows] * FLUSHES


def uniform(most: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: [rng.randint(1, most) for _ in range(FLUSHES)]


SHAPES: dict[str, Callable[[random.Random], list[int]]] = {
    "one-row": constant(1),
    "ten-rows": constant(10),
    "hundred-rows": constant(100),
    "thousand-rows": constant(1_000),
    "many-rows": constant(10_000),
    "random-to-100": uniform(100),
    "random-to-20000": uniform(20_000),
    "random-magnitude": lambda rng: [int(2 ** rng.uniform(0, 15)) for _ in range(FLUSHES)],
    "growing": lambda rng: [1 + i // 10 for i in range(FLUSHES)],
    "growing-ever-faster": lambda rng: [1 + int(1.001**i) for i in range(FLUSHES)],
    "shrinking": lambda rng: [1 + (FLUSHES - i) // 10 for i in range(FLUSHES)],
    "bursts": lambda rng: [1000 if i % 31 == 0 else 1 for i in range(FLUSHES)],
}


@cache
def life_of(shape: str, width: int = 100) -> Life:
    return live(sizes(*SHAPES[shape](random.Random(1)), width=width))


CASES = [*((shape, 100) for shape in SHAPES), ("hundred-rows", 10_000), ("growing", 1_000)]


@pytest.mark.parametrize(("shape", "width"), CASES)
def test_compaction_rewrites_a_row_only_a_few_times_whatever_the_flushes(
    shape: str, width: int
) -> None:
    life = life_of(shape, width)
    assert life.rewritten <= 3.5 * life.rows


@pytest.mark.parametrize(("shape", "width"), CASES)
def test_compaction_keeps_the_number_of_fragments_low(shape: str, width: int) -> None:
    life = life_of(shape, width)
    # A fragment of at least a quarter of the limit is large enough to be left alone.
    nbytes = sum(size.nbytes for size in life.fragments)
    large = 4 * max(life.rows / LIMIT.rows, nbytes / LIMIT.nbytes)
    assert life.most_fragments <= 600 + large


@pytest.mark.parametrize(("shape", "width"), CASES)
def test_one_compaction_rewrites_little_more_than_a_full_fragment(shape: str, width: int) -> None:
    life = life_of(shape, width)
    assert life.largest_rewrite.rows <= 1.25 * LIMIT.rows
    assert life.largest_rewrite.nbytes <= 1.25 * LIMIT.nbytes


@pytest.mark.parametrize("seed", range(2))
def test_compaction_keeps_fragments_few_for_flushes_of_every_size(seed: int) -> None:
    rng = random.Random(seed)
    life = live(sizes(*(min(60_000, int(rng.paretovariate(0.7))) for _ in range(4_000))))
    assert life.most_fragments <= 1_000
    assert life.rewritten <= 3.5 * life.rows


def test_one_compaction_is_bounded_even_if_many_fragments_accumulated() -> None:
    piled = sizes(*[1_000] * FLUSHES)
    count = worthwhile(piled, LIMIT)
    assert count
    assert sum(size.rows for size in piled[-count:]) <= 2 * LIMIT.rows
    wide = sizes(*[1_000] * FLUSHES, width=10_000)
    count = worthwhile(wide, LIMIT)
    assert count
    assert sum(size.nbytes for size in wide[-count:]) <= 2 * LIMIT.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_compaction_never_rewrites_full_fragments_or_those_before_them(seed: int) -> None:
    rng = random.Random(seed)
    limit = Limit(rows=1_000, nbytes=100_000)
    fragments = sizes(*(int(2 ** rng.uniform(0, 11)) for _ in range(rng.randint(0, 200))))
    count = worthwhile(fragments, limit)
    assert 0 <= count <= len(fragments)
    for size in fragments[len(fragments) - count :]:
        assert size.rows * 4 <= limit.rows
        assert size.nbytes * 4 <= limit.nbytes


def test_compaction_is_not_worthwhile_for_few_fragments() -> None:
    for count in range(32):
        assert worthwhile(sizes(*[10] * count), LIMIT) == 0


def test_many_fragments_of_one_size_are_joined() -> None:
    assert worthwhile(sizes(*[10] * 32), LIMIT) == 32


def test_a_large_fragment_is_not_rewritten_to_join_small_ones_after_it() -> None:
    assert worthwhile(sizes(50_000, *[1] * 31), LIMIT) == 0
    assert worthwhile(sizes(50_000, *[1] * 32), LIMIT) == 32


def test_large_and_small_fragments_are_joined_if_there_are_many_of_both() -> None:
    fragments = sizes(*[32] * 31, *[1] * 32)
    assert worthwhile(fragments, LIMIT) == len(fragments)


@pytest.mark.parametrize(
    "limit",
    [Limit(rows=100, nbytes=10**9), Limit(rows=10**9, nbytes=10_000)],
    ids=["rows", "bytes"],
)
def test_fragments_that_make_a_full_one_are_joined_immediately(limit: Limit) -> None:
    assert worthwhile(sizes(24, 24, 25, 24), limit) == 0
    assert worthwhile(sizes(24, 24, 25, 25, 2), limit) == 5
    assert worthwhile(sizes(90, 24, 24, 25, 25, 2), limit) == 5


def test_a_single_fragment_is_never_rewritten() -> None:
    for rows in (1, 65_536, 262_144, 10_000_000):
        assert worthwhile(sizes(rows), LIMIT) == 0
        assert everything(sizes(rows), LIMIT) == 0


def test_full_fragments_are_never_joined() -> None:
    full = sizes(*[LIMIT.rows] * 100)
    assert worthwhile(full, LIMIT) == 0
    assert everything(full, LIMIT) == 0


def test_a_table_without_fragments_needs_no_compaction() -> None:
    assert worthwhile([], LIMIT) == 0
    assert everything([], LIMIT) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_manual_compaction_leaves_at_most_the_last_fragment_small(seed: int) -> None:
    rng = random.Random(seed)
    limit = Limit(rows=1_000, nbytes=100_000)
    fragments = sizes(*(int(2 ** rng.uniform(0, 11)) for _ in range(rng.randint(2, 60))))
    count = everything(fragments, limit)
    kept = fragments[: len(fragments) - count]
    after = kept + (joined(fragments[-count:], limit) if count else [])
    assert sum(s.rows for s in after) == sum(s.rows for s in fragments)
    for size in after[:-1]:
        assert size.rows * 2 > limit.rows or size.nbytes * 2 > limit.nbytes
    assert everything(after, limit) == 0
