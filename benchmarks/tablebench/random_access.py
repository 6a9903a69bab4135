"""Random access before and after compaction: pages, single offsets, keys."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from corebench import records
from corebench.report import Run, stopwatch

from persisting.queue import LanceBackend
from tablebench.lance_tables import LANCE
from tablebench.sizes import OURS, Sizes, Timed, add_latency, in_turns

_FLUSH = 1000
_PAGE = 100
_TAKEN = 100
_COLUMNS = list(records.FIELDS)


def random_access(run: Run, sizes: Sizes) -> None:
    """Measure a table with one fragment per flush, then the same table compacted."""
    with run.scratch() as folder:
        asyncio.run(_access(run, folder, sizes))


async def _access(run: Run, folder: Path, sizes: Sizes) -> None:
    backend = LanceBackend(
        bucket_id=0, storage_path=str(folder), compaction=False, flush_threshold=1 << 40
    )
    rows = list(records.stream(sizes.records))
    for start in range(0, len(rows), _FLUSH):
        await backend.put_arrow(pa.Table.from_pylist(rows[start : start + _FLUSH]))
        await backend.flush()
    rng = random.Random(5)
    offsets = [rng.randrange(len(rows) - _PAGE) for _ in range(sizes.queries)]
    many = [[rng.randrange(len(rows)) for _ in range(_TAKEN)] for _ in range(sizes.queries)]
    keys = [rows[rng.randrange(len(rows))]["id"] for _ in range(sizes.queries)]
    before = await _measure(run, "before", backend, folder, offsets, many)
    with stopwatch() as seconds:
        done = await backend.compact()
    run.add(
        "access",
        f"compact(), {done['fragments_before']:,} to {done['fragments_after']:,} fragments",
        seconds(),
        "s",
    )
    after = await _measure(run, "after", backend, folder, offsets, many)
    for name, earlier in before.items():
        found = {OURS: after[name], "before": earlier}
        add_latency(run, "access", f"{name} after compaction", found)
    await _keys(run, backend, folder, keys)
    await backend.close()


async def _measure(
    run: Run,
    when: str,
    backend: LanceBackend,
    folder: Path,
    offsets: list[int],
    many: list[list[int]],
) -> dict[str, Timed]:
    dataset = lance.dataset(str(folder / "data.lance"))
    paging = {OURS: lambda offset: backend.get(offset, _PAGE), LANCE: partial(_page, dataset)}
    pages = await in_turns(paging, offsets)
    add_latency(run, "access", f"get({_PAGE}) at random, {when}", pages)
    taken = await in_turns({OURS: backend.take, LANCE: partial(_take, dataset)}, many)
    add_latency(run, "access", f"take of {_TAKEN} at random, {when}", taken)
    return {f"get({_PAGE}) at random,": pages[OURS], f"take of {_TAKEN} at random,": taken[OURS]}


def _page(dataset: Any, offset: int) -> list[dict[str, Any]]:
    scanner = dataset.scanner(columns=_COLUMNS, offset=offset, limit=_PAGE)
    found: list[dict[str, Any]] = scanner.to_table().to_pylist()
    return found


def _take(dataset: Any, offsets: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dataset.take(offsets, columns=_COLUMNS).to_pylist()
    return found


async def _keys(run: Run, backend: LanceBackend, folder: Path, keys: list[str]) -> None:
    """Measure ``lookup`` of a unique key."""
    few = keys[: max(10, len(keys) // 10)]
    path = str(folder / "data.lance")
    ours = partial(_looked_up, backend)
    plain = await in_turns({OURS: ours, LANCE: partial(_filtered, lance.dataset(path))}, few)
    add_latency(run, "access", "lookup without an index", plain)
    with stopwatch() as seconds:
        await backend.create_index("id", "scalar")
    run.add("access", "building the BTREE", seconds(), "s")
    indexed = await in_turns({OURS: ours, LANCE: partial(_filtered, lance.dataset(path))}, keys)
    found = {**indexed, "without an index": plain[OURS]}
    add_latency(run, "access", "lookup with a BTREE", found)


async def _looked_up(backend: LanceBackend, key: str) -> None:
    found = await backend.lookup("id", key)
    if [row["id"] for row in found] != [key]:
        raise SystemExit(f"looked up {key}, found {found}")


def _filtered(dataset: Any, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dataset.to_table(filter=f"id = '{key}'").to_pylist()
    return found
