"""Retention drops whole fragments, the oldest first, and never one too many."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest

from persisting import fs
from persisting.errors import InvalidArgument
from persisting.records import EMPTY
from persisting.table.layout import ARRIVAL_FIELD
from persisting.table.retention import Limits, droppable
from persisting.table.table import Table
from persisting.table.view import FragmentSize, TableView

SCHEMA = pa.schema([("i", pa.int64())])
HOUR = 3600.0


def view_of(*rows: int, start: int = 0, width: int = 10) -> TableView:
    """A view of fragments with these numbers of rows, of ``width`` bytes each, from ``start``."""
    return TableView(
        None, EMPTY, tuple(FragmentSize(count, count * width) for count in rows), start
    )


def arrived(folder: Path, *hours_ago: float | tuple[float, ...]) -> Table:
    """A table with one fragment for each arrival time or list of arrival times."""
    table = Table(folder, fs.current())
    now = time.time()
    for number, hours in enumerate(hours_ago, 1):
        times = hours if isinstance(hours, tuple) else (hours,)
        stamps = [int((now - one * HOUR) * 1e6) for one in times]
        batch = pa.RecordBatch.from_pydict({"i": list(range(len(times)))}, schema=SCHEMA)
        table.append([(batch, pa.array(stamps, ARRIVAL_FIELD.type))], SCHEMA, number)
    return table


def left(view: TableView, count: int) -> tuple[int, int]:
    """(rows, bytes) that remain without the first ``count`` fragments."""
    kept = view.sizes[count:]
    return sum(s.rows for s in kept), sum(s.nbytes for s in kept)


@pytest.mark.parametrize(
    ("rows", "count"),
    [(100, 0), (61, 0), (60, 0), (51, 0), (50, 1), (49, 1), (31, 1), (30, 2), (1, 2), (0, 3)],
)
def test_retention_keeps_at_least_the_given_rows(rows: int, count: int) -> None:
    assert droppable(view_of(10, 20, 30), Limits(rows=rows)) == count


@pytest.mark.parametrize(
    ("nbytes", "count"), [(1000, 0), (501, 0), (500, 1), (301, 1), (300, 2), (1, 2), (0, 3)]
)
def test_retention_keeps_at_least_the_given_bytes(nbytes: int, count: int) -> None:
    assert droppable(view_of(10, 20, 30), Limits(nbytes=nbytes)) == count


def test_a_fragment_beyond_any_limit_is_dropped() -> None:
    view = view_of(10, 20, 30)
    assert droppable(view, Limits(rows=50, nbytes=300)) == 2
    assert droppable(view, Limits(rows=30, nbytes=500)) == 2
    assert droppable(view, Limits(rows=1000, nbytes=500)) == 1


def test_retention_without_a_limit_drops_nothing() -> None:
    assert not Limits().any
    assert droppable(view_of(10, 20, 30), Limits()) == 0


def test_an_empty_table_has_nothing_to_drop(tmp_path: Path) -> None:
    limits = Limits(rows=0, nbytes=0, seconds=0.0)
    assert droppable(view_of(), limits) == 0
    assert droppable(view_of(start=500), limits) == 0
    assert droppable(Table(tmp_path, fs.current()).view, limits) == 0


@pytest.mark.parametrize("seed", range(50))
def test_retention_drops_as_many_fragments_as_the_limits_allow(seed: int) -> None:
    rng = random.Random(seed)
    view = view_of(
        *(rng.randint(1, 40) for _ in range(rng.randint(1, 30))), start=rng.randint(0, 9)
    )
    rows, nbytes = rng.randint(0, 600), rng.randint(0, 6000)
    for limits, wanted in ((Limits(rows=rows), (rows, 0)), (Limits(nbytes=nbytes), (0, nbytes))):
        count = droppable(view, limits)
        kept = left(view, count)
        if count:
            assert kept[0] >= wanted[0]
            assert kept[1] >= wanted[1]
        if count < len(view.sizes):
            fewer = left(view, count + 1)
            assert fewer[0] < wanted[0] or fewer[1] < wanted[1]


@pytest.mark.parametrize(("seconds", "count"), [(5 * HOUR, 0), (2.5 * HOUR, 1), (1.5 * HOUR, 2)])
def test_a_fragment_is_dropped_when_its_youngest_row_is_too_old(
    tmp_path: Path, seconds: float, count: int
) -> None:
    table = arrived(tmp_path, (9, 3), (3, 2), (2, 1))
    assert droppable(table.view, Limits(seconds=seconds)) == count


def test_all_fragments_are_dropped_when_all_rows_are_too_old(tmp_path: Path) -> None:
    table = arrived(tmp_path, 4, 3, 2)
    assert droppable(table.view, Limits(seconds=HOUR)) == 3
    assert droppable(table.view, Limits(seconds=0.0)) == 3


def test_retention_by_age_considers_only_remaining_rows(tmp_path: Path) -> None:
    from persisting.table import operations

    table = arrived(tmp_path, (4, 4, 4), (3, 3), 2, 1)
    assert operations.drop_first(table, 2) == 5
    assert table.view.start == 5
    assert droppable(table.view, Limits(seconds=2.5 * HOUR)) == 0
    assert droppable(table.view, Limits(seconds=1.5 * HOUR)) == 1


def test_age_or_rows_alone_is_enough_to_drop_a_fragment(tmp_path: Path) -> None:
    table = arrived(tmp_path, 4, 3, 2, 1)
    assert droppable(table.view, Limits(seconds=3.5 * HOUR, rows=1)) == 3
    assert droppable(table.view, Limits(seconds=1.5 * HOUR, rows=4)) == 3


@pytest.mark.parametrize(
    ("floor", "count"),
    [(0, 0), (99, 0), (100, 0), (109, 0), (110, 1), (129, 1), (130, 2), (999, 3)],
)
def test_rows_at_or_above_the_floor_are_kept(floor: int, count: int) -> None:
    view = view_of(10, 20, 30, start=100)
    assert droppable(view, Limits(rows=0), floor) == count


def test_a_floor_drops_nothing_that_the_limits_keep() -> None:
    assert droppable(view_of(10, 20, 30), Limits(rows=50), floor=60) == 1
    assert droppable(view_of(10, 20, 30), Limits(rows=60), floor=60) == 0


def test_the_floor_also_applies_to_retention_by_age(tmp_path: Path) -> None:
    table = arrived(tmp_path, 4, 3, 2, 1)
    assert droppable(table.view, Limits(seconds=0.0), floor=2) == 2


@pytest.mark.parametrize(
    "limits",
    [
        Limits(rows=-1),
        Limits(nbytes=-1),
        Limits(seconds=-0.5),
        Limits(seconds=float("nan")),
        Limits(rows=True),
        Limits(rows="5"),  # type: ignore[arg-type]
    ],
)
def test_invalid_retention_limits_are_refused(limits: Limits) -> None:
    with pytest.raises(InvalidArgument, match="retention by"):
        limits.check()


def test_a_retention_limit_may_be_zero() -> None:
    for limits in (Limits(rows=0), Limits(nbytes=0), Limits(seconds=0.0)):
        limits.check()
        assert limits.any
