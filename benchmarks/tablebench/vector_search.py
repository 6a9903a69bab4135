"""Vector search: latency, recall and the time to build an index."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from corebench.report import Run, Target, stopwatch

from persisting.queue import LanceBackend
from tablebench import lance_tables
from tablebench.lance_tables import LANCE, LANCEDB
from tablebench.sizes import OURS, K, Sizes, Timed, Turns, add_latency, in_turns

_CENTRES = 200
_BUFFERED = 1000
_SHARE = 0.99
_MANY = 50_000
"""Number of vectors from which the slowest index is built too."""


def vector_search(run: Run, sizes: Sizes) -> None:
    """Search the same vectors in three tables, flat and through IVF_FLAT."""
    points, queries = _data(sizes, clustered=True)
    with run.scratch() as folder:
        asyncio.run(_search(run, folder, points, queries))
    uniform, uniform_queries = _data(sizes, clustered=False)
    with run.scratch() as folder:
        asyncio.run(_index_kinds(run, folder, uniform, uniform_queries))


def _data(sizes: Sizes, *, clustered: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return points and queries of one distribution: clustered, as embeddings are, or uniform."""
    rng = np.random.default_rng(17)
    count = sizes.vectors + sizes.queries
    if clustered:
        centres = rng.normal(size=(_CENTRES, sizes.dimensions)).astype(np.float32)
        points = centres[rng.integers(_CENTRES, size=count)]
        points += rng.normal(size=points.shape).astype(np.float32) * 0.7
    else:
        points = rng.random((count, sizes.dimensions), dtype=np.float32)
    return points[: sizes.vectors], points[sizes.vectors :]


def _table(points: np.ndarray, first: int = 0) -> pa.Table:
    flat = pa.array(np.ascontiguousarray(points).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, points.shape[1])
    return pa.table({"id": pa.array(range(first, first + len(points))), "v": vectors})


def _nearest(points: np.ndarray, query: np.ndarray) -> set[int]:
    found = ((points - query) ** 2).sum(axis=1)
    return {int(i) for i in np.argpartition(found, K)[:K]}


def _recall(found: Timed, truth: list[set[int]]) -> float:
    shares = [
        len(best & {hit["id"] for hit in hits}) / K
        for hits, best in zip(found.found, truth[: len(found.found)], strict=True)
    ]
    return float(np.mean(shares))


async def _search(run: Run, folder: Path, points: np.ndarray, queries: np.ndarray) -> None:
    table, truth = _table(points), [_nearest(points, query) for query in queries]
    backend = LanceBackend(bucket_id=0, storage_path=str(folder / "ours"), compaction=False)
    await backend.put_arrow(table)
    await backend.flush()
    raw = lance_tables.write(folder, table)
    beside_db = lance_tables.lancedb_table(folder, table)
    ours = partial(_ours, backend)
    calls: dict[str, Any] = {
        OURS: ours,
        LANCE: partial(lance_tables.lance_nearest, raw, use_index=False),
    }
    if beside_db is not None:
        calls[LANCEDB] = partial(lance_tables.lancedb_nearest, beside_db, flat=True)
    few = queries[: max(10, len(queries) // 4)]
    _report(run, "without an index", await in_turns(calls, few), truth)
    partitions = max(1, len(points) // 1024)
    with stopwatch() as built:
        await backend.create_index("v")
    with stopwatch() as built_raw:
        lance_tables.build_lance_index(raw, partitions)
    run.add("search", "building IVF_FLAT", built(), "s", LANCE, built_raw())
    raw = lance.dataset(raw.uri)
    calls = {
        OURS: ours,
        f"{LANCE}, all partitions": partial(lance_tables.lance_nearest, raw, nprobes=partitions),
        f"{LANCE}, default": partial(lance_tables.lance_nearest, raw),
    }
    if beside_db is not None:
        with stopwatch() as built_db:
            lance_tables.build_lancedb_index(beside_db, partitions)
        run.add("search", "building IVF_FLAT", built(), "s", LANCEDB, built_db())
        probing = partial(lance_tables.lancedb_nearest, beside_db, probes=partitions)
        calls[f"{LANCEDB}, all partitions"] = probing
        calls[f"{LANCEDB}, default"] = partial(lance_tables.lancedb_nearest, beside_db)
    _report(run, "IVF_FLAT", await in_turns(calls, queries), truth)
    await _search_unflushed(run, backend, queries)
    await backend.close()


async def _ours(backend: LanceBackend, query: np.ndarray) -> list[dict[str, Any]]:
    return await backend.search(vector=query, k=K, columns=["id"])


def _report(run: Run, name: str, found: Turns, truth: list[set[int]]) -> None:
    add_latency(run, "search", name, found)
    target = Target("value", at_least=_SHARE)
    recall = _recall(found[OURS], truth)
    for other, theirs in found.items():
        if other != OURS:
            value = _recall(theirs, truth)
            run.add("search", f"{name}, recall@{K}", recall, "", other, value, target)


async def _search_unflushed(run: Run, backend: LanceBackend, queries: np.ndarray) -> None:
    """Search with unflushed rows: repeatedly, and with a put before each search."""
    ours = partial(_ours, backend)
    without = (await in_turns({OURS: ours}, queries))[OURS]
    added = np.random.default_rng(3).random((_BUFFERED, queries.shape[1]), dtype=np.float32)
    await backend.put_arrow(_table(added[: _BUFFERED - 1], first=10**9))
    found = await in_turns({OURS: ours}, queries)
    name = f"IVF_FLAT and {_BUFFERED - 1:,} buffered rows"
    add_latency(run, "search", name, {**found, "none buffered": without})

    async def put_and_search(query: np.ndarray) -> list[dict[str, Any]]:
        await backend.put({"id": 1, "v": query})
        return await backend.search(vector=query, k=1, columns=["id"])

    found = await in_turns({OURS: put_and_search}, queries[:50])
    add_latency(run, "search", "a put and its search", {**found, "none buffered": without})
    if any(hits[0]["_distance"] > 1e-6 for hits in found[OURS].found):
        raise SystemExit("a search did not find a record that had just been put")


async def _index_kinds(run: Run, folder: Path, points: np.ndarray, queries: np.ndarray) -> None:
    """Compare kinds of indexes on uniform data, which is the hardest to index."""
    truth = [_nearest(points, query) for query in queries]
    backend = LanceBackend(bucket_id=0, storage_path=str(folder / "ours"), compaction=False)
    await backend.put_arrow(_table(points))
    await backend.flush()
    slow = ("ivf_hnsw_sq",) if len(points) >= _MANY else ()
    for kind in ("ivf_flat", "ivf_rq", *slow):
        with stopwatch() as built:
            await backend.create_index("v", kind)
        found = (await in_turns({OURS: partial(_ours, backend)}, queries))[OURS]
        run.add("index kinds", f"{kind}, uniform data: build", built(), "s")
        run.add("index kinds", f"{kind}, uniform data: search, p50", found.ms(0.5), "ms")
        target = Target("value", at_least=_SHARE) if kind == "ivf_flat" else None
        recall = _recall(found, truth)
        run.add("index kinds", f"{kind}, uniform data: recall@{K}", recall, "", target=target)
    await backend.close()
