"""Full-text search: latency and the time to build an index."""

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
from tablebench import lance_tables
from tablebench.lance_tables import LANCE, LANCEDB
from tablebench.sizes import OURS, K, Sizes, add_latency, in_turns


def text_search(run: Run, sizes: Sizes) -> None:
    """Search texts of seven words by two of their words, with and without an index."""
    with run.scratch() as folder:
        asyncio.run(_measure(run, folder, sizes))


async def _measure(run: Run, folder: Path, sizes: Sizes) -> None:
    rows = list(records.stream(sizes.vectors))
    table = pa.table({name: [row[name] for row in rows] for name in ("id", "text")})
    rng = random.Random(4)
    queries = [" ".join(rng.choice(rows)["text"].split()[:2]) for _ in range(sizes.queries)]
    backend = LanceBackend(bucket_id=0, storage_path=str(folder / "ours"), compaction=False)
    await backend.put_arrow(table)
    await backend.flush()
    raw = lance_tables.write(folder, table)
    beside_db = lance_tables.lancedb_table(folder, table)
    with stopwatch() as built:
        await backend.create_index("text", "text")
    with stopwatch() as built_raw:
        raw.create_scalar_index("text", "INVERTED", stem=False, remove_stop_words=False)
    run.add("text", "building the text index", built(), "s", LANCE, built_raw())
    raw = lance.dataset(raw.uri)

    async def ours(text: str) -> list[dict[str, Any]]:
        return await backend.search(text=text, column="text", k=K, columns=["id"])

    calls: dict[str, Any] = {OURS: ours, LANCE: partial(_lance, raw)}
    if beside_db is not None:
        with stopwatch() as built_db:
            beside_db.create_fts_index("text", stem=False, remove_stop_words=False)
        run.add("text", "building the text index", built(), "s", LANCEDB, built_db())
        calls[LANCEDB] = partial(_lancedb, beside_db)
    add_latency(run, "text", "two words, indexed", await in_turns(calls, queries))
    await backend.drop_index("text")
    add_latency(run, "text", "two words, no index", await in_turns({OURS: ours}, queries[:10]))
    await backend.close()


def _lance(dataset: Any, text: str) -> list[dict[str, Any]]:
    scanner = dataset.scanner(columns=["id", "_score"], full_text_query=text, limit=K)
    found: list[dict[str, Any]] = scanner.to_table().to_pylist()
    return found


def _lancedb(table: Any, text: str) -> list[dict[str, Any]]:
    search = table.search(text, query_type="fts").select(["id", "_score"]).limit(K)
    found: list[dict[str, Any]] = search.to_list()
    return found
